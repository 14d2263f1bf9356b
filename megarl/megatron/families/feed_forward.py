"""What follows attention in a decoder layer: a gated MLP, or a mixture of such experts, with the norms around them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megarl.megatron.families.layer_parts import Units
from megarl.megatron.families.parameter_map import ParameterMap, split_columns, split_rows, whole

_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc(?P<local>[12])\.weight|linear_fc(?P<grouped>[12])\.weight(\d+))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    hidden_size: int
    ffn_size: int
    sandwiched: bool = False
    """Whether what the MLP adds to the residual stream is normalised first, as what goes into it is (Gemma 2)."""

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        names = ["pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        return names + (["mlp.linear_fc2.post_layernorm.weight"] if self.sandwiched else [])

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """See `LayerPart.map`."""
        match name:
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                before = "pre_feedforward" if self.sandwiched else "post_attention"
                return whole(f"{prefix}{before}_layernorm.weight", self.hidden_size)
            case "mlp.linear_fc2.post_layernorm.weight" if self.sandwiched:
                return whole(prefix + "post_feedforward_layernorm.weight", self.hidden_size)
            case "mlp.linear_fc1.weight":
                return gate_up(prefix + "mlp.", self.hidden_size, self.ffn_size)
            case "mlp.linear_fc2.weight":
                return split_columns(prefix + "mlp.down_proj.weight", self.hidden_size, self.ffn_size)
        return None

    def units(self, prefix: str) -> list[Units]:
        """See `LayerPart.units`."""
        return [Units(f"{prefix}mlp.gate_proj.weight has rows", self.ffn_size, "tp")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are picked and weighed."""

    top_k: int
    """Experts of a token."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Whether the weights of a token's experts add up to 1 (before `scaling`)."""
    groups: int = 1
    """Experts compete in groups of which `top_groups` are picked first (arXiv 2412.19437, section 2.1.2)."""
    top_groups: int = 1
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What Hugging Face calls the tensors of a mixture of experts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """A router, gated MLPs of which it picks a few for each token, and optionally one that sees every token."""

    hidden_size: int
    num_experts: int
    ffn_size: int
    """Of one routed expert."""
    routing: Routing
    theirs: ExpertNames = ExpertNames()
    shared_ffn_size: int = 0
    """Of the shared experts together, which are one MLP; 0: none."""
    router_bias: bool = False
    """Whether a bias per expert, kept in float32, corrects what the router picks (`expert_bias`, a buffer)."""

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        names = ["pre_mlp_layernorm.weight", "mlp.router.weight"]
        names += ["mlp.router.expert_bias"] if self.router_bias else []
        names += [
            f"mlp.experts.local_experts.{expert}.linear_fc{i}.weight"
            for expert in range(self.num_experts)
            for i in (1, 2)
        ]
        if self.shared_ffn_size:
            names += [f"mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2)]
        return names

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """See `LayerPart.map`."""
        expert = _EXPERT.fullmatch(name)
        if expert:
            return self._expert(prefix, int(expert[1] or expert[4]), expert["local"] or expert["grouped"])
        hidden, shared = self.hidden_size, prefix + "mlp.shared_experts."
        match name:
            case "pre_mlp_layernorm.weight":
                return whole(prefix + "post_attention_layernorm.weight", hidden)
            case "mlp.router.weight":
                return whole(f"{prefix}{self.theirs.block}.gate.weight", self.num_experts, hidden)
            case "mlp.router.expert_bias" if self.router_bias:
                return whole(prefix + "mlp.gate.e_score_correction_bias", self.num_experts, dtype="float32")
            case "mlp.shared_experts.linear_fc1.weight":
                return gate_up(shared, hidden, self.shared_ffn_size)
            case "mlp.shared_experts.linear_fc2.weight":
                return split_columns(shared + "down_proj.weight", hidden, self.shared_ffn_size)
        return None

    def units(self, prefix: str) -> list[Units]:
        """See `LayerPart.units`."""
        units = [
            Units(f"{prefix}{self.theirs.block} has experts", self.num_experts, "ep"),
            Units(f"{prefix}{self.theirs.block}.experts.0.{self.theirs.gate}.weight has rows", self.ffn_size, "etp"),
        ]
        if self.shared_ffn_size:
            units.append(Units(f"{prefix}mlp.shared_experts.gate_proj.weight has rows", self.shared_ffn_size, "tp"))
        return units

    def _expert(self, prefix: str, expert: int, linear: str) -> ParameterMap:
        theirs = f"{prefix}{self.theirs.block}.experts.{expert}."
        if linear == "2":
            return split_columns(f"{theirs}{self.theirs.down}.weight", self.hidden_size, self.ffn_size, expert)
        gate, up = (f"{theirs}{name}.weight" for name in (self.theirs.gate, self.theirs.up))
        return split_rows(gate, up, height=self.ffn_size, width=self.hidden_size, expert=expert)


def gate_up(prefix: str, hidden_size: int, ffn_size: int) -> ParameterMap:
    """megatron-core's `linear_fc1`: each rank's share of gate above its share of up."""
    return split_rows(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight", height=ffn_size, width=hidden_size)
