"""Feed-forward parts of a decoder layer: a gated MLP or a mixture of experts (MoE), with the norms around it.

Every part of a decoder layer knows the megatron-core and Hugging Face names of its parameters.

megatron-core names are relative to the layer (`self_attention.linear_qkv.weight`), with global expert numbers, and have
two spellings. Transformer Engine fuses a norm into the linear that follows it (`...linear_qkv.layer_norm_weight`), and
its grouped linear has the expert number at the end (`mlp.experts.linear_fc1.weight7`). Torch-only layers have separate
norms (`input_layernorm.weight`) and one module per expert. `map_parameter` accepts both, `parameter_names` returns the
latter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from megarl.megatron.families.parameter_map import (
    ParameterMap,
    RowRange,
    replicated,
    split_columns,
    split_rows,
    stacked,
)


@dataclass(frozen=True, slots=True)
class ShardingUnit:
    """Indivisible units of a tensor, such as heads or experts, that parallel ranks must divide evenly."""

    description: str
    """Text for error messages, e.g. `model.layers.0.self_attn.q_proj.weight has query heads`."""
    total: int
    """Number of units in the full tensor."""
    axis: Literal["tp", "etp", "ep", "tp * cp"]
    """Parallel dimension that divides the units."""
    can_replicate: bool = False
    """Several ranks may hold the same unit if there are more ranks than units."""


class LayerPart(Protocol):
    """A part of a decoder layer; `prefix` is the common prefix of the layer's Hugging Face tensors."""

    def parameter_names(self) -> list[str]:
        """Return the names of its parameters in the spelling of megatron-core's torch-only layers."""

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if this part has no such parameter."""

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that tensor- and expert-parallel ranks must divide evenly."""


