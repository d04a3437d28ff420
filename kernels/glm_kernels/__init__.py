"""Device code, each piece beside its exact PyTorch reference. Never imports sglang."""
