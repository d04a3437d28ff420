"""The cache side: executor, tiers, save, lookup, Valkey, repairs of LMCache. Never imports sglang."""
