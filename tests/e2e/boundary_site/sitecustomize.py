"""On PYTHONPATH of a prefill server under test: once N batches of a request called `stops-after-N` have been
launched, the scheduler takes no further step before an abort of it has come, and says in its log that it waits.

What is replaced is when the scheduler reads its input, never what it does with it.
"""

import importlib.abc
import importlib.util
import re
import sys
import time

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


sys.meta_path.insert(0, _PatchAfterImport())
