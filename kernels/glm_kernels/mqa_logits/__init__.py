"""Scores of the DSA indexer: DeepGEMM's kernels under SGLang's calls, and the exact reference beside them."""
