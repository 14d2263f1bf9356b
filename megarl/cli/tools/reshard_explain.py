"""Build weight sync scenarios from a model's config.json and the parallel sizes of both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.feed_forward import ShardingUnit
from megarl.megatron.families.load_architecture import load_architecture_and_dtype, require_family
from megarl.megatron.families.trainer_layouts import EVEN, PipelineSplit, stage_layers, trainer_layouts
from megarl.model_files.hub import local_model
from megarl.reshard.analysis.scenario import Scenario, even_nodes
from megarl.reshard.analysis.sync_report import Explanation, explain
from megarl.reshard.layout.engine_ranks import resolve_strategy
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.quantized_layout import convert_sources
from megarl.reshard.layout.topology import LinkRates, Topology


class EngineLayouts(Protocol):
    """Function that returns the weight layouts of an engine."""

    def __call__(self, tp: int, dtype: str, *, ep: int = 1, dp: int = 1) -> Sequence[WeightLayout]:
        """Return one layout per tensor-parallel rank; `dp`: groups of data-parallel attention within the ranks."""


MAX_SIZE = 256
"""Largest size of an axis that an error message suggests."""

TRAIN_AXES = ("pp", "vpp", "tp", "cp", "dp", "ep", "etp")
GEN_AXES = ("pp", "tp", "ep", "dp")


def parse_sizes(option: str, text: str, axes: Sequence[str]) -> dict[str, int]:
    """Parse sizes such as `pp=1,tp=4`; axes not named in `text` are absent from the result.

    Raises:
        ConfigError: `text` is malformed; the message names `option`.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if not equals or name not in axes or name in sizes or not number.isascii() or not number.isdigit():
            raise ConfigError(f"{option} needs {','.join(f'{axis}=N' for axis in axes)}, got {text!r} at {part!r}")
        if int(number) < 1:
            raise ConfigError(f"{option} needs sizes of at least 1, got {part.strip()}")
        sizes[name] = int(number)
    return sizes


def model_name(model_path: str) -> str:
    """Return the name of the model folder; `model_path` may also be its config.json."""
    path = Path(model_path).resolve()
    return path.parent.name if path.name == "config.json" else path.name


