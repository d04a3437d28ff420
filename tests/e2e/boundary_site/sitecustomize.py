"""On PYTHONPATH of a prefill server under test: once N batches of a request called `stops-after-N` have been
launched, the scheduler takes no further step before an abort of it has come, and says in its log that it waits.

What is replaced is when the scheduler reads its input, never what it does with it.
"""

import pathlib
import re
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from after_import import after_import

_MODULE = "sglang.srt.managers.scheduler"
_NAME = re.compile(r"stops-after-(\d+)")


def _patch(module):
    scheduler = module.Scheduler
    run, ingest = scheduler.run_batch, scheduler.ingest_requests
    left = {}  # batches to be launched, by request

    def run_batch(self, batch, *rest, **more):
        for req in batch.reqs:
            if found := _NAME.fullmatch(req.rid):
                left[req.rid] = left.get(req.rid, int(found[1])) - 1
        return run(self, batch, *rest, **more)

    def ingest_requests(self, *rest, **more):
        inputs = ingest(self, *rest, **more)
        for rid in [rid for rid, batches in left.items() if batches == 0]:
            module.logger.info("%s waits for its abort", rid)
            while not any(isinstance(one, module.AbortReq) and one.rid == rid for one in inputs):
                time.sleep(0.001)
                inputs = [*inputs, *ingest(self, *rest, **more)]
            del left[rid]
        return inputs

    scheduler.run_batch, scheduler.ingest_requests = run_batch, ingest_requests


after_import(_MODULE, _patch)
