"""Scores of the DSA indexer: DeepGEMM's kernels under the calls that SGLang makes, and the exact reference beside them."""
