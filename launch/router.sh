#!/usr/bin/env bash
# SGLang's router before a pair: router.sh --prefill URL BOOTSTRAP_PORT --decode URL [--prefill … --decode …] [flags].
# Its metrics, too, bind to loopback here; --host and --prometheus-host change that.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: router.sh --prefill URL BOOTSTRAP_PORT --decode URL [flags]" >&2; exit 2; }
exec "${PYTHON:-python3}" -m glm_sglang.router --pd-disaggregation --host 127.0.0.1 --prometheus-host 127.0.0.1 "$@"
