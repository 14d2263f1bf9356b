"""Keys that recipes, scripts and documentation rely on, and every recipe in yaml/."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megarl.cli.check import STAGES
from megarl.config import RunConfig, dump_config, load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "yaml").glob("**/*.yaml"))

KEYS = (
    "model.path", "data.path", "algorithm.type", "algorithm.group_size", "trainer.parallel.tp", "trainer.parallel.pp",
    "trainer.parallel.cp", "trainer.parallel.ep", "trainer.parallel.vpp", "trainer.optimizer.lr", "rollout.tp",
    "rollout.replicas", "rollout.max_new_tokens", "weight_sync.strategy", "placement", "seed",
)  # fmt: skip


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


@pytest.mark.parametrize("key", KEYS)
def test_key_exists(key: str) -> None:
    kinds: list[type[BaseModel]] = [RunConfig]
    for name in key.split("."):
        fields = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
        assert fields, f"{key}: no {name}"
        kinds = [section for field in fields for section in sections(field.annotation)]


def test_every_recipe_loads_and_round_trips(tmp_path: Path) -> None:
    for recipe in RECIPES:
        kind = next((kind for stage, kind in STAGES.items() if stage in recipe.stem.split("-")), RunConfig)
        config = load_config(kind, recipe)
        copy = tmp_path / recipe.name
        copy.write_text(dump_config(config))
        assert load_config(kind, copy) == config
