"""GLM-5.x prefill nodes on SGLang. Importing this package imports neither torch nor sglang."""

__version__ = "0.1.0"
