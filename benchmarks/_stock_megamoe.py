"""Our launcher without the MoE room: SGLang's own `--moe-a2a-backend megamoe`, to show what the room is for.

For benchmarks only: above its token cap this server gives wrong answers and says nothing. Multiprocessing imports this
module in every child before plugins load, so none of them has the room.
"""

from __future__ import annotations

import sys

from glm_sglang.launch_server import main
from glm_sglang.moe import choice, hooks
from glm_sglang.upstream import rooms

rooms.ROOMS = tuple(room for room in rooms.ROOMS if room != hooks.__name__)


def _undecided(*_: object) -> choice.Decision:
    return choice.Decision(choice.STOCK, "SGLang's own, whatever it does")


choice.decide = _undecided  # type: ignore[assignment]  # it would refuse these flags

if __name__ == "__main__":
    sys.exit(main())
