"""What a break reads stays allocated as long as its graph, or is written anew in every replay.

Target        breakable_cuda_graph._weak_ref_if_tensor, which wraps every argument of a break at capture.
Why           SGLang keeps a break's tensor arguments as views without ownership, on the ground that the graphs pin
              their memory pool. They pin the pool, not the blocks: a block whose last Python reference is gone is
              handed to a bucket captured later, and a break of the earlier bucket then works on memory that two
              graphs own: wrong bytes, or, where the bytes are indices, an illegal access.
How           the argument itself is kept. What that costs is counted. Where this room captures the attention
              (`whole`) nearly all of it is gone, because breaks then work on buffers of the runner. Of SGLang's breaks
              those that `stock` and, under context parallelism, `context_parallel` know are exempt (`rewritten`), and
              own nothing.
Upstream      sglang issue 37606, PR 37448 (open in 0.5.23); seen with GLM PD prefill.
Goes when     that PR is in a release.

Why `rewritten` is enough. Segments and breaks of one replay run in the order of the capture, on one stream into which
every fork is joined. A block that was referenced in the capture from its writer to its last reader was given to
nobody in between, so in a replay nobody writes it in between either. What other layers and buckets leave in the block
before its writer runs is not read, if the writer writes all that is read. So not exempt are: what a break leaves for a
later replay (the tail that it fills once), and memory outside the graphs' pool, which eager code is given, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from glm_sglang.prefill_graph import options


@dataclass(slots=True)
class Kept:
    """What the breaks captured so far keep: storages by address, so that views of one buffer count once."""

    storages: dict[int, int] = field(default_factory=dict)
    exempt: bool = False  # the break at hand keeps nothing

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


@contextlib.contextmanager
def rewritten() -> Iterator[None]:
    """Around one break of which every argument is written in each replay before it is read, or is somebody else's.

    Of the pool's memory, all that the break reads: by a segment or a break of the same replay. Somebody else's: weights,
    static buffers of the runner.
    """
    before, _kept.exempt = _kept.exempt, True
    try:
        yield
    finally:
        _kept.exempt = before


def keep(original: Callable[[Any], Any], argument: Any) -> Any:
    """For `_weak_ref_if_tensor`: the argument itself, so that the break owns what it reads."""
    if _kept.exempt or not options.current().ours:
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
