"""Manifest metadata and model identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import CheckpointMetadata, ModelIdentity, require_same_model
from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.errors import DataError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 10000.0},
    "dtype": "float32",
    "transformers_version": "5.0",
    "_name_or_path": "somewhere",
}


def test_dtype_path_and_version_do_not_change_the_identity() -> None:
    others = {"dtype": "bfloat16", "transformers_version": "4.0", "_name_or_path": "moved"}
    same = ModelIdentity.from_config(CONFIG | others)
    assert same == ModelIdentity.from_config(CONFIG)
    assert same.config_sha256 == ModelIdentity.from_config(dict(reversed(CONFIG.items()))).config_sha256
    require_same_model(same, ModelIdentity.from_config(CONFIG), "step-000020")


def test_another_model_is_refused_with_every_differing_key() -> None:
    other = {**CONFIG, "hidden_size": 256, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert ModelIdentity.from_config(other).config_sha256 != ModelIdentity.from_config(CONFIG).config_sha256
    with pytest.raises(DataError) as error:
        require_same_model(ModelIdentity.from_config(CONFIG), ModelIdentity.from_config(other), "step-000020")
    assert str(error.value) == (
        "checkpoint step-000020 belongs to another model: needs architecture Qwen3ForCausalLM, got Qwen2ForCausalLM; "
        "hidden_size 128, got 256; sliding_window None, got 8"
    )


def test_metadata_lists_the_trained_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tree = {"run_dir": "runs/a", "model": {"path": str(tmp_path)}, "data": {"path": "d.jsonl"}}
    overrides = ["algorithm.type=ppo", "placement.slots_per_node=4", "trainer.parallel.tp=2"]
    overrides += ["placement.pools={c: {slots_per_node: 2}}", "placement.critic.pool=c", "algorithm.critic.parallel={}"]
    metadata = CheckpointMetadata.from_config(make_config(RunConfig, tree, overrides))
    assert metadata.model == ModelIdentity.from_config(CONFIG)
    keys = ("tp", "pp", "cp", "ep", "world")
    sizes = {name: tuple(layout[key] for key in keys) for name, layout in metadata.layout.items()}
    assert sizes == {"policy": (2, 1, 1, 1, 4), "critic": (1, 1, 1, 1, 2)}
