"""On PYTHONPATH of a prefill server under test: its NIXL transfers fail as long as the file is there that
`FAILING_TRANSFERS` names. "state" in it: a transfer that was posted ends as an error. "post": it cannot be posted.

What is replaced is what NIXL answers, never what SGLang does with the answer.
"""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2]))
from after_import import after_import

_MODULE = "nixl_cu13._api"
_SWITCH = pathlib.Path(os.environ["FAILING_TRANSFERS"])


def _wanted():
    try:
        return _SWITCH.read_text()
    except FileNotFoundError:
        return ""


def _patch(module):
    agent = module.nixl_agent
    state, post = agent.check_xfer_state, agent.transfer

    def check_xfer_state(self, handle, *rest, **more):
        found = state(self, handle, *rest, **more)
        return "ERR" if _wanted() == "state" and found == "DONE" else found

    def transfer(self, *rest, **more):
        if _wanted() == "post":
            raise RuntimeError("the peer does not answer")
        return post(self, *rest, **more)

    agent.check_xfer_state, agent.transfer = check_xfer_state, transfer


after_import(_MODULE, _patch)
