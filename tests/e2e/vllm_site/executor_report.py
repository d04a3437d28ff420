"""What a vLLM worker says of LMCache's executor in its process: `--worker-extension-cls executor_report.Report`."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from pathlib import Path
from typing import Any


class Report:
    """Mixed into vLLM's worker; `POST /collective_rpc {"method": "executor_report"}` calls it there."""

    def executor_report(self) -> dict[str, Any]:
        """Of the executor behind the remote backend: what its workers run, and how many of them are alive.

        bodies: for each worker task that is left on the executor's loop, the last two parts of the path of the file
        whose coroutine it runs. failed_gets: batches of which LMCache counts a part as failed. counters: the repairs',
        all 0 where the plugin has not run.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        engine = get_kv_transfer_group()._lmcache_engine.lmcache_engine
        remote = engine.storage_manager.storage_backends["RemoteBackend"]
        executor = remote.connection.getWrappedConnector().pq_executor
        repairs = sys.modules.get("glm_connectors.lmcache_repairs")

        async def bodies() -> list[str]:
            coroutines = [task.get_coro() for task in asyncio.all_tasks()]
            return [
                "/".join(Path(one.cr_code.co_filename).parts[-2:])
                for one in coroutines
                if inspect.iscoroutine(one) and one.cr_code.co_name == "_worker"
            ]

        return {
            "pid": os.getpid(),
            "executor": f"{type(executor).__module__}.{type(executor).__name__}",
            "bodies": asyncio.run_coroutine_threadsafe(bodies(), executor.loop).result(30),
            "alive": sum(not worker.done() for worker in executor._workers),
            "failed_gets": remote._get_blocking_failed_count,
            "repaired": repairs is not None and repairs.installed(),
            "counters": repairs.COUNTERS.snapshot() if repairs is not None else {},
        }
