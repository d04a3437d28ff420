"""Piecewise CUDA graphs for the whole GLM-5.x prefill, on SGLang's breakable CUDA graph (BCG).

SGLang captures a bucket as a chain of CUDA graphs with eager functions between them. This room plans the buckets
(`buckets`, `footprint`), makes SGLang accept the configurations that GLM-5.x runs in (`resolution`), keeps what a
break reads alive or knows that every replay writes it anew (`lifetime`, `stock`, `context_parallel`), captures what
SGLang runs at breaks (`whole`, `arena`, `dense`), cuts padding off (`rows`), names and counts every step that runs
without a graph (`reasons`, `counts`), and compares graphs with the eager model (`verify`).
"""
