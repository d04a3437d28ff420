"""A small random Llama that SGLang and vLLM serve without a GPU (benchmarks/endpoints/llama_cpu.yaml).

python -m benchmarks.tiny_llama OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

_MAX_POSITION = 4096


def write(folder: Path) -> None:
    """Writes the checkpoint: float32, seeded, with the byte tokenizer and chat template of our tiny GLM.

    Logits lie far apart (initializer 0.1), so that two implementations agree on greedy tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from glm_sglang.tiny_model import tokenizer

    torch.manual_seed(53)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_POSITION,
        eos_token_id=256,
        bos_token_id=256,
        initializer_range=0.1,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    # A logit of 0 never wins among 95 random ones: answers are printable ASCII. Engines decode other bytes, and ids
    # without a token, differently.
    with torch.no_grad():
        model.lm_head.weight[:32] = 0
        model.lm_head.weight[127:] = 0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.tokenizer_config(_MAX_POSITION)))
    (folder / "chat_template.jinja").write_text(tokenizer.CHAT_TEMPLATE)


def main() -> int:
    """Writes into the folder that the command line names."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.tiny_llama", description=__doc__)
    p.add_argument("out", type=Path)
    write(p.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
