"""Models in their published sizes, and planned syncs of the layouts for which other systems have published times.

    python -m benchmarks.reshard.published --json

Prints one object for each row of the tables that NeMo-RL and Miles publish, for the models that megarl reads. Nothing
is sent: the plans of all ranks are simulated at the rates of the hardware's links, as in `benchmarks.reshard.clock`.

    published_seconds      (least, most) as published; published_broadcast_seconds: of the same system's broadcast
    seconds_planned        of the simulated sync, strategy exact; seconds_bound: least of any method at these rates
    bytes_per_engine_rank  the most that one receives; network_bytes_max: the most that one NIC sends, or receives
    groups, p2p_calls      the most that one rank posts
    ranks_planned          ranks whose plans were made and simulated; all of `ranks`
    experts_merged         so many consecutive experts are planned as one of their joint size, which makes planning
                           that much faster; only where engines split experts, into boxes far below a bucket. Bytes
                           change by the routers' rows only, under 1 %; p2p_calls are fewer, since boxes of at least
                           256 KiB are messages of their own

Planned and published seconds are not the same quantity: see `assumptions` in each row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.text_table import markdown_rows, print_rows
from megarl.cli.tools.reshard_explain import TRAIN_AXES, parse_sizes
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.feed_forward import MixtureOfExperts
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import EVEN, PipelineSplit, trainer_layouts
from megarl.reshard.analysis.sync_clock import SyncTiming, box_schedule, time_schedule
from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.layout import Columns, PieceTable, WeightLayout
from megarl.reshard.layout.lower_bounds import seconds_bound
from megarl.reshard.layout.model_tensors import ModelTensors, Names
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.planning.plan import RankPlan, plan_rank
from megarl.reshard.planning.plan_cache import cached_index

DTYPE = "bfloat16"
BUCKET_BYTES = 256 << 20

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
"""config.json content of DeepSeek-V3."""

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""config.json content of Qwen3-8B."""

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""config.json content of Qwen3-30B-A3B."""

QWEN3_4B: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
"""config.json content of Qwen3-4B."""

QWEN3_235B_A22B: dict[str, Any] = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
"""config.json content of Qwen3-235B-A22B."""

GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""config.json content of GLM-4.5-Air."""

KIMI_K2: dict[str, Any] = DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072,
}
"""config.json content of Kimi-K2, as far as shapes depend on it."""

BY_COLUMNS = ("o_proj", "down_proj")
ON_EVERY_RANK = ("q_a_proj", "kv_a_proj_with_mqa", "gate")
KEYS_VALUES = ("k_proj", "v_proj")
EXPERT = ".experts."
MTP = "eh_proj.weight"
"""Ending of the name of a tensor that only MTP layers have, which engines do not load."""


