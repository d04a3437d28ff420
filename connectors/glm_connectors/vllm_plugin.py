"""The repairs of LMCache inside vLLM: entry point `glm_lmcache_repairs` of vLLM's group `vllm.general_plugins`.

    pip install --no-deps glm-sglang  # beside vLLM and lmcache==0.5.6, without SGLang

vLLM calls it in every process (API server, engine core, workers) before that process has a KV connector.
`VLLM_PLUGINS`, where set, must name it.

This module imports the standard library only, and nothing here imports LMCache. UPSTREAM:
`vllm.plugins.load_plugins_by_group` logs an entry point that can't be imported, and serves without it; what the
loaded function raises ends the process. A plugin that imports LMCache ends the worker of vLLM 0.32 on a CPU: it
leaves a cffi library in `sys.modules`, on which `vllm.triton_utils.dispatcher` fails.
"""

from __future__ import annotations

import importlib.util
import logging
import os

NAME = "glm_lmcache_repairs"
# UPSTREAM: vLLM configures the logger "vllm" and leaves the root logger at WARNING.
logger = logging.getLogger(f"vllm.plugins.{NAME}")


def install() -> None:
    """Repairs LMCache in this process and says so in vLLM's log.

    ContractError, which ends the process, where LMCache is not the one that the repairs were tested with.
    """
    if importlib.util.find_spec("lmcache") is None:
        logger.info("%s: LMCache is not installed here, so there is nothing to repair", NAME)
        return
    from glm_connectors import lmcache_repairs

    try:
        lmcache_repairs.install()
    except lmcache_repairs.ContractError as error:
        raise lmcache_repairs.ContractError(
            f"{error}\nTo run this vLLM without the repairs, list in VLLM_PLUGINS the plugins that it needs "
            f"(none: VLLM_PLUGINS=), without {NAME}."
        ) from None
    modules = {repair.module for repair in lmcache_repairs.REPAIRS}
    logger.info(
        "%s: process %d repairs %d modules of LMCache as it imports them",
        NAME,
        os.getpid(),
        len(modules),
    )
