"""From a model's config.json and the sizes of both sides to a scenario, with reasons where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megarl.errors import ConfigError
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.load_architecture import read_model
from megarl.megatron.families.pipeline_stages import EVEN, PipelineSplit, stage_layers
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import Scenario, even_nodes
from megarl.reshard.analysis.sync_report import Explanation, explain, explain_auto
from megarl.reshard.layout.engine_stages import split_stages
from megarl.reshard.layout.layout import WeightLayout


class Engine(Protocol):
    """Where an engine's layouts come from."""

    def __call__(self, tp: int, dtype: str, *, ep: int = 1) -> Sequence[WeightLayout]:
        """By tensor rank."""


MAX_SIZE = 256
"""Of an axis, that a refusal suggests."""

TRAIN_AXES = ("pp", "vpp", "tp", "cp", "dp", "ep", "etp")
GEN_AXES = ("pp", "tp", "ep")


def parse_sizes(option: str, text: str, axes: Sequence[str]) -> dict[str, int]:
    """`pp=1,tp=4` -> the sizes that are named.

    Raises:
        ConfigError: it is not of that form.
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
    """The folder's, also where its config.json was given."""
    path = Path(model_path).resolve()
    return path.parent.name if path.name == "config.json" else path.name


def trace_scenario(
    model_path: str,
    *,
    train: str,
    gen: str,
    nodes: int,
    bucket_bytes: int,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Scenario:
    """Of a published model: the trainer's layouts by its family's table, the engine's as SGLang lays it out on GPUs.

    The arguments are those of `make_scenario`.
    """
    model, dtype = read_model(model_path)

    def traced(tp: int, dtype: str, *, ep: int = 1) -> Sequence[WeightLayout]:
        from megarl.rollout.sglang.weight_layout.offline_trace import (
            trace_layouts,  # after the sizes are found good: it takes seconds
        )

        return trace_layouts(model_path, tp=tp, ep=ep, device="cuda", dtype=dtype)

    return make_scenario(
        model_name(model_path),
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


def explain_scenarios(
    scenario: Scenario, names: Sequence[str], tell: Callable[[str], None]
) -> tuple[dict[str, Explanation], dict[str, ConfigError]]:
    """By strategy in the order of `names`: what it costs, or why it cannot serve these sizes; see `explain`."""
    explained: dict[str, Explanation] = {}
    refused: dict[str, ConfigError] = {}
    for name in names:
        try:
            known = list(explained.values())
            explained[name] = explain_auto(scenario, known) if name == "auto" else explain(name, scenario, tell)
        except ConfigError as error:
            refused[name] = error
    return explained, refused


def make_scenario(
    name: str,
    model: Decoder,
    dtype: str,
    *,
    train: str,
    gen: str,
    nodes: int,
    bucket_bytes: int,
    engine: Engine,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Scenario:
    """Both sides' layouts.

    Args:
        name: of the model, in reports.
        train: as `pp=1,tp=4,dp=2`; `etp` is tp where it is not named, as in Megatron.
        gen: as `pp=1,tp=2`.
        first_stage_layers: layers of the trainer's first stage where not as many as of those between.
        last_stage_layers: likewise, of the last.

    Raises:
        ConfigError: sizes that the model does not divide by.
    """
    sizes = parse_sizes("--train", train, TRAIN_AXES)
    split = PipelineSplit(chunks=sizes.pop("vpp", 1), first=first_stage_layers, last=last_stage_layers)
    to = dict.fromkeys(GEN_AXES, 1) | parse_sizes("--gen", gen, GEN_AXES)
    try:
        grid = RankGrid(**sizes)
    except ConfigError as e:
        raise ConfigError(f"--train {train}: {e}") from e
    _require_served(model, grid, split, to)
    traced = engine(to["tp"], dtype, ep=to["ep"])
    stages = [split_stages(layout, to["pp"]) for layout in traced]
    return Scenario(
        model=name,
        grid=grid,
        gen_pp=to["pp"],
        gen_tp=to["tp"],
        sources=tuple(trainer_layouts(model, grid, dtype, split)),
        engine=tuple(tuple(of_rank[stage] for of_rank in stages) for stage in range(to["pp"])),
        topology=even_nodes(grid.size, nodes),
        bucket_bytes=bucket_bytes,
    )


def _require_served(model: Decoder, grid: RankGrid, split: PipelineSplit, gen: Mapping[str, int]) -> None:
    """Sizes by which every tensor divides; a vocabulary is padded instead."""
    _require_stages(model.num_layers, grid.pp, split)
    _require("--gen pp", gen["pp"], lambda pp: _rest("layers", model.num_layers, pp))
    _require("--train tp", grid.tp, lambda tp: _indivisible(model, "tp", tp, repeat=False))
    _require("--gen tp", gen["tp"], lambda tp: _indivisible(model, "tp", tp, repeat=True))
    if model.num_experts:
        _require("--train ep", grid.ep, lambda ep: _indivisible(model, "ep", ep, repeat=False))
        _require("--train etp", grid.expert_tp, lambda etp: _indivisible(model, "etp", etp, repeat=False))
        _require("--gen ep", gen["ep"], lambda ep: _indivisible(model, "ep", ep, repeat=False))
        _require("--gen ep", gen["ep"], lambda ep: _rest("tp ranks", gen["tp"], ep))
        _require("--gen tp/ep", gen["tp"] // gen["ep"], lambda etp: _indivisible(model, "etp", etp, repeat=False))
    else:
        for option, ep in (("--train", grid.ep), ("--gen", gen["ep"])):
            if ep > 1:
                raise ConfigError(f"{option} ep={ep}: {model.architecture} has no experts; it can only be 1")
    if gen["pp"] * gen["tp"] > grid.size:
        raise ConfigError(
            f"--gen: an engine takes pp {gen['pp']} * tp {gen['tp']} = {gen['pp'] * gen['tp']} ranks, "
            f"--train has {grid.size}"
        )


def _require_stages(num_layers: int, pp: int, split: PipelineSplit) -> None:
    if split == EVEN:
        hint = "; --first-stage-layers and --last-stage-layers give those two a number of their own"
        _require("--train pp", pp, lambda pp: _rest("layers", num_layers, pp), hint=hint)
    else:
        _require("--train pp", pp, lambda pp: _stage_problem(num_layers, pp, split))


def _stage_problem(num_layers: int, pp: int, split: PipelineSplit) -> str | None:
    try:
        stage_layers(num_layers, pp, split)
    except ConfigError as e:
        return str(e)
    return None


def _require(option: str, size: int, problem: Callable[[int], str | None], *, hint: str = "") -> None:
    why = problem(size)
    if why is not None:
        possible = sorted((n for n in range(1, MAX_SIZE + 1) if problem(n) is None), key=lambda n: abs(n - size))
        nearest = " and ".join(map(str, sorted(possible[:2])))
        served = f"; the nearest that can be served: {nearest}" if nearest else ""
        raise ConfigError(f"{option}={size}: {why}{served}{hint}")


def _indivisible(model: Decoder, axis: str, size: int, *, repeat: bool) -> str | None:
    """What `size` ranks cannot share, and why.

    Args:
        repeat: as in SGLang, which gives several ranks the same key-value head.
    """
    for units in model.units():
        if units.axis != axis or (repeat and units.repeats and size % units.total == 0):
            continue
        why = _rest(units.what, units.total, size)
        if why:
            return why
    return None


def _rest(what: str, total: int, size: int) -> str | None:
    return f"{what} that do not divide, {total} % {size} = {total % size}" if total % size else None
