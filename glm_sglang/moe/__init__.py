"""MegaMoE in the server: FP8 GLM-5.x with expert parallelism runs it at every size, or the server does not start.

UPSTREAM: SGLang's own `--moe-a2a-backend megamoe` falls back, silently, to a path that adds up one rank's experts
only, above its token cap and wherever it built no weights (tests/e2e/tokens/test_moe.py shows it). This room keeps the
backend's name and flags and replaces three decisions: when it runs (always), how often the kernel is called (a
count that every rank knows), and what is refused (before weights load).
"""
