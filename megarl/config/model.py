"""The section `model`: the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from megarl.config.placement import PlacementConfig
from megarl.config.policy import FrozenModelConfig, PolicyConfig, TrainedModelConfig
from megarl.config.reward import ModelRewardConfig, RewardsConfig
from megarl.config.section import FilePath, Section
from megarl.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig


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


REWARD_MODEL_NAME = "reward {}"
"""Format of the name of a reward term's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModel:
    """A model that a run needs in addition to its policy."""

    name: str
    """Unique name within the run."""
    key: str
    """YAML path of its section."""
    path: str
    """Folder in Hugging Face format."""
    head: Literal["lm", "value"]
    """Output layer: language-model logits or one value per token."""
    parallel: ParallelConfig
    parallel_key: str
    """YAML path that `parallel` comes from."""
    optimizer: OptimizerConfig | None
    """None: the model is frozen."""
    role: str
    """Key under `placement`, or under `placement.models`, that chooses its pool."""
    pool: str
    """Name of its pool of slots."""

    @property
    def is_reward_model(self) -> bool:
        """Whether the model belongs to one of `reward.terms`."""
        return self.name.startswith(REWARD_MODEL_NAME.format(""))


def auxiliary_models_of(
    algorithm: PolicyConfig,
    reward: RewardsConfig,
    model: ModelConfig,
    trainer: TrainerConfig,
    placement: PlacementConfig,
) -> Iterator[AuxiliaryModel]:
    """Yield the auxiliary models that these sections of a run's configuration need."""

    def make(
        name: str, role: str, key: str, section: FrozenModelConfig | ModelRewardConfig, head: Literal["lm", "value"]
    ) -> AuxiliaryModel:
        return AuxiliaryModel(
            name=name,
            key=key,
            path=section.path or model.path,
            head=head,
            parallel=section.parallel or trainer.parallel,
            parallel_key="trainer.parallel" if section.parallel is None else f"{key}.parallel",
            optimizer=section.optimizer if isinstance(section, TrainedModelConfig) else None,
            role=role,
            pool=placement.pool_of(role),
        )

    for use in algorithm.models():
        yield make(use.name, use.role or use.name, f"algorithm.{use.field}", use.section, use.head)
    for term, model_term in reward.models.items():
        yield make(REWARD_MODEL_NAME.format(term), "reward_models", f"reward.terms.{term}", model_term, "value")