def trace_scenario(
    model_path: str,
    *,
    family: str | None = None,
    train: str,
    gen: str,
    nodes: int,
    bucket_bytes: int,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Scenario:
    """Build the scenario of a published model, tracing the engine's layouts in SGLang's code for GPUs.

    The other arguments are those of `make_scenario`.

    Args:
        family: import path of the family, if that is outside the package; SGLang needs to know its architecture.
    """
    name, model_path = model_name(model_path), local_model(model_path, key="--model", files=("config.json",))
    require_family(model_path, family, key="--family")
    model, dtype = load_architecture_and_dtype(model_path, family=family)

    def traced(tp: int, dtype: str, *, ep: int = 1, dp: int = 1) -> Sequence[WeightLayout]:
        from megarl.engines.sglang.weight_layout.offline_trace import (
            trace_layouts,  # after the sizes are found good: it takes seconds
        )

        return trace_layouts(model_path, tp=tp, ep=ep, options={"attn_dp_size": dp}, device="cuda", dtype=dtype)

    return make_scenario(
        name,
        model,
        dtype,
        train=train,
        gen=gen,
        nodes=nodes,
        bucket_bytes=bucket_bytes,
        engine=traced,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
    )


def link_rates(*, network_gb_per_second: float, nvlink_gb_per_second: float, nics_per_machine: int | None) -> LinkRates:
    """Return the rates of options of the command line, which give them in 10^9 bytes per second.

    Raises:
        ConfigError: a number is not positive.
    """
    rates = {"--network-gb-per-second": network_gb_per_second, "--nvlink-gb-per-second": nvlink_gb_per_second}
    for option, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise ConfigError(f"{option} needs a positive number, got {rate:g}")
    if nics_per_machine is not None and nics_per_machine < 1:
        raise ConfigError(f"--nics-per-machine needs to be at least 1, got {nics_per_machine}")
    return LinkRates(
        network=network_gb_per_second * 1e9, nvlink=nvlink_gb_per_second * 1e9, nics_per_machine=nics_per_machine
    )


def require_even_nics(rates: LinkRates, topology: Topology) -> None:
    """Return if the ranks of each node share its NICs evenly.

    Raises:
        ConfigError: some get more than others.
    """
    for ranks in topology.ranks_of.values():
        more, fewer = sorted((rates.num_nics(len(ranks)), len(ranks)), reverse=True)
        if more % fewer:
            raise ConfigError(
                "--nics-per-machine needs to divide the ranks of a node or be a multiple of them, "
                f"got {rates.nics_per_machine} NICs for {len(ranks)} ranks"
            )


def explain_scenarios(
    scenario: Scenario, names: Sequence[str], report: Callable[[str], None], rates: LinkRates
) -> tuple[dict[str, Explanation], dict[str, ConfigError]]:
    """Explain strategies in the order of `names`; returns reports, and the errors of strategies that do not apply.

    `report` receives progress lines; see `explain`.
    """
    explained: dict[str, Explanation] = {}
    refused: dict[str, ConfigError] = {}
    for name in names:
        try:
            strategy = resolve_strategy(name, scenario.grid, scenario.topology, gen_tp=scenario.gen_tp)
            known = (each for each in explained.values() if each.report.strategy == strategy)
            explained[name] = next(known, None) or explain(strategy, scenario, report, rates)
        except ConfigError as error:
            refused[name] = error
    return explained, refused


def make_scenario(
    name: str,
    model: ModelArchitecture,
    dtype: str,
    *,
    train: str,
    gen: str,
    nodes: int,
    bucket_bytes: int,
    engine: EngineLayouts,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Scenario:
    """Build a scenario with the weight layouts of trainer and engine.

    Args:
        name: model name for reports.
        train: trainer sizes such as `pp=1,tp=4,dp=2`; `etp` defaults to `tp`, as in Megatron.
        gen: engine sizes such as `tp=2`; `dp` counts groups of data-parallel attention within the `tp` ranks.
        engine: returns the layouts of the engine's tensor-parallel ranks.
        first_stage_layers: layers of the trainer's first pipeline stage; None: as many as in the middle stages.
        last_stage_layers: layers of the last pipeline stage, likewise.

    Raises:
        ConfigError: the model is not divisible by the sizes.
    """
    sizes = parse_sizes("--train", train, TRAIN_AXES)
    split = PipelineSplit(num_chunks=sizes.pop("vpp", 1), first=first_stage_layers, last=last_stage_layers)
    to = dict.fromkeys(GEN_AXES, 1) | parse_sizes("--gen", gen, GEN_AXES)
    try:
        grid = RankGrid(**sizes)
    except ConfigError as e:
        raise ConfigError(f"--train {train}: {e}") from e
    _require_divisible(model, grid, split, to)
    topology = even_nodes(grid.size, nodes)
    traced = engine(to["tp"], dtype, ep=to["ep"], dp=to["dp"])
    return Scenario(
        model=name,
        grid=grid,
        gen_tp=to["tp"],
        sources=tuple(convert_sources(trainer_layouts(model, grid, dtype, split), traced)),
        engine=tuple(traced),
        topology=topology,
        bucket_bytes=bucket_bytes,
    )


def _require_divisible(model: ModelArchitecture, grid: RankGrid, split: PipelineSplit, gen: Mapping[str, int]) -> None:
    """Return if every tensor is divisible by the sizes; a vocabulary is padded instead."""
    _require_pipeline_stages(model.num_layers, grid.pp, split)
    if gen["pp"] > 1:
        raise ConfigError(f"--gen pp={gen['pp']}: a sync reaches one pipeline stage of an engine; it can only be 1")
    _require_size("--train tp", grid.tp, partial(_divisibility_problem, model.sharding_units(), "tp"))
    units, groups = model.sharding_units(), gen["dp"]
    _require_size("--gen dp", groups, lambda dp: _remainder_problem("tp ranks", gen["tp"], dp))
    if groups > 1:
        attention = model.sharding_units(lambda layer: (layer.attention,))
        problem = partial(_divisibility_problem, attention, "tp", repeat=True)
        _require_size("--gen tp/dp", gen["tp"] // groups, problem)
        units = model.sharding_units(lambda layer: (layer.mlp,))
    _require_size("--gen tp", gen["tp"], partial(_divisibility_problem, units, "tp", repeat=True))
    if model.num_experts:
        _require_size("--train ep", grid.ep, partial(_divisibility_problem, units, "ep"))
        _require_size("--train etp", grid.expert_tp, partial(_divisibility_problem, units, "etp"))
        _require_size("--gen ep", gen["ep"], partial(_divisibility_problem, units, "ep"))
        _require_size("--gen ep", gen["ep"], lambda ep: _remainder_problem("tp ranks", gen["tp"], ep))
        _require_size("--gen tp/ep", gen["tp"] // gen["ep"], partial(_divisibility_problem, units, "etp"))
    else:
        for option, ep in (("--train", grid.ep), ("--gen", gen["ep"])):
            if ep > 1:
                raise ConfigError(f"{option} ep={ep}: {model.name} has no experts; it can only be 1")
    if gen["tp"] > grid.size:
        raise ConfigError(f"--gen: an engine takes tp = {gen['tp']} ranks, --train has {grid.size}")


def _require_pipeline_stages(num_layers: int, pp: int, split: PipelineSplit) -> None:
    if split == EVEN:
        hint = "; --first-stage-layers and --last-stage-layers give those two a number of their own"
        _require_size("--train pp", pp, lambda pp: _remainder_problem("layers", num_layers, pp), hint=hint)
    else:
        _require_size("--train pp", pp, lambda pp: _stage_problem(num_layers, pp, split))


def _stage_problem(num_layers: int, pp: int, split: PipelineSplit) -> str | None:
    try:
        stage_layers(num_layers, pp, split)
    except ConfigError as e:
        return str(e)
    return None


def _require_size(option: str, size: int, problem: Callable[[int], str | None], *, hint: str = "") -> None:
    why = problem(size)
    if why is not None:
        possible = sorted((n for n in range(1, MAX_SIZE + 1) if problem(n) is None), key=lambda n: abs(n - size))
        nearest = " and ".join(map(str, sorted(possible[:2])))
        served = f"; the nearest that can be served: {nearest}" if nearest else ""
        raise ConfigError(f"{option}={size}: {why}{served}{hint}")


def _divisibility_problem(units: Iterable[ShardingUnit], axis: str, size: int, *, repeat: bool = False) -> str | None:
    """Return why a model with these units cannot be sharded over `size` ranks of `axis`; None if it can.

    Args:
        repeat: key-value heads may be replicated over ranks, as in SGLang.
    """
    for unit in units:
        if unit.axis != axis or (repeat and unit.can_replicate and size % unit.total == 0):
            continue
        why = _remainder_problem(unit.description, unit.total, size)
        if why:
            return why
    return None


def _remainder_problem(what: str, total: int, size: int) -> str | None:
    return f"{what} that do not divide, {total} % {size} = {total % size}" if total % size else None
