"""Stands for a room whose hooks can't be imported."""

raise RuntimeError("the hook's own module is broken")
