"""On PYTHONPATH of a server under test: on the device, the last page of every load gets the bytes of its first."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from after_import import after_import


def _patch(module):
    copier = module.TorchPageCopier
    load = copier.load

    def load_wrongly(self, pages, source, landed):
        def then(layer):
            if layer == self.layers - 1 and len(pages) > 1:
                for part in self._parts():
                    part.rows[pages[-1]] = part.rows[pages[0]]
            landed(layer)

        load(self, pages, source, then)

    copier.load = load_wrongly


after_import("glm_sglang.cache.copier", _patch)
