"""The hierarchical cache, SGLang's side: a `UnifiedCacheLinker` over `glm_connectors.tiers`, and its prefetch.

GPU radix tree → CPU pool → Valkey. `options` and `launch` are what the launcher needs and import nothing
heavy; `linker` is what SGLang's scheduler builds; `hooks` is what no extension point offers.
"""
