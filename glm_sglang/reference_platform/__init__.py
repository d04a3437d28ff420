"""GLM-5.x on a machine without a GPU: SGLang's platform plugin, with PyTorch in the place of the device kernels.

Everything above the kernels is SGLang's own: scheduler, radix tree, paged pools, model code, weight loading, PD
transfer. This room replaces only what has no CPU form upstream (attention over the MLA + DSA pools, the indexer,
grouped experts, FP8 block weights), so it is also the oracle's counterpart: exact arithmetic, one idea a module.
"""
