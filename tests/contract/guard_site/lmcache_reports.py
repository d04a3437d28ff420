"""Does what LMCache's engine does about usage reports when it is created, and waits for them.

`python -m lmcache_reports ours` sets this fork's defaults first.
"""

import sys
import threading

import torch

if "ours" in sys.argv:
    from glm_sglang import offline

    offline.set_defaults()

from lmcache.usage_telemetry import InitializeUsageContext
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata

metadata = LMCacheMetadata(
    model_name="m",
    world_size=1,
    local_world_size=1,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=torch.bfloat16,
    kv_shape=(1, 2, 64, 1, 64),
)
InitializeUsageContext(LMCacheEngineConfig.from_defaults(), metadata)
for thread in threading.enumerate():
    if thread.name == "lmcache-usage-report":
        thread.join()