_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc(?P<local>[12])\.(?P<kind>weight|bias)"
    r"|linear_fc(?P<grouped>[12])\.weight(\d+))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """Gated MLP: down(activation(gate(x)) * up(x)).

    Examples:
        >>> GatedMlp(hidden_size=64, ffn_size=128).parameter_names()
        ['pre_mlp_layernorm.weight', 'mlp.linear_fc1.weight', 'mlp.linear_fc2.weight']
    """

    hidden_size: int
    ffn_size: int
    post_norm: bool = False
    """The MLP output is normalized before it is added to the residual stream (Gemma 2)."""

    def parameter_names(self) -> list[str]:
        """Return the megatron-core names of the parameters."""
        names = ["pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        return names + (["mlp.linear_fc2.post_layernorm.weight"] if self.post_norm else [])

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if there is no such parameter."""
        match name:
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                before = "pre_feedforward" if self.post_norm else "post_attention"
                return replicated(f"{prefix}{before}_layernorm.weight", self.hidden_size)
            case "mlp.linear_fc2.post_layernorm.weight" if self.post_norm:
                return replicated(prefix + "post_feedforward_layernorm.weight", self.hidden_size)
            case "mlp.linear_fc1.weight":
                return gated_fc1(prefix + "mlp.", self.hidden_size, self.ffn_size)
            case "mlp.linear_fc2.weight":
                return split_columns(prefix + "mlp.down_proj.weight", self.hidden_size, self.ffn_size)
        return None

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that parallel ranks must divide evenly."""
        return [ShardingUnit(f"{prefix}mlp.gate_proj.weight has rows", self.ffn_size, "tp")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the router selects and weights the experts of a token.

    Examples:
        >>> Routing(top_k=8, scoring_func="sigmoid", routed_scaling_factor=2.5).norm_topk_prob
        True
    """

    top_k: int
    """Number of experts per token."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    """The weights of a token's experts are normalized to sum to 1, before `routed_scaling_factor`."""
    num_groups: int = 1
    """Number of expert groups. The router first selects `topk_group` groups, then experts within these
    (arXiv 2412.19437, section 2.1.2)."""
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    """Factor that the weights of a token's experts are multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfExpertNames:
    """Hugging Face's module names in a mixture-of-experts layer.

    Examples:
        >>> names = HfExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
        >>> experts = MixtureOfExperts(
        ...     hidden_size=8, num_experts=2, ffn_size=4, routing=Routing(top_k=1), hf_names=names
        ... )
        >>> experts.map_parameter("", "mlp.router.weight").parts[0][0].tensor
        'block_sparse_moe.gate.weight'
    """

    block: str = "mlp"
    shared: str = "mlp.shared_experts"
    router: str = "gate"
    expert_bias: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Mixture of experts: a router, routed gated MLPs, and optionally shared experts that process every token.

    Examples:
        >>> MixtureOfExperts(hidden_size=64, num_experts=1, ffn_size=32, routing=Routing(top_k=1)).parameter_names()[-1]
        'mlp.experts.local_experts.0.linear_fc2.weight'
    """

    hidden_size: int
    num_experts: int
    ffn_size: int
    """Hidden size of one routed expert."""
    routing: Routing
    hf_names: HfExpertNames = HfExpertNames()
    shared_ffn_size: int = 0
    """Hidden size of all shared experts together, which form one MLP; 0: none."""
    shared_gate: bool = False
    """The output of the shared experts is multiplied by the sigmoid of a linear of the hidden state (Qwen3-Next)."""
    expert_bias: bool = False
    """The router selects experts with a float32 bias per expert (megatron-core's buffer `expert_bias`)."""
    biases: bool = False
    """Router and experts have biases; the experts are stacked, with transposed matrices in which columns of gate and up
    alternate (gpt-oss). Where they do, the tensor's last dimension is seen as [width, 2]."""
    is_stacked: bool = False
    """Each Hugging Face tensor of the routed experts has all of them (Qwen3.5). Without `biases`, one has all rows of
    gate above those of up, [experts, 2 * width, hidden], the other is [experts, hidden, width]."""

    def parameter_names(self) -> list[str]:
        """Return the megatron-core names of the parameters."""
        names = ["pre_mlp_layernorm.weight", "mlp.router.weight"]
        names += ["mlp.router.bias"] if self.biases else []
        names += ["mlp.router.expert_bias"] if self.expert_bias else []
        names += [
            f"mlp.experts.local_experts.{expert}.linear_fc{i}.{kind}"
            for expert in range(self.num_experts)
            for i in (1, 2)
            for kind in (("weight", "bias") if self.biases else ("weight",))
        ]
        if self.shared_ffn_size:
            names += ["mlp.shared_experts.gate_weight"] if self.shared_gate else []
            names += [f"mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2)]
        return names

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if there is no such parameter."""
        expert = _EXPERT.fullmatch(name)
        if expert:
            number, linear = int(expert[1] or expert[5]), expert["local"] or expert["grouped"]
            if self.biases:
                return self._map_transposed(prefix, number, linear + (expert["kind"] or "weight"))
            return (
                self._map_stacked(prefix, number, linear)
                if self.is_stacked
                else self._map_expert(prefix, number, linear)
            )
        hidden, shared = self.hidden_size, f"{prefix}{self.hf_names.shared}."
        match name:
            case "pre_mlp_layernorm.weight":
                return replicated(prefix + "post_attention_layernorm.weight", hidden)
            case "mlp.router.weight":
                return replicated(
                    f"{prefix}{self.hf_names.block}.{self.hf_names.router}.weight", self.num_experts, hidden
                )
            case "mlp.router.bias" if self.biases:
                return replicated(f"{prefix}{self.hf_names.block}.{self.hf_names.router}.bias", self.num_experts)
            case "mlp.router.expert_bias" if self.expert_bias:
                bias = f"{prefix}{self.hf_names.block}.{self.hf_names.expert_bias}"
                return replicated(bias, self.num_experts, dtype="float32", frozen=True)
            case "mlp.shared_experts.gate_weight" if self.shared_gate:
                return replicated(f"{prefix}{self.hf_names.shared}_gate.weight", 1, hidden)
            case "mlp.shared_experts.linear_fc1.weight":
                return gated_fc1(shared, hidden, self.shared_ffn_size)
            case "mlp.shared_experts.linear_fc2.weight":
                return split_columns(shared + "down_proj.weight", hidden, self.shared_ffn_size)
        return None

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that parallel ranks must divide evenly."""
        width = f"experts.0.{self.hf_names.gate}.weight has rows"
        if self.is_stacked:
            width = f"experts.gate_up_proj has pairs of {'columns' if self.biases else 'rows'}"
        units = [
            ShardingUnit(f"{prefix}{self.hf_names.block} has experts", self.num_experts, "ep"),
            ShardingUnit(f"{prefix}{self.hf_names.block}.{width}", self.ffn_size, "etp"),
        ]
        if self.shared_ffn_size:
            units.append(
                ShardingUnit(f"{prefix}{self.hf_names.shared}.gate_proj.weight has rows", self.shared_ffn_size, "tp")
            )
        return units

    def _map_transposed(self, prefix: str, expert: int, parameter: str) -> ParameterMap:
        """Return the map of parameter `1weight` (gate and up), `2weight` (down), or a bias of these."""
        hidden, ffn = self.hidden_size, self.ffn_size
        name, shape, shard_dim = {
            "1weight": ("gate_up_proj", (hidden, ffn, 2), 1),
            "1bias": ("gate_up_proj_bias", (ffn, 2), 0),
            "2weight": ("down_proj", (ffn, hidden), 0),
            "2bias": ("down_proj_bias", (hidden,), None),
        }[parameter]
        rows = RowRange.all(f"{prefix}{self.hf_names.block}.experts.{name}", shape)
        return stacked(ParameterMap(((rows,),), shard_dim, expert), self.num_experts, transposed=True)

    def _map_stacked(self, prefix: str, expert: int, linear: str) -> ParameterMap:
        stack = f"{prefix}{self.hf_names.block}.experts."
        hidden, ffn = self.hidden_size, self.ffn_size
        if linear == "2":
            return stacked(split_columns(f"{stack}down_proj", hidden, ffn, expert), self.num_experts)
        shape = (2 * ffn, hidden)
        gate, up = (RowRange(f"{stack}gate_up_proj", shape, start, start + ffn) for start in (0, ffn))
        return stacked(ParameterMap(((gate,), (up,)), 0, expert), self.num_experts)

    def _map_expert(self, prefix: str, expert: int, linear: str) -> ParameterMap:
        hf_prefix = f"{prefix}{self.hf_names.block}.experts.{expert}."
        if linear == "2":
            return split_columns(f"{hf_prefix}{self.hf_names.down}.weight", self.hidden_size, self.ffn_size, expert)
        gate, up = (f"{hf_prefix}{name}.weight" for name in (self.hf_names.gate, self.hf_names.up))
        return split_rows(gate, up, height=self.ffn_size, width=self.hidden_size, expert=expert)


FeedForward = GatedMlp | MixtureOfExperts
"""Feed-forward part of a layer."""


def gated_fc1(prefix: str, hidden_size: int, ffn_size: int) -> ParameterMap:
    """Return the map of megatron-core's `linear_fc1`: each rank stacks its shard of gate above its shard of up."""
    return split_rows(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight", height=ffn_size, width=hidden_size)
