"""On PYTHONPATH of a server under test: a line in the file that `MIXED_BATCHES` names for each batch of prefill and
decode rows, as the scheduler puts it together: the rows of either kind.
"""

import importlib.abc
import importlib.util
import os
import sys

_MODULE = "sglang.srt.managers.schedule_batch"


def _patch(module):
    batch = module.ScheduleBatch
    mix = batch.mix_with_running

    def mix_with_running(self, running_batch):
        prefill = sum(self.extend_lens)
        mix(self, running_batch)
        with open(os.environ["MIXED_BATCHES"], "a") as log:
            log.write(f"{prefill} {sum(self.extend_lens) - prefill}\n")

    batch.mix_with_running = mix_with_running


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    done = False

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE or self.done:
            return None
        self.done = True
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module
        return spec


if "MIXED_BATCHES" in os.environ:
    sys.meta_path.insert(0, _PatchAfterImport())
