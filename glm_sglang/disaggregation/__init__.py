"""The pairing of prefill with decode over NIXL: on a GPU as upstream does it, on a machine without one in host memory."""
