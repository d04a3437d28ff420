"""`python -m glm_sglang.doctor`: is everything here that a server needs? Without a model.

A table of what is right, what is wrong and the command that mends it; `--json` prints one JSON object. Exit
code 0 when all that is needed is right, else 1. Works in an environment where SGLang, torch or anything else
is missing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from glm_sglang.checks import machine, software
from glm_sglang.checks.finding import RECREATE, Finding, wrong


def examine(quick: bool, progress: Callable[[str], None]) -> tuple[str, list[Finding]]:
    """Run every check; returns the platform and the findings.

    `quick` leaves out what starts SGLang or a server.
    """
    name, found = machine.platform()
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("Python", software.python),
        ("platform", lambda: found),
        ("environment variables", software.variables),
        ("versions", lambda: software.versions(name)),
        ("fingerprints", lambda: software.fingerprints(name)),
        ("GPU", lambda: machine.devices(name)),
        ("memory", lambda: machine.memory(name)),
        ("shared memory", lambda: machine.shared_memory(name)),
        ("limits", lambda: machine.limits(name)),
        ("cores", lambda: machine.cores_and_numa(name)),
        ("ports", machine.ports),
        ("C compiler and Python.h", lambda: software.host_compiler(name)),
    ]
    if not quick:
        checks += [
            ("CUDA compiler", lambda: software.compiler(name)),
            ("NIXL", software.nixl),
            ("Valkey", software.valkey),
            ("hooks", software.hooks),
        ]
    findings: list[Finding] = []
    for subject, check in checks:
        progress(subject)
        findings.extend(_answers(subject, check))
    return name, findings


def _answers(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The check's findings; a check that can't run is a finding too."""
    try:
        yield from check()
    except ImportError as error:
        yield wrong(subject, f"{error.name or error} is missing", RECREATE)
    except Exception as error:
        yield wrong(
            subject,
            f"the check failed: {type(error).__name__}: {error}",
            "report this with the output of --json",
        )


def as_json(platform: str, findings: Sequence[Finding]) -> str:
    """One JSON object: {"ok", "platform", "findings": [{"subject", "state", "found", "mend"}]}."""
    rows = [{"subject": f.subject, "state": f.state, "found": f.found, "mend": f.mend} for f in findings]
    return json.dumps({"ok": healthy(findings), "platform": platform, "findings": rows})


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing needed is wrong."""
    return all(finding.state != "wrong" for finding in findings)


def _print_table(platform: str, findings: Sequence[Finding]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for finding in findings:
            print(
                f"{finding.state:10}  {finding.subject}: {finding.found}"
                + (f"  -> {finding.mend}" if finding.mend else "")
            )
        return
    colours = {"right": "green", "wrong": "bold red", "not needed": "dim"}
    table = Table(title=f"glm-sglang on the {platform} platform")
    for column in ("what", "state", "found", "to mend it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(Text(finding.subject), state, Text(finding.found), Text(finding.mend))
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the doctor; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m glm_sglang.doctor", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="leave out what starts SGLang, NIXL or Valkey")
    args = parser.parse_args(argv)
    platform, findings = examine(
        args.quick, lambda subject: print(f"looking at {subject} …", file=sys.stderr, flush=True)
    )
    if args.json:
        print(as_json(platform, findings))
    else:
        _print_table(platform, findings)
        bad = sum(finding.state == "wrong" for finding in findings)
        print("all that is needed is right" if not bad else f"{bad} to mend, from the top down")
    return 0 if healthy(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
