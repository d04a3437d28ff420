"""`python -m glm_sglang.layout prefill|decode [flags]`: the parallel flags that launch/prefill.sh and decode.sh add.

One line on stdout, empty on fewer than two GPUs, and where the flags or their --config file give a parallel size: half
a layout of ours and half of the user's fit no node. Runs where only stock SGLang is installed, too.
"""

import sys
from collections.abc import Sequence

from glm_sglang import command_line, failure, platform_choice, settings
from glm_sglang.errors import UsageError

USAGE_CODE = 2
#: ServerArgs fields. Whoever gives one of them has a layout of their own.
PARALLEL = frozenset(
    {
        *("tp_size", "pp_size", "dp_size", "ep_size", "dcp_size", "dwdp_size", "moe_dp_size", "max_ep_size"),
        *("attn_dp_size", "attn_cp_size", "enable_prefill_cp", "enable_dp_attention"),
        *("nnodes", "node_rank", "base_gpu_id", "gpu_id_step"),
    }
)


def flags(role: str, gpus: int) -> list[str]:
    """The layout of a node with this many GPUs. Raises UsageError for a role that is none."""
    if role not in ("prefill", "decode"):
        raise UsageError(f"layout: the role is {role!r}, allowed: prefill, decode")
    if gpus < 2:
        return []
    size = str(gpus)
    if role == "decode":
        return ["--tp-size", size]
    # Interleave CP over all GPUs of the node, experts spread over the same: the article's PCP8+EP8.
    cp = ("--enable-prefill-cp", "--cp-strategy", "interleave", "--attn-cp-size", size)
    return ["--tp-size", size, *cp, "--ep-size", size]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the layout, and on stderr what was decided; returns the exit code."""
    role, *rest = sys.argv[1:] if argv is None else argv
    if command_line.wants_help(rest):
        return 0
    try:
        own = sorted(command_line.parse(rest).given.keys() & PARALLEL)
        reference = settings.read(settings.PLATFORM) == "reference"
        gpus = 0 if reference else len(platform_choice.visible_devices())
        words = flags(role, gpus)
    except UsageError as error:
        print(f"{failure.PREFIX}{error}", file=sys.stderr)
        return USAGE_CODE
    if own and words:
        print(f"{failure.PREFIX}no parallel flags added: {', '.join(own)} given", file=sys.stderr)
        words = []
    elif words:
        said = "any parallel flag of yours replaces all of these"
        print(f"{failure.PREFIX}{gpus} GPUs: {' '.join(words)} ({said})", file=sys.stderr)
    print(*words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
