"""Break inputs stay allocated as long as their graph.

Target        breakable_cuda_graph._weak_ref_if_tensor, which wraps every argument of a break at capture.
Why           SGLang keeps a break's tensor arguments as views without ownership, on the ground that the graphs pin
              their memory pool. They pin the pool, not the blocks: a block whose last Python reference is gone is
              handed to a bucket captured later, and a break of the earlier bucket then works on memory that two
              graphs own: wrong bytes, or, where the bytes are indices, an illegal access.
How           the argument itself is kept. What that costs is counted. Where this room captures the attention
              (`whole`) nearly all of it is gone, because breaks then work on buffers of the runner.
Upstream      sglang issue 37606, PR 37448 (open in 0.5.23); seen with GLM PD prefill.
Goes when     that PR is in a release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from glm_sglang.prefill_graph import options


@dataclass(slots=True)
class Kept:
    """What the breaks captured so far keep: storages by address, so that views of one buffer count once."""

    storages: dict[int, int] = field(default_factory=dict)

    def add(self, tensors: Iterable[Any]) -> None:
        """Count these tensors' storages."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()

    @property
    def bytes(self) -> int:
        """Bytes of all storages kept."""
        return sum(self.storages.values())


_kept = Kept()


def kept() -> Kept:
    """The process's account."""
    return _kept


def keep(original: Callable[[Any], Any], argument: Any) -> Any:
    """For `_weak_ref_if_tensor`: the argument itself, so that the break owns what it reads."""
    if not options.current().ours:
        return original(argument)
    _kept.add(_device_tensors(argument))
    return argument


def _device_tensors(argument: Any) -> Iterator[Any]:
    import torch

    if isinstance(argument, torch.Tensor):
        if argument.numel() and argument.device.type != "cpu":
            yield argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from _device_tensors(item)
