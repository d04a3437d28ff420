"""SGLang's radix tree over the reference platform's DSA pool on the CPU, with our linker: no server, no model.

A "prefill" fills the slots of new tokens with bytes that follow from the tokens, so what any page must hold is known.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from glm_sglang.cache.audit import Audit
from glm_sglang.cache.copier import TorchPageCopier
from glm_sglang.cache.device_pages import DevicePages, device_pages
from glm_sglang.cache.linker import GlmCacheLinker, Parts
from glm_sglang.cache.recorder import Recorder
from tests.unit.cache.memory_store import MemoryStore

PAGE = 64
SKIP_TOPK = [False, False, True, False]
_rids = itertools.count()


def make_pool(pages: int = 16) -> Any:
    """SGLang's MLA + DSA pool: 4 layers, one of which shares the indexer of the layer before."""
    from glm_sglang.reference_platform.index_keys import ReferenceDSATokenToKVPool

    return ReferenceDSATokenToKVPool(
        size=pages * PAGE,
        page_size=PAGE,
        kv_lora_rank=16,
        dtype=torch.bfloat16,
        qk_rope_head_dim=8,
        layer_num=len(SKIP_TOPK),
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=24,
        skip_topk_layers=SKIP_TOPK,
    )


class Tree:
    """One rank: pool, allocator, radix tree, linker."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        pages: int = 16,
        copier: Any = None,
        wait_s: float | None = 0.0,
        group: Any = None,
        save_limit_pages: int = 1024,
    ) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.pool = make_pool(pages)
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * PAGE, PAGE, torch.bfloat16, "cpu", self.pool, need_sort=False
        )
        self.pages: DevicePages = device_pages(self.pool, PAGE)
        self.store = store or MemoryStore(self.pages.layout.page_bytes)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(device="cpu"),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=group,
        )
        params.tree_components = (ComponentType.FULL,)
        self.cache = UnifiedRadixCache(params)
        self.copier = (copier or TorchPageCopier)(self.pages)
        self.recorder = Recorder()
        self.linker = GlmCacheLinker(
            None,
            params,
            components={ComponentType.FULL},
            parts=Parts(
                store=self.store,
                device=self.pages,
                copier=self.copier,
                recorder=self.recorder,
                audit=Audit(),
                wait_s=wait_s,
                prefetches=True,
                save_limit_pages=lambda: save_limit_pages,
            ),
        )
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def request(self, tokens: Sequence[int], **more: Any) -> Any:
        """What the tree and the linker ask of a request."""
        fields = {
            "rid": f"r{next(_rids)}",
            "origin_input_ids": array("q", tokens),
            "output_ids": array("q"),
            "extra_key": None,
            "cache_salt": None,
            "prefix_len": 0,
            "kv": None,
            "swa_branching_seqlen": None,
            "session": None,
        }
        return SimpleNamespace(**(fields | more))

    def match(self, req: Any) -> tuple[int, int]:
        """(tokens on the device, tokens that the linker offers), as the scheduler asks before it admits `req`."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        limit = len(req.origin_input_ids) - 1
        key = RadixKey(req.origin_input_ids, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len = int(result.device_prefix_len)
        req.last_node = result.last_device_node
        req.best_match_node = result.best_match_node
        req.host_hit_length = int(result.host_hit_length)
        return req.prefix_len, req.host_hit_length

    def load(self, req: Any) -> torch.Tensor:
        """Queues the load of what `match` offered; the slots, [tokens]."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
            )
        )
        slots = self.cache.linker.private_load_indices.get(req.rid)
        return slots if slots is not None else torch.empty(0, dtype=torch.int64)

    def compute(self, tokens: Sequence[int], slots: torch.Tensor, start: int = 0) -> None:
        """Fills the slots of tokens[start:] with what a model would: bytes that follow from the prefix."""
        for number in range(slots.numel() // PAGE):
            page = int(slots[number * PAGE]) // PAGE
            self.write(page, expected_page(tokens, start // PAGE + number, self.pages))

    def write(self, page: int, data: torch.Tensor) -> None:
        for parts in self.pages.layers:
            for part in parts:
                part.rows[page] = data[part.span]

    def read(self, page: int) -> torch.Tensor:
        out = torch.empty(self.pages.layout.page_bytes, dtype=torch.uint8)
        for parts in self.pages.layers:
            for part in parts:
                out[part.span] = part.rows[page]
        return out

    def alloc(self, pages: int) -> torch.Tensor | None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        short = pages * PAGE - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        return self.allocator.alloc(pages * PAGE)

    def insert(self, tokens: Sequence[int], slots: torch.Tensor, extra_key: str | None = None) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        whole = len(tokens) // PAGE * PAGE
        key = RadixKey(array("q", tokens[:whole]), extra_key)
        self.cache.insert(InsertParams(key=key, value=slots[:whole].to(torch.int64)))

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        """Computes and inserts a prompt of whole pages that the tree does not have; its slots."""
        slots = self.alloc(len(tokens) // PAGE)
        assert slots is not None
        self.compute(tokens, slots)
        self.insert(tokens, slots)
        return slots

    def step(self) -> None:
        """The start of a scheduling step."""
        self.cache.check_hicache_events()

    def drain(self) -> None:
        """Until no save is under way, and the tree knows."""
        self.linker._saves._work.join()
        self.step()

    def flush_device(self) -> None:
        """Evicts everything that can be evicted from the device."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=1 << 30))

    def close(self) -> None:
        self.linker.close()


def expected_page(tokens: Sequence[int], number: int, pages: DevicePages) -> torch.Tensor:
    """The bytes of page `number` of a prompt: seeded by all tokens up to its end, as KV depends on them."""
    import zlib

    seed = zlib.crc32(array("q", tokens[: (number + 1) * PAGE]).tobytes())
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (pages.layout.page_bytes,), generator=generator, dtype=torch.uint8)
