"""One module a question: `python -m benchmarks.QUESTION --json` prints one JSON object last."""
