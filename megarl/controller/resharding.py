"""From a model's config.json and the sizes of both sides to a scenario, with reasons where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, DataError
from megarl.megatron.families.dense import DenseModel
from megarl.megatron.families.layouts import trainer_layouts
from megarl.placement.grid import RankGrid
from megarl.reshard.layout import WeightLayout
from megarl.reshard.report import Explanation, explain, explain_cheapest
from megarl.reshard.scenario import Scenario, even_nodes
from megarl.reshard.stages import split_stages

Engine = Callable[[int, str], Sequence[WeightLayout]]
"""(tp, dtype) -> layouts by tensor rank."""

MAX_GENERATION_TP = 64


def parse_sizes(option: str, text: str, axes: Sequence[str]) -> dict[str, int]:
    """`pp=1,tp=4` -> sizes of all `axes`, 1 where not named.

    Raises:
        ConfigError: it is not of that form.
    """
    sizes = dict.fromkeys(axes, 1)
    named = set()
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if not equals or name not in axes or name in named or not number.isascii() or not number.isdigit():
            raise ConfigError(f"{option} needs {','.join(f'{axis}=N' for axis in axes)}, got {text!r} at {part!r}")
        if int(number) < 1:
            raise ConfigError(f"{option} needs sizes of at least 1, got {part.strip()}")
        named.add(name)
        sizes[name] = int(number)
    return sizes


def read_model(path: str) -> tuple[DenseModel, str]:
    """The model of a folder or a config.json, and its dtype.

    Raises:
        DataError: there is no such file, or it is no JSON object.
        ConfigError: its architecture is not supported.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{file}: cannot be read as a model's config.json: {e}") from e
    if not isinstance(config, dict):
        raise DataError(f"{file}: a model's config.json is an object, got {type(config).__name__}")
    try:
        model = DenseModel.from_hf(config, origin=str(file))
    except KeyError as e:
        raise DataError(f"{file}: lacks {e}") from e
    return model, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def model_name(model_path: str) -> str:
    """The folder's, also where its config.json was given."""
    path = Path(model_path).resolve()
    return path.parent.name if path.name == "config.json" else path.name


def trace_scenario(model_path: str, *, train: str, gen: str, nodes: int, bucket_bytes: int) -> Scenario:
    """Of a published model: the trainer's layouts by its family's table, the engine's as SGLang lays it out."""
    model, dtype = read_model(model_path)

    def traced(tp: int, dtype: str) -> Sequence[WeightLayout]:
        from megarl.rollout.trace import trace_layouts  # after the sizes are found good: it takes seconds

        return trace_layouts(model_path, tp=tp, dtype=dtype)

    return make_scenario(
        model_name(model_path),
        model,
        dtype,
        train=train,
        gen=gen,
        nodes=nodes,
        bucket_bytes=bucket_bytes,
        engine=traced,
    )


def explain_scenarios(
    scenario: Scenario, names: Sequence[str]
) -> tuple[dict[str, Explanation], dict[str, ConfigError]]:
    """By strategy in the order of `names`: what it costs, or why it cannot serve these sizes."""
    explained: dict[str, Explanation] = {}
    refused: dict[str, ConfigError] = {}
    for name in names:
        try:
            known = list(explained.values())
            explained[name] = explain_cheapest(scenario, known) if name == "auto" else explain(name, scenario)
        except ConfigError as error:
            refused[name] = error
    return explained, refused


def make_scenario(
    name: str,
    model: DenseModel,
    dtype: str,
    *,
    train: str,
    gen: str,
    nodes: int,
    bucket_bytes: int,
    engine: Engine,
) -> Scenario:
    """Both sides' layouts.

    Args:
        name: of the model, in reports.
        train: as `pp=1,tp=4,dp=2`.
        gen: as `pp=1,tp=2`.

    Raises:
        ConfigError: sizes that the model does not divide by.
    """
    grid = RankGrid(**parse_sizes("--train", train, ("pp", "tp", "cp", "dp")))
    to = parse_sizes("--gen", gen, ("pp", "tp"))
    _require_served(model, grid, to)
    stages = [split_stages(layout, to["pp"]) for layout in engine(to["tp"], dtype)]
    return Scenario(
        model=name,
        grid=grid,
        gen_pp=to["pp"],
        gen_tp=to["tp"],
        sources=tuple(trainer_layouts(model, grid, dtype)),
        engine=tuple(tuple(of_rank[stage] for of_rank in stages) for stage in range(to["pp"])),
        topology=even_nodes(grid.size, nodes),
        bucket_bytes=bucket_bytes,
    )


def _require_served(model: DenseModel, grid: RankGrid, gen: Mapping[str, int]) -> None:
    """Sizes by which every tensor divides; a vocabulary is padded instead."""
    layers = model.num_layers
    _require("--train pp", grid.pp, lambda pp: _rest("layers", layers, pp))
    _require("--gen pp", gen["pp"], lambda pp: _rest("layers", layers, pp))
    _require("--train tp", grid.tp, lambda tp: _indivisible(model, tp, replicate=False))
    _require("--gen tp", gen["tp"], lambda tp: _indivisible(model, tp, replicate=True))
    if gen["pp"] * gen["tp"] > grid.size:
        raise ConfigError(
            f"--gen: an engine takes pp {gen['pp']} * tp {gen['tp']} = {gen['pp'] * gen['tp']} ranks, "
            f"--train has {grid.size}"
        )


def _require(option: str, size: int, problem: Callable[[int], str | None]) -> None:
    why = problem(size)
    if why is not None:
        possible = sorted(
            (n for n in range(1, MAX_GENERATION_TP + 1) if problem(n) is None), key=lambda n: abs(n - size)
        )
        nearest = " and ".join(map(str, sorted(possible[:2])))
        raise ConfigError(f"{option}={size}: {why}; the nearest that can be served: {nearest}")


def _indivisible(model: DenseModel, tp: int, *, replicate: bool) -> str | None:
    """Which tensor `tp` ranks cannot share, and why."""
    kv = model.num_kv_heads
    if replicate and kv < tp and tp % kv == 0:
        kv = tp  # SGLang gives several ranks the same head
    return (
        _rest("model.layers.0.self_attn.q_proj.weight has query heads", model.num_heads, tp)
        or _rest("model.layers.0.self_attn.k_proj.weight has key-value heads", kv, tp)
        or _rest("model.layers.0.mlp.gate_proj.weight has rows", model.ffn_hidden_size, tp)
    )


def _rest(what: str, total: int, size: int) -> str | None:
    return f"{what} that do not divide, {total} % {size} = {total % size}" if total % size else None
