"""`python -m glm_sglang.router`: SGLang's router, with its own flags, without the rest of SGLang.

    python -m glm_sglang.router --pd-disaggregation --prefill URL BOOTSTRAP_PORT --decode URL

`sglang_router.launch_router` starts the same Rust router from the same flags, but imports a Python load balancer
for debugging first, and with it torch and all of SGLang: ten CPU seconds and a gigabyte on the router's node.

A flag that is not given is the router's own default, except `LOOPBACK` and `NOTICE`: a request that is sent to a server
that is gone waits for as long as its other half does (300 s on the prefill node), so a router must learn of it early.
"""

import argparse
import sys
from collections.abc import Sequence

#: A server whose port refuses gets no requests after 10 s, one that is silent after a minute; the router's own defaults
#: make that 3 minutes. UPSTREAM: a busy scheduler's /health answers between two steps, or fails after 20 s.
NOTICE = {"health_check_interval_secs": 5, "health_check_timeout_secs": 25, "health_failure_threshold": 2}
LOOPBACK = {"host": "127.0.0.1", "prometheus_host": "127.0.0.1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. Exit code 2 for arguments that the router refuses."""
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="python -m glm_sglang.router", description="SGLang's router.")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    parser.set_defaults(**NOTICE, **LOOPBACK)
    given = parser.parse_args(argv)
    if given.mini_lb:
        parser.error(
            "--mini-lb is SGLang's load balancer for debugging: python -m sglang_router.launch_router"
        )
    try:
        arguments = RouterArgs.from_cli_args(given, use_router_prefix=False)
        arguments._validate_router_args()
        router = Router.from_args(arguments)
    except ValueError as error:
        parser.error(str(error))
    router.start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