def engine_layouts(
    tensors: ModelTensors, tp: int, *, ep: int = 1, num_kv_heads: int | None = None
) -> list[WeightLayout]:
    """Return the layouts of an engine by tensor rank, without fused parameters.

    Norms, biases, routers and down projections into a latent are replicated; all other tensors are split evenly.

    Args:
        ep: 1, or `tp`: each rank has some of the routed experts in full.
        num_kv_heads: key-value heads, each of which is on several ranks if there are fewer than `tp`.
    """
    assert ep in (1, tp), (ep, tp)
    mtp_layers = tuple(name.removesuffix(MTP) for name in tensors if name.endswith(MTP))
    names = [name for name in tensors if not name.startswith(mtp_layers)]
    shapes = np.array([(*tensors[name].shape, 1)[:2] for name in names])
    dims = np.array([len(tensors[name].shape) for name in names], np.int8)
    kinds = [name.split(".")[-2] for name in names]
    expert = np.array([int(name.split(EXPERT)[1].split(".")[0]) if EXPERT in name else -1 for name in names])
    replicated = np.array([kind in ON_EVERY_RANK for kind in kinds]) | (dims == 1) | ((expert >= 0) & (ep > 1))
    dim = np.array([kind in BY_COLUMNS for kind in kinds]).astype(int)
    parts = np.array([min(tp, num_kv_heads or tp) if kind in KEYS_VALUES else tp for kind in kinds])
    experts_of_rank = (expert.max() + 1) // ep
    rows = np.arange(len(names))
    layouts, locals_ = [], Names(names)
    for rank in range(tp):
        part, number = shapes[rows, dim] // parts, rank * parts // tp
        boxes = np.stack([np.zeros_like(shapes), shapes], axis=-1)
        boxes[rows, dim] = np.stack([part * number, part * (number + 1)], axis=-1)
        boxes[replicated] = np.stack([np.zeros_like(shapes), shapes], axis=-1)[replicated]
        boxes = boxes.astype(np.int32)
        here = np.flatnonzero((expert < 0) | (ep == 1) | (expert // max(experts_of_rank, 1) == rank))
        every, boxes = here.astype(np.int32), boxes[here]
        table = PieceTable(locals_, locals_, Columns(every, every, dims[here], boxes, boxes - boxes[..., :1]))
        layouts.append(WeightLayout(tensors, table))
    return layouts


@dataclass(frozen=True, slots=True)
class Hardware:
    """Links of a machine, or of an NVLink domain."""

    name: str
    ranks_per_machine: int
    rates: LinkRates
    assumption: str


H100 = Hardware(
    "H100", 8, LinkRates(network=50e9, nvlink=400e9), "machines of 8 GPUs, each with a NIC of 400 Gbit/s, at line rate"
)
GB200 = Hardware(
    "GB200",
    64,
    LinkRates(network=50e9, nvlink=800e9),
    "NVLink domains of 64 GPUs, as NeMo-RL's recipes use of 72, each with a NIC of 400 Gbit/s, at line rate",
)

NEMO = "NeMo-RL nccl_reshard", "NVIDIA-NeMo/RL docs/design-docs/nccl-reshard-refit.md, Expected Performance"
NEMO_XFER = "NeMo-RL nccl_xfer", "NVIDIA-NeMo/RL #2808"
MILES = "Miles P2P RDMA", "radixark/miles docs/advanced/p2p-weight-transfer.md, Profiling Results"

DISAGGREGATED = "trainer and engines on machines of their own, bfloat16 on both sides, buckets of 256 MiB"
LINKS_ONLY = "planned: links only; packing, copies, loading into the engine and host time take none"
OF_NEMO = "published: the whole refit, of which 67 to 98 % of the bytes go shard to shard and the rest by broadcast"
OF_MILES = "published: from the pause of generation to the end of the update, with the gather on the trainer's side"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published time."""

    system: tuple[str, str]
    """Name and source."""
    hardware: Hardware
    model: str
    config: Mapping[str, Any]
    train: str
    gen_tp: int
    gen_ep: int = 1
    engines: int
    seconds: tuple[float, float]
    broadcast_seconds: float | None = None
    split: PipelineSplit = EVEN
    experts_merged: int = 1
    assumptions: tuple[str, ...] = field(default_factory=tuple)


ROWS = (
    Row(
        system=NEMO,
        hardware=H100,
        model="Qwen3-4B",
        config=QWEN3_4B,
        train="dp=8",
        gen_tp=8,
        engines=1,
        seconds=(0.21, 0.34),
    ),
    Row(
        system=NEMO,
        hardware=H100,
        model="Qwen3-30B-A3B",
        config=QWEN3_30B_A3B,
        train="pp=2,dp=8,ep=8",
        gen_tp=8,
        engines=2,
        seconds=(0.74, 1.0),
    ),
    Row(
        system=MILES,
        hardware=H100,
        model="Qwen3-30B-A3B",
        config=QWEN3_30B_A3B,
        train="tp=4,dp=4,ep=8,etp=1",
        gen_tp=8,
        gen_ep=8,
        engines=2,
        seconds=(2.1602, 2.1602),
        broadcast_seconds=2.67,
    ),
    Row(
        system=MILES,
        hardware=H100,
        model="GLM-4.5-Air",
        config=GLM_4_5_AIR | {"num_nextn_predict_layers": 0},
        train="pp=4,dp=8,ep=8",
        gen_tp=8,
        gen_ep=8,
        engines=4,
        seconds=(2.6372, 2.6372),
        broadcast_seconds=5.0011,
        split=PipelineSplit(last=10),
    ),
    Row(
        system=MILES,
        hardware=H100,
        model="Qwen3-235B-A22B",
        config=QWEN3_235B_A22B,
        train="pp=4,tp=4,cp=2,dp=2,ep=16,etp=1",
        gen_tp=32,
        gen_ep=32,
        engines=2,
        seconds=(3.162, 3.162),
        broadcast_seconds=10.7536,
        split=PipelineSplit(last=22),
    ),
    Row(
        system=NEMO_XFER,
        hardware=H100,
        model="Qwen3-235B-A22B",
        config=QWEN3_235B_A22B,
        train="pp=8,tp=4,dp=4,ep=16,etp=1",
        gen_tp=8,
        engines=16,
        seconds=(4.56, 4.85),
        split=PipelineSplit(first=11, last=11),
        experts_merged=8,
        assumptions=("hardware and dp as in the recipe grpo-qwen3-235b-32n8g-async-1off",),
    ),
    Row(
        system=NEMO,
        hardware=H100,
        model="DeepSeek-V3",
        config=DEEPSEEK_V3 | {"num_nextn_predict_layers": 0},
        train="pp=16,dp=16,ep=16",
        gen_tp=32,
        engines=8,
        seconds=(2.39, 2.83),
        split=PipelineSplit(first=3, last=2),
        experts_merged=16,
        assumptions=("dp and stages as in the recipe grpo-deepseek-v3-64n8g-async-1off",),
    ),
    Row(
        system=NEMO,
        hardware=GB200,
        model="DeepSeek-V3",
        config=DEEPSEEK_V3 | {"num_nextn_predict_layers": 0},
        train="pp=16,dp=16,ep=16",
        gen_tp=32,
        engines=8,
        seconds=(1.93, 2.59),
        split=PipelineSplit(first=3, last=2),
        experts_merged=16,
        assumptions=("dp and stages as in the recipe grpo-deepseek-v3-64n8g-async-1off",),
    ),
    Row(
        system=MILES,
        hardware=H100,
        model="Kimi-K2",
        config=KIMI_K2,
        train="pp=8,tp=8,cp=4,ep=32,etp=1",
        gen_tp=32,
        gen_ep=32,
        engines=8,
        seconds=(7.2273, 7.2273),
        broadcast_seconds=53.2791,
        split=PipelineSplit(last=5),
        assumptions=(
            "megarl's bytes are those of bfloat16; Miles sends FP8, about half of them",
            "published: 0.884 s of it requantize in the engine",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedReport:
    """The figures of one row, as printed; see the module for their meaning."""

    system: str
    source: str
    hardware: str
    model: str
    train: str
    gen: str
    engines: int
    ranks: int
    ranks_planned: int
    machines: int
    network_gb_per_second: float
    nvlink_gb_per_second: float
    published_seconds: tuple[float, float]
    published_broadcast_seconds: float | None
    seconds_planned: float
    seconds_bound: float
    planned_over_bound: float
    bytes_per_engine_rank: int
    network_bytes_max: int
    rounds: int
    hops: int
    groups: int
    p2p_calls: int
    experts_merged: int
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimedSync:
    """The plans of all ranks of a sync, simulated, and the bound of its layouts."""

    plans: Sequence[RankPlan]
    timing: SyncTiming
    seconds_bound: float


def time_index(index: SyncIndex, rates: LinkRates) -> TimedSync:
    """Plan all ranks and simulate the sync."""
    plans = [plan_rank(index, rank) for rank in range(len(index.sources))]
    timing = time_schedule(box_schedule(plans, index.large_bytes), index.topology, rates)
    return TimedSync(plans, timing, seconds_bound(index.sources, index.needs, index.topology, rates))


def index_of(spec: TransferSpec) -> SyncIndex:
    """Return the index of a sync between trainer ranks and engines with machines of their own."""
    held, needs = spec.layouts()
    return cached_index(held, needs, Topology(spec.nodes), spec.bucket_bytes)


def nodes_of(trainers: int, engine_ranks: int, ranks_per_machine: int) -> tuple[int, ...]:
    """Return the machine of each trainer rank and then of each engine rank, which have machines of their own."""
    first = -(-trainers // ranks_per_machine)
    return (
        *(rank // ranks_per_machine for rank in range(trainers)),
        *(first + rank // ranks_per_machine for rank in range(engine_ranks)),
    )


def merge_experts(model: ModelArchitecture, number: int) -> ModelArchitecture:
    """Return the model with `number` consecutive routed experts as one of their joint size."""
    layers = []
    for layer in model.layers:
        experts = layer.mlp
        if isinstance(experts, MixtureOfExperts):
            assert experts.num_experts % number == 0, (experts.num_experts, number)
            count, size = experts.num_experts // number, experts.ffn_size * number
            experts = replace(experts, num_experts=count, ffn_size=size)
        layers.append(replace(layer, mlp=experts))
    return replace(model, layers=tuple(layers))


def measure(row: Row) -> PublishedReport:
    """Plan and simulate the sync of a row."""
    model = merge_experts(load_architecture(row.config, origin=row.model), row.experts_merged)
    sources = trainer_layouts(model, RankGrid(**parse_sizes("train", row.train, TRAIN_AXES)), DTYPE, row.split)
    engine = engine_layouts(
        sources[0].tensors, row.gen_tp, ep=row.gen_ep, num_kv_heads=row.config["num_key_value_heads"]
    )
    spec = TransferSpec(
        sources=sources,
        needs=engine,
        num_engines=row.engines,
        nodes=nodes_of(len(sources), row.engines * row.gen_tp, row.hardware.ranks_per_machine),
        bucket_bytes=BUCKET_BYTES,
    )
    rates = row.hardware.rates
    index = index_of(spec)
    timed = time_index(index, rates)
    received = [
        int(plan.receives.num_bytes[plan.receives.peer != plan.rank].sum()) for plan in timed.plans[len(sources) :]
    ]
    experts: tuple[str, ...] = ()
    if model.num_experts:
        experts = ("each expert on one rank of an engine" if row.gen_ep > 1 else "each expert split over an engine",)
    return PublishedReport(
        system=row.system[0],
        source=row.system[1],
        hardware=row.hardware.name,
        model=row.model,
        train=row.train,
        gen=f"tp={row.gen_tp}" + (f",ep={row.gen_ep}" if row.gen_ep > 1 else ""),
        engines=row.engines,
        ranks=spec.size,
        ranks_planned=len(timed.plans),
        machines=len(set(spec.nodes)),
        network_gb_per_second=rates.network / 1e9,
        nvlink_gb_per_second=rates.nvlink / 1e9,
        published_seconds=row.seconds,
        published_broadcast_seconds=row.broadcast_seconds,
        seconds_planned=round(timed.timing.seconds_planned, 4),
        seconds_bound=round(timed.seconds_bound, 4),
        planned_over_bound=round(timed.timing.seconds_planned / timed.seconds_bound, 3),
        bytes_per_engine_rank=max(received),
        network_bytes_max=timed.timing.busiest_nic_bytes,
        rounds=index.num_rounds,
        hops=index.num_hops,
        groups=timed.timing.groups,
        p2p_calls=timed.timing.p2p_calls,
        experts_merged=row.experts_merged,
        assumptions=(
            DISAGGREGATED,
            row.hardware.assumption,
            *experts,
            LINKS_ONLY,
            OF_MILES if row.system is MILES else OF_NEMO,
            *row.assumptions,
        ),
    )


COLUMNS = (
    "system",
    "model",
    "train -> engines",
    "hardware",
    "published s",
    "planned s",
    "bound s",
    "GB into an engine rank",
    "rounds x hops",
    "groups",
    "p2p calls",
)
NUM_TEXT_COLUMNS = 4


def rows(reports: Sequence[PublishedReport]) -> list[list[str]]:
    """Return table rows under `COLUMNS`."""
    return [
        [
            r.system,
            r.model,
            f"{r.train} -> {r.engines} x {r.gen}",
            f"{r.ranks} {r.hardware}",
            "..".join(f"{seconds:.2f}" for seconds in dict.fromkeys(r.published_seconds)),
            f"{r.seconds_planned:.3f}",
            f"{r.seconds_bound:.3f}",
            f"{r.bytes_per_engine_rank / 1e9:.2f}",
            f"{r.rounds} x {r.hops}",
            str(r.groups),
            str(r.p2p_calls),
        ]
        for r in reports
    ]


def page(reports: Sequence[PublishedReport]) -> str:
    """Return the page with all rows and their assumptions, as Markdown."""
    lines = [
        "# Weight sync: planned seconds for published layouts\n",
        "Written by `python -m benchmarks.reshard.published --write benchmarks/results/reshard-published.md`. Nothing "
        "was sent:\nplans of all ranks were simulated at the rates of the hardware's links. Planned seconds are no "
        "measurement, and the\npublished ones contain more than the links: the assumptions are listed below.\n",
        markdown_rows(COLUMNS, rows(reports), NUM_TEXT_COLUMNS),
    ]
    for r in reports:
        merged = (
            f", {r.experts_merged} experts planned as one (p2p calls are fewer for it)" if r.experts_merged > 1 else ""
        )
        broadcast = r.published_broadcast_seconds
        lines.append(
            f"- {r.system}, {r.model}, {r.hardware}: {r.source}"
            + (f"; its broadcast takes {broadcast:.2f} s" if broadcast is not None else "")
            + f". {r.network_gb_per_second:g} GB/s a NIC, {r.nvlink_gb_per_second:g} GB/s NVLink; "
            + "; ".join(r.assumptions)
            + merged
            + "."
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of each row."""
    args = _parser().parse_args(arguments)
    reports = []
    for number in args.rows or range(len(ROWS)):
        start = time.process_time()
        reports.append(measure(ROWS[number]))
        seconds = time.process_time() - start
        print(f"row {number}: {reports[-1].model}, {reports[-1].ranks} ranks: {seconds:.0f} CPU s", file=sys.stderr)
        if args.json:
            print(json.dumps(asdict(reports[-1])), flush=True)
    if not args.json:
        print_rows(COLUMNS, rows(reports), NUM_TEXT_COLUMNS)
    if args.write:
        args.write.write_text(page(reports))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.reshard.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", choices=range(len(ROWS)), metavar="N", help="rows (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to this Markdown file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
