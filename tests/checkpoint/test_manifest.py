from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import Contents, ModelIdentity, require_same_model
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


def test_where_and_how_a_model_was_written_does_not_matter() -> None:
    same = ModelIdentity.of(CONFIG | {"dtype": "bfloat16", "transformers_version": "4.0", "_name_or_path": "moved"})
    assert same == ModelIdentity.of(CONFIG)
    assert same.config_sha256 == ModelIdentity.of(dict(reversed(CONFIG.items()))).config_sha256
    require_same_model(same, ModelIdentity.of(CONFIG), "step-000020")


def test_another_model_is_refused_with_every_key() -> None:
    other = {**CONFIG, "hidden_size": 256, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert ModelIdentity.of(other).config_sha256 != ModelIdentity.of(CONFIG).config_sha256
    with pytest.raises(DataError) as error:
        require_same_model(ModelIdentity.of(CONFIG), ModelIdentity.of(other), "step-000020")
    assert str(error.value) == (
        "checkpoint step-000020 is of another model: needs architecture Qwen3ForCausalLM, got Qwen2ForCausalLM; "
        "hidden_size 128, got 256; sliding_window None, got 8"
    )


def test_contents_name_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tree = {"run_dir": "runs/a", "model": {"path": str(tmp_path)}, "data": {"path": "d.jsonl"}}
    overrides = ["algorithm.type=ppo", "placement.slots_per_node=4", "trainer.parallel.tp=2"]
    overrides += ["placement.pools={c: {slots_per_node: 2}}", "placement.critic.pool=c", "algorithm.critic.parallel={}"]
    contents = Contents.of(make_config(RunConfig, tree, overrides))
    assert contents.model == ModelIdentity.of(CONFIG)
    sizes = {
        name: {key: layout[key] for key in ("tp", "pp", "cp", "ep", "world")}
        for name, layout in contents.layout.items()
    }
    assert sizes == {
        "policy": {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "world": 4},
        "critic": {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "world": 2},
    }
