"""Writes one page out of results.

python -m benchmarks.report benchmarks/results/cpu/*.json -o report.html
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks.report.page import ReportError, load, render


def main() -> int:
    """Exit status: 0, or 2 for a file that is no result."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="what benchmarks printed or saved"
    )
    p.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    p.add_argument("--title", default="glm-sglang, measured")
    args = p.parse_args()
    try:
        results = [load(path) for path in args.results]
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    page = render(results, shlex.join(["python", "-m", "benchmarks.report", *sys.argv[1:]]), args.title)
    args.output.write_text(page, encoding="utf-8")
    print(
        f"wrote {args.output}: {len(results)} result(s), {len(page.encode()) / 1024:.0f} KiB", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
