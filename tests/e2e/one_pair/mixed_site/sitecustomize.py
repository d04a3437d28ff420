"""On PYTHONPATH of a server under test: a line in the file that `MIXED_BATCHES` names for each batch of prefill and
decode rows, as the scheduler puts it together: the rows of either kind.
"""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2]))
from after_import import after_import

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


if "MIXED_BATCHES" in os.environ:
    after_import(_MODULE, _patch)
