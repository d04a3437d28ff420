"""A small GLM-5.3-shaped checkpoint, the same bytes on every machine: `python -m glm_sglang.tiny_model OUT`.

`shape` has the sizes and config.json, `weights` the tensors, `quantise` FP8 blocks, `tokenizer` the byte-
level tokenizer and the chat template, `checkpoint` the files. Importing this package imports neither torch
nor numpy.
"""

from glm_sglang.tiny_model.shape import DTYPES, PRESETS, Shape, ShapeError

__all__ = ["DTYPES", "PRESETS", "Shape", "ShapeError"]
