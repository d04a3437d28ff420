"""Answers of a server, or of several ranks, against the oracle. Nothing here is timed, so two files run at a time."""
