"""The model description that all families share: embedding, decoder layers, final norm, head, and MTP layers.

`ModelArchitecture` maps every megatron-core parameter to Hugging Face tensors:

    megatron-core                            Hugging Face
    embedding.word_embeddings.weight         model.embed_tokens.weight
    decoder.layers.7.<part of a layer>       model.layers.7.<...>            attention.py, feed_forward.py
    decoder.final_layernorm.weight           model.norm.weight
    output_layer.weight                      lm_head.weight; the embedding if tied; score.weight of a value model
    mtp.layers.0.transformer_layer.<part>    model.layers.61.<...>           numbered after the decoder layers
    mtp.layers.0.enorm.weight                model.layers.61.enorm.weight

MTP is multi-token prediction: each MTP layer predicts one further token. MTP layers are never trained; their weights
are kept so that checkpoints and exports are complete.

Layers and experts have global numbers on both sides, so two model chunks of a rank never share a parameter name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, Protocol, TypeVar

from megarl.batch.balance import SequenceCost
from megarl.config.section import load_object
from megarl.errors import ConfigError
from megarl.megatron.families.attention import Attention, LatentAttention
from megarl.megatron.families.feed_forward import FeedForward, LayerPart, MixtureOfExperts, ShardingUnit
from megarl.megatron.families.parameter_map import ParameterMap, replicated, split_rows
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.weight_index import EMBEDDING_TENSOR, HEAD_TENSOR
from megarl.reshard.layout.model_tensors import ModelTensors, TensorSpec

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
HEAD = "output_layer.weight"
SCORE_TENSOR = "score.weight"

A = TypeVar("A", bound=Attention)

Head = Literal["lm", "value"]
"""Output head of a model: next-token logits ("lm") or one scalar per token ("value")."""

LM_SUFFIX, VALUE_SUFFIX = "ForCausalLM", "ForSequenceClassification"
"""Suffixes of Hugging Face architecture names, by head."""

VALUE_NAMES = {
    "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForCausalLM": "Qwen3_5TextForSequenceClassification",
}
"""Language model -> value model where the names differ by more than the suffix."""

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_MTP_EXTRA_PARAMETERS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
_MTP_LAYER_PREFIX = "transformer_layer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: attention and feed-forward, each with the norms around it.

    Layers of one model may differ in both. All that is done layer by layer reads this description: specs of modules,
    weight layouts and sync, export, memory, cost.

    Examples:
        >>> from megarl import models
        >>> rope = models.Rope(theta=10_000, max_positions=512)
        >>> sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        >>> mlp = models.GatedMlp(hidden_size=64, ffn_size=128)
        >>> Layer(attention=models.GroupedQueryAttention(rope=rope, **sizes), mlp=mlp).has_routed_experts
        False
    """

    attention: Attention
    mlp: FeedForward

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """The parts that hold its parameters."""
        return self.attention, self.mlp

    @property
    def has_routed_experts(self) -> bool:
        """Whether its feed-forward is a mixture of experts."""
        return isinstance(self.mlp, MixtureOfExperts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """A model as its config.json describes it: what it computes and how its parameters map to Hugging Face tensors.

    Examples:
        >>> from megarl import models
        >>> rope = models.Rope(theta=10_000, max_positions=512)
        >>> sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        >>> mlp = models.GatedMlp(hidden_size=64, ffn_size=128)
        >>> layer = Layer(attention=models.GroupedQueryAttention(rope=rope, **sizes), mlp=mlp)
        >>> model = ModelArchitecture(
        ...     name="LlamaForCausalLM",
        ...     hidden_size=64,
        ...     vocab_size=256,
        ...     max_positions=512,
        ...     norm_eps=1e-5,
        ...     tie_embeddings=True,
        ...     layers=(layer, layer),
        ... )
        >>> model.tensors("bfloat16")["model.layers.1.mlp.down_proj.weight"].shape
        (64, 128)
    """

    name: str
    """Hugging Face's name of the architecture, e.g. `Qwen3ForCausalLM`."""
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[Layer, ...]
    """The decoder layers."""
    mtp_layers: tuple[Layer, ...] = ()
    """The multi-token-prediction (MTP) layers. They are loaded and saved, never trained."""
    activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    mlp_clamp: float | None = None
    """Limit c of MLPs that compute activation(min(gate, c)) * (1 + up limited to -c and c) (gpt-oss); None: no limit,
    and no 1."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    embedding_scale: float = 1.0
    """Factor that embeddings are multiplied by."""
    logit_softcap: float | None = None
    """Soft cap of the logits: logit_softcap * tanh(logits / logit_softcap); None: no cap."""
    head: Head = "lm"
    optional_tensors: tuple[str, ...] = ()
    """Hugging Face tensors that the model folder may lack; they are initialized with zeros."""
    ignored_patterns: tuple[str, ...] = ()
    """Name patterns of tensors that the model folder may hold and that the model does not use."""
    passed_patterns: tuple[str, ...] = ()
    """Name patterns of tensors that the model does not compute with, and that exports copy from its folder: a vision
    tower, or prediction layers of which megarl has no description."""
    hf_renames: tuple[tuple[str, str], ...] = ()
    """(part of a tensor name, replacement), applied in order to every Hugging Face tensor name: for folders that name
    their tensors otherwise, e.g. `("model.layers.", "transformer.h.")`."""

    def hf_name(self, text: str) -> str:
        """Return a Hugging Face tensor name, or a text with one, with the model's own names (`hf_renames`)."""
        for part, replacement in self.hf_renames:
            text = text.replace(part, replacement)
        return text

    def with_value_head(self, *, from_lm: bool) -> ModelArchitecture:
        """Return the value model with the same layers: the head is a linear from a hidden state to one scalar.

        Embeddings are not tied, and there are no MTP layers.

        Args:
            from_lm: the model folder holds a language model: its head is ignored, the value head starts from zeros.
        """
        mtp_layers = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        return replace(
            self,
            name=VALUE_NAMES.get(self.name, self.name.removesuffix(LM_SUFFIX) + VALUE_SUFFIX),
            head="value",
            tie_embeddings=False,
            mtp_layers=(),
            passed_patterns=(),
            logit_softcap=None,
            optional_tensors=(self.hf_name(SCORE_TENSOR),) if from_lm else (),
            ignored_patterns=(
                *(self.hf_name(f"model.layers.{number}.*") for number in mtp_layers),
                *((self.hf_name(HEAD_TENSOR), *self.passed_patterns) if from_lm else ()),
            ),
        )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without MTP layers."""
        return len(self.layers)

    @property
    def num_mtp_layers(self) -> int:
        """Number of MTP layers, which are numbered after the decoder layers."""
        return len(self.mtp_layers)

    @property
    def experts(self) -> MixtureOfExperts | None:
        """The mixture of experts of its layers that have one, which is the same in all; None for a dense model."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)), None)

    @property
    def num_experts(self) -> int:
        """Number of routed experts per MoE layer; 0 for a dense model."""
        return self.experts.num_experts if self.experts else 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters without MTP layers, as transformers counts them: a tied embedding counts once, and the
        routers' biases of experts, which are buffers, do not.
        """
        sizes = {
            layer: sum(each.num_elements for name, each in _layer_maps(layer) if name != EXPERT_BIAS)
            for layer in dict.fromkeys(self.layers)
        }
        outer = {self.parameter_map(name) for name in (EMBEDDING, FINAL_NORM, HEAD)}  # one map of a tied embedding
        return sum(sizes[layer] for layer in self.layers) + sum(each.num_elements for each in outer)

    def layer(self, number: int) -> Layer:
        """Return layer `number`; numbers from `num_layers` on are MTP layers."""
        return self.layers[number] if number < self.num_layers else self.mtp_layers[number - self.num_layers]

    def attentions(self, kind: type[A]) -> list[A]:
        """Return the distinct attentions of class `kind` of its decoder layers, in the order of their first layers."""
        return list(dict.fromkeys(layer.attention for layer in self.layers if isinstance(layer.attention, kind)))

    def parameter_maps(self) -> dict[str, ParameterMap]:
        """Return the map of every parameter by its megatron-core name, in layer order.

        Names are those of megatron-core's torch-only layers (`LayerPart.parameter_names`).
        """
        maps = {EMBEDDING: self.parameter_map(EMBEDDING)}
        for i in range(self.num_layers):
            maps |= self._layer_parameter_maps(f"decoder.layers.{i}.", i)
        return maps | {name: self.parameter_map(name) for name in (FINAL_NORM, HEAD)} | self.mtp_parameter_maps()

    def mtp_parameter_maps(self) -> dict[str, ParameterMap]:
        """Return those `parameter_maps` that belong to MTP layers."""
        maps: dict[str, ParameterMap] = {}
        for i in range(self.num_mtp_layers):
            maps |= self._layer_parameter_maps(f"mtp.layers.{i}.{_MTP_LAYER_PREFIX}", self.num_layers + i)
            names = (f"mtp.layers.{i}.{name}" for name in _MTP_EXTRA_PARAMETERS)
            maps |= {name: self.parameter_map(name) for name in names}
        return maps

    def duplicated_tensors(self) -> dict[str, str]:
        """Return duplicate -> original tensor name: published folders repeat embedding and head in each MTP layer."""
        head = EMBEDDING_TENSOR if self.tie_embeddings else HEAD_TENSOR
        copies = {}
        for number in range(self.num_layers, self.num_layers + self.num_mtp_layers):
            copies[f"model.layers.{number}.embed_tokens.weight"] = EMBEDDING_TENSOR
            copies[f"model.layers.{number}.shared_head.head.weight"] = head
        return {self.hf_name(copy): self.hf_name(original) for copy, original in copies.items()}

    def tensors(self, dtype: str) -> ModelTensors:
        """Return the spec of every Hugging Face tensor, in layer order; tied embeddings appear once."""
        return hf_tensors_of(self.parameter_maps().values(), dtype)

    def parameter_map(self, name: str) -> ParameterMap:
        """Return how megatron-core parameter `name` (global layer and expert numbers) maps to Hugging Face tensors."""
        return self._renamed(self._parameter_map(name))

    def _parameter_map(self, name: str) -> ParameterMap:
        hidden = self.hidden_size
        match name:
            case "embedding.word_embeddings.weight":
                return split_rows(EMBEDDING_TENSOR, height=self.vocab_size, width=hidden)
            case "output_layer.weight" if self.head == "value":
                return replicated(SCORE_TENSOR, 1, hidden)
            case "output_layer.weight":
                head = EMBEDDING_TENSOR if self.tie_embeddings else HEAD_TENSOR
                return split_rows(head, height=self.vocab_size, width=hidden)
            case "decoder.final_layernorm.weight":
                return replicated("model.norm.weight", hidden)
        in_layer = _LAYER.fullmatch(name)
        assert in_layer, name
        if in_layer[1] == "decoder":
            return self._map_layer_parameter(int(in_layer[2]), in_layer[3])
        number = self.num_layers + int(in_layer[2])
        if in_layer[3].startswith(_MTP_LAYER_PREFIX):
            return self._map_layer_parameter(number, in_layer[3].removeprefix(_MTP_LAYER_PREFIX))
        return self._map_mtp_parameter(f"model.layers.{number}.", in_layer[3])

    def sharding_units(self, parts: Callable[[Layer], Sequence[LayerPart]] = attrgetter("parts")) -> list[ShardingUnit]:
        """Return the units that parallel ranks must divide evenly, each described by the first layer that has it.

        Args:
            parts: returns the parts of a layer whose units count; by default all.
        """
        first: dict[tuple[str, int], ShardingUnit] = {}
        for i in range(self.num_layers):
            for part in parts(self.layer(i)):
                for without_layer, unit in zip(
                    part.sharding_units(""), part.sharding_units(f"model.layers.{i}."), strict=True
                ):
                    unit = replace(unit, description=self.hf_name(unit.description))
                    first.setdefault((without_layer.description, unit.total), unit)
        return list(first.values())

    def _layer_parameter_maps(self, mcore_prefix: str, number: int) -> Iterator[tuple[str, ParameterMap]]:
        hf_prefix = f"model.layers.{number}."
        for part in self.layer(number).parts:
            for name in part.parameter_names():
                mapping = part.map_parameter(hf_prefix, name)
                assert mapping, name
                yield mcore_prefix + name, self._renamed(mapping)

    def _renamed(self, mapping: ParameterMap) -> ParameterMap:
        if not self.hf_renames:
            return mapping
        parts = tuple(tuple(replace(r, tensor=self.hf_name(r.tensor)) for r in part) for part in mapping.parts)
        return replace(mapping, parts=parts)

    def _map_layer_parameter(self, number: int, name: str) -> ParameterMap:
        prefix = f"model.layers.{number}."
        for part in self.layer(number).parts:
            mapping = part.map_parameter(prefix, name)
            if mapping:
                return mapping
        raise AssertionError(f"no mapping for megatron-core parameter {prefix}{name}")

    def _map_mtp_parameter(self, prefix: str, name: str) -> ParameterMap:
        hidden = self.hidden_size
        match name:
            case "enorm.weight" | "hnorm.weight":
                return replicated(prefix + name, hidden)
            case "eh_proj.weight":
                return split_rows(prefix + name, height=hidden, width=2 * hidden)
            case "final_layernorm.weight":
                return replicated(prefix + "shared_head.norm.weight", hidden)
        raise AssertionError(f"no mapping for megatron-core parameter {prefix}{name}")


def hf_tensors_of(maps: Iterable[ParameterMap], dtype: str) -> ModelTensors:
    """Return the spec of every Hugging Face tensor that the parameter maps refer to."""
    specs: dict[str, TensorSpec] = {}
    for mapping in maps:
        for part in mapping.parts:
            for rows in part:
                specs[rows.tensor] = TensorSpec(mapping.tensor_shape(rows), mapping.dtype or dtype)
    return ModelTensors(specs)


class FamilyReader(Protocol):
    """Reader of one family's config.json.

    Examples:
            def read(config: Mapping[str, Any], *, origin: str) -> models.ModelArchitecture:
                return models.HfConfig.read(config, origin=origin).to_architecture("MistralForCausalLM", origin=origin)
    """

    def __call__(self, config: JsonMapping, *, origin: str) -> ModelArchitecture:
        """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The models of one architecture name in config.json.

        def read(config, *, origin):
            return HfConfig.read(config, origin=origin).to_architecture("MistralForCausalLM", origin=origin)

        FAMILY = ModelFamily(architecture="MistralForCausalLM", read=read)

    `HfConfig` validates the keys that most families share; a family with further keys subclasses it. Checks of the
    configuration need the keys in `megarl.megatron.families.load_architecture.REQUIRED_SIZES` under these names.
    """

    architecture: str
    """Name under `architectures` in config.json. The value models of a name that ends in `ForCausalLM` have the same
    name with `ForSequenceClassification`; those of another name have no value models."""
    read: FamilyReader


def load_family(path: str, *, key: str = "model.family") -> ModelFamily:
    """Import the `ModelFamily` at `package.module:name`.

    Args:
        path: the import path.
        key: YAML path of the option, for error messages.

    Raises:
        ConfigError: it cannot be imported or is no `ModelFamily`.
    """
    family = load_object(path, key=key, kind="FAMILY")
    if not isinstance(family, ModelFamily):
        raise ConfigError(
            f"{key} needs a ModelFamily (megarl.megatron.families.architecture), got {path}, a {type(family).__name__}"
        )
    return family


def sequence_cost(model: ModelArchitecture) -> SequenceCost:
    """Return the coefficients of the model's cost per sequence, from its sizes alone."""
    attentions = [layer.attention for layer in model.layers if layer.attention.score_width]
    windows = [a.window for a in attentions if a.window]
    indexers = [a.indexer for a in attentions if isinstance(a, LatentAttention) and a.indexer]
    return SequenceCost(
        matmul_parameters=_num_matmul_parameters(model),
        attention_layers=len(attentions),
        attention_width=max((a.score_width for a in attentions), default=0),
        windowed_layers=len(windows),
        window=max(windows, default=0),
        index_width=sum(indexer.score_width for indexer in indexers),
    )


def _num_matmul_parameters(model: ModelArchitecture) -> int:
    """Return the number of matrix parameters that one token is multiplied with, the output head included."""
    count = {layer: _num_layer_parameters(layer) for layer in dict.fromkeys(model.layers)}
    outputs = model.vocab_size if model.head == "lm" else 1
    return sum(count[layer] for layer in model.layers) + model.hidden_size * outputs


def _num_layer_parameters(layer: Layer) -> int:
    always = routed = 0
    for name, mapping in _layer_maps(layer):
        is_matrix = mapping.stack_size or len(mapping.parts[0][0].shape) == 2
        if not is_matrix or name.endswith("bias"):
            continue
        if mapping.expert is None:
            always += mapping.num_elements
        else:
            routed += mapping.num_elements
    if isinstance(layer.mlp, MixtureOfExperts):
        return always + routed * layer.mlp.routing.top_k // layer.mlp.num_experts
    return always


def _layer_maps(layer: Layer) -> Iterator[tuple[str, ParameterMap]]:
    """Yield name and map of each parameter of a layer, without a prefix."""
    for part in layer.parts:
        for name in part.parameter_names():
            mapping = part.map_parameter("", name)
            assert mapping is not None, name
            yield name, mapping
