"""The DSA indexer on a GPU: SGLang's own, over the DeepGEMM that this fork installs."""
