"""Stands for an upstream module in the contract tests."""


def greet() -> str:
    """Something to hook."""
    return "hello"


def greet_copied() -> str:
    """Something to hook of which a class below keeps a copy."""
    return "hello"


class Greeter:
    """A class: HookRegistry refuses to wrap it, and only logs that."""

    kept = staticmethod(greet_copied)
