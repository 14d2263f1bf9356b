"""What the families have in common: embedding, numbered layers, final norm, head, layers that predict further tokens.

    megatron-core                            Hugging Face
    embedding.word_embeddings.weight         model.embed_tokens.weight
    decoder.layers.7.<part of a layer>       model.layers.7.<...>            attention.py, feed_forward.py
    decoder.final_layernorm.weight           model.norm.weight
    output_layer.weight                      lm_head.weight, or the embedding where they are tied; of a value model
                                             score.weight
    mtp.layers.0.transformer_layer.<part>    model.layers.61.<...>           numbered after the decoder's
    mtp.layers.0.enorm.weight                model.layers.61.enorm.weight

Layers and experts are numbered globally on both sides, so that no two model chunks of a rank share a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megarl.megatron.families.attention import GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts
from megarl.megatron.families.layer_parts import LayerPart, Units
from megarl.megatron.families.parameter_map import ParameterMap, Rows, split_rows, whole
from megarl.megatron.families.rope import Rope
from megarl.reshard.layout.layout import TensorSpec

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
EMBEDDING_TENSOR = "model.embed_tokens.weight"
SCORE_TENSOR = "score.weight"

Head = Literal["lm", "value"]
"""What a decoder ends in: logits of the next token, or one number a token."""

LM_SUFFIX, VALUE_SUFFIX = "ForCausalLM", "ForSequenceClassification"
"""How Hugging Face's names of architectures end, by head."""

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_OF_MTP = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
_IN_MTP = "transformer_layer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model as its config.json describes it: what it computes, and what its parameters are made of."""

    architecture: str
    num_layers: int
    """Without those that predict further tokens."""
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    rope: Rope
    attention: GroupedQueryAttention | LatentAttention
    mlp: GatedMlp
    """Of layers without routed experts."""
    experts: MixtureOfExperts | None = None
    dense_layers: frozenset[int] = frozenset()
    """Where there are experts, the layers without."""
    num_mtp_layers: int = 0
    """Layers that predict a further token each (multi-token prediction); carried along, never trained."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    logit_softcap: float | None = None
    """Logits are bent into (-logit_softcap, logit_softcap) by tanh."""
    windows: tuple[int, ...] = ()
    """By layer, how many tokens back attention sees, itself included; 0: all. Empty: all layers see all."""
    head: Head = "lm"
    absent: tuple[str, ...] = ()
    """Tensors that its folder may lack, which are zeros then."""
    unused: tuple[str, ...] = ()
    """Patterns of names of tensors that its folder may hold and that it does not have."""

    def with_value_head(self, *, from_lm: bool) -> Decoder:
        """The same layers below a linear from a token's hidden state to one number.

        Nothing is tied to the embedding, and there are no layers that predict further tokens.

        Args:
            from_lm: whether its folder is a language model's: its head is left, the new one starts from zeros.
        """
        further = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        return replace(
            self,
            architecture=self.architecture.removesuffix(LM_SUFFIX) + VALUE_SUFFIX,
            head="value",
            tie_embeddings=False,
            num_mtp_layers=0,
            logit_softcap=None,
            absent=(SCORE_TENSOR,) if from_lm else (),
            unused=(*(f"model.layers.{number}.*" for number in further), *(("lm_head.weight",) if from_lm else ())),
        )

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has any; 0: dense."""
        return self.experts.num_experts if self.experts else 0

    def is_routed(self, number: int) -> bool:
        """Whether layer `number` has routed experts; from `num_layers` on, a layer that predicts a further token."""
        return self.experts is not None and number not in self.dense_layers

    def layer(self, number: int) -> tuple[LayerPart, ...]:
        """The parts of decoder layer `number`; from `num_layers` on, of a layer that predicts a further token."""
        if self.experts is not None and number not in self.dense_layers:
            return self.attention, self.experts
        return self.attention, self.mlp

    def maps(self) -> dict[str, ParameterMap]:
        """By megatron-core's name in its first spelling, every parameter, in the order of the layers."""
        maps = {EMBEDDING: self.parameter_map(EMBEDDING)}
        for i in range(self.num_layers):
            maps |= self._layer_maps(f"decoder.layers.{i}.", i)
        rest = ("decoder.final_layernorm.weight", HEAD)
        return maps | {name: self.parameter_map(name) for name in rest} | self.mtp_maps()

    def mtp_maps(self) -> dict[str, ParameterMap]:
        """Of `maps`, what belongs to the layers that predict further tokens."""
        maps: dict[str, ParameterMap] = {}
        for i in range(self.num_mtp_layers):
            maps |= self._layer_maps(f"mtp.layers.{i}.{_IN_MTP}", self.num_layers + i)
            names = (f"mtp.layers.{i}.{name}" for name in _OF_MTP)
            maps |= {name: self.parameter_map(name) for name in names}
        return maps

    def copies(self) -> dict[str, str]:
        """Tensors that a published folder repeats, and of which: each prediction layer's embedding and head."""
        head = EMBEDDING_TENSOR if self.tie_embeddings else "lm_head.weight"
        copies = {}
        for number in range(self.num_layers, self.num_layers + self.num_mtp_layers):
            copies[f"model.layers.{number}.embed_tokens.weight"] = EMBEDDING_TENSOR
            copies[f"model.layers.{number}.shared_head.head.weight"] = head
        return copies

    def tensors(self, dtype: str) -> dict[str, TensorSpec]:
        """Every Hugging Face tensor, in the order of the layers; tied embeddings appear once."""
        return tensors_of(self.maps().values(), dtype)

    def parameter_map(self, name: str) -> ParameterMap:
        """How the megatron-core parameter `name` (layers and experts numbered globally) is made of tensors."""
        hidden = self.hidden_size
        match name:
            case "embedding.word_embeddings.weight":
                return split_rows(EMBEDDING_TENSOR, height=self.vocab_size, width=hidden)
            case "output_layer.weight" if self.head == "value":
                return whole(SCORE_TENSOR, 1, hidden)
            case "output_layer.weight":
                head = EMBEDDING_TENSOR if self.tie_embeddings else "lm_head.weight"
                return split_rows(head, height=self.vocab_size, width=hidden)
            case "decoder.final_layernorm.weight":
                return whole("model.norm.weight", hidden)
        in_layer = _LAYER.fullmatch(name)
        assert in_layer, name
        if in_layer[1] == "decoder":
            return self._in_layer(int(in_layer[2]), in_layer[3])
        number = self.num_layers + int(in_layer[2])
        if in_layer[3].startswith(_IN_MTP):
            return self._in_layer(number, in_layer[3].removeprefix(_IN_MTP))
        return self._of_mtp(f"model.layers.{number}.", in_layer[3])

    def units(self) -> list[Units]:
        """What tensor- and expert-parallel ranks must divide, each named by the first layer that has it."""
        first: dict[tuple[str, int], Units] = {}
        for i in range(self.num_layers):
            for part in self.layer(i):
                for at_zero, units in zip(part.units(""), part.units(f"model.layers.{i}."), strict=True):
                    first.setdefault((at_zero.what, units.total), units)
        return list(first.values())

    def _layer_maps(self, ours: str, number: int) -> Iterator[tuple[str, ParameterMap]]:
        theirs = f"model.layers.{number}."
        for part in self.layer(number):
            for name in part.names():
                mapping = part.map(theirs, name)
                assert mapping, name
                yield ours + name, mapping

    def _in_layer(self, number: int, name: str) -> ParameterMap:
        prefix = f"model.layers.{number}."
        for part in self.layer(number):
            mapping = part.map(prefix, name)
            if mapping:
                return mapping
        raise AssertionError(f"no mapping for megatron-core parameter {prefix}{name}")

    def _of_mtp(self, prefix: str, name: str) -> ParameterMap:
        hidden = self.hidden_size
        match name:
            case "enorm.weight" | "hnorm.weight":
                return whole(prefix + name, hidden)
            case "eh_proj.weight":
                return split_rows(prefix + name, height=hidden, width=2 * hidden)
            case "final_layernorm.weight":
                return whole(prefix + "shared_head.norm.weight", hidden)
        raise AssertionError(f"no mapping for megatron-core parameter {prefix}{name}")


def tensors_of(maps: Iterable[ParameterMap], dtype: str) -> dict[str, TensorSpec]:
    """Every Hugging Face tensor that parameters are made of."""
    rows_of: dict[str, tuple[Rows, str]] = {}
    for mapping in maps:
        for part in mapping.parts:
            for rows in part:
                rows_of[rows.tensor] = (rows, mapping.dtype or dtype)
    return {name: TensorSpec(rows.shape, of) for name, (rows, of) in rows_of.items()}
