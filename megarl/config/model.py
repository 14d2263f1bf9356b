"""The section `model`: the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import FilePath, Section


class TinyModelConfig(Section):
    """Sizes of a randomly initialized Qwen3 model; the defaults make 0.5M parameters."""

    vocab_size: int = Field(default=384, ge=258)
    """Vocabulary size: 256 bytes, 2 special tokens, and merges."""

    hidden_size: int = Field(default=128, ge=1)
    """Size of the hidden states."""

    num_layers: int = Field(default=2, ge=1)
    """Number of transformer layers."""

    num_heads: int = Field(default=4, ge=1)
    """Number of query heads."""

    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key-value heads."""

    head_dim: int = Field(default=32, ge=2)
    """Size of each attention head."""

    ffn_size: int = Field(default=384, ge=1)
    """Intermediate size of the feed-forward layers."""

    context_length: int = Field(default=512, ge=8)
    """Maximum sequence length in tokens."""

    chat: bool = False
    """Give the tokenizer a chat template, which prompts are then rendered with."""


class ModelConfig(Section):
    """The model that training starts from: the initial policy."""

    path: FilePath
    """Folder of the model in Hugging Face format: config.json, safetensors, tokenizer. If there is no such folder: id
    of a model on the Hugging Face Hub, `Qwen/Qwen3-0.6B`, or with a branch, tag or commit, `Qwen/Qwen3-0.6B@main`."""

    hub_revisions: dict[str, str] = Field(default={})
    """Commit hash by hub id, for the ids in `path` and in the paths of other models, as they are written there. A run
    records here what it has downloaded, and uses the same commits when it is resumed. Default: the latest commits."""

    trust_remote_code: bool = False
    """Run the Python code in model folders that their `auto_map` entries name, in trainer and engines. A model on the
    hub needs its commit, `Qwen/Qwen3-0.6B@` and 40 hexadecimal digits, or an entry of `hub_revisions`; the code in a
    local folder is yours. false: such code never runs, and a tokenizer that needs it is refused."""

    tiny: TinyModelConfig | None = None
    """If `path` does not exist, write a randomly initialized model of these sizes there, with a tokenizer trained on
    `data.path`. For tests without real weights. Default: `path` needs to exist."""

    family: str | None = None
    """Import path, `package.module:FAMILY`, of a model family outside the package, a `ModelFamily` that reads the
    config.json of this model, and of every other model with the same architecture name. SGLang needs to support the
    architecture. Default: the architecture is one of megarl's own families."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation. `auto`: bfloat16 on CUDA, float32 on CPU."""

    fp32_lm_head: bool = False
    """Compute logits in float32, in the engines and in the trainer, where hidden states and weights are bfloat16
    (arXiv 2506.13585, section 3.2). The weights stay bfloat16."""

    def resolved_dtype(self, device: str) -> Literal["float32", "bfloat16"]:
        """Return the dtype on `device`, `cpu` or `cuda`."""
        if self.dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.dtype
