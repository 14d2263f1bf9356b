"""`megarl reshard explain`: its numbers, and the messages for impossible sizes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from benchmarks.reshard.synthetic import engine_layouts
from megarl.cli.main import main
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.model_files.block_fp8 import is_quantized, scale_shape
from megarl.reshard.analysis import forecast
from megarl.reshard.analysis.nccl_progress import Stall
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.quantized_layout import quantize_layout
from megarl.rollout.sglang.weight_layout import offline_trace
from tests.megatron.families.outside import MISTRAL_PATH
from tests.model_files.quantized import QUANTIZATION
from tests.rollout.remote import fork_traces

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1536,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

BY_PLANS = ("peak_extra_bytes", "messages", "collectives")
TIMES = ("plan_seconds_cold", "plan_seconds_cached")


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def untraced(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the engine's layout without SGLang, which takes seconds to import."""

    def layouts(path: str, *, tp: int, ep: int, device: str, dtype: str) -> list[WeightLayout]:
        assert (ep, device) == (1, "cuda")
        return engine_layouts(load_architecture_and_dtype(path)[0], tp, dtype)

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)


def explain(model: str, *args: str) -> int:
    return main(["reshard", "explain", "--model", model, *args])


@pytest.mark.usefixtures("untraced")
def test_json_of_every_strategy(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--train", "tp=4,dp=2", "--gen", "tp=2", "--nodes", "2", "--bucket-mb", "0.1", "--json") == 0
    rows = {row["strategy"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == ["ds_chat", "hybridflow_v", "gather_hf", "micro_dp", "exact", "auto"]
    expected = {"ds_chat": 0.875, "hybridflow_v": 0.75, "gather_hf": 0.75, "micro_dp": 0.25, "exact": 0.25}
    for name, fraction in expected.items():  # off by the norms, which every tensor-parallel rank holds
        assert rows[name]["fraction_in_max"] == pytest.approx(fraction, abs=2e-3)
        assert (rows[name]["world"], rows[name]["train"], rows[name]["gen"]) == (8, "1-4-2", "1-2")
        assert rows[name]["model"] == "tiny"
    assert rows["auto"] == rows["micro_dp"] | {"strategy": "auto"}
    assert rows["micro_dp"]["bytes_cross_node"] == 0
    assert rows["ds_chat"]["bytes_into_node_max"] * 2 == rows["ds_chat"]["bytes_cross_node"]
    assert rows["ds_chat"]["peak_extra_bytes"] > rows["ds_chat"]["model_bytes"] > rows["exact"]["peak_extra_bytes"]
    assert {row["nccl_progress"] for row in rows.values()} == {True}


def test_fp8_engines_are_sent_half_the_bytes(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def layouts(path: str, *, tp: int, ep: int, device: str, dtype: str) -> list[WeightLayout]:
        config = json.loads((Path(path) / "config.json").read_text())
        dense = engine_layouts(load_architecture_and_dtype(path)[0], tp, dtype)
        return [quantize_layout(each, {n for n in each.tensors if is_quantized(n, config)}) for each in dense]

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)
    sizes = []
    for stated in (None, QUANTIZATION, QUANTIZATION | {"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}):
        (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": stated}))
        assert explain(model, "--train", "tp=2", "--gen", "tp=1", "--strategy", "exact", "--json") == 0
        sizes.append(json.loads(capsys.readouterr().out)["model_bytes"])
    tensors = load_architecture_and_dtype(model)[0].tensors("bfloat16")
    names = [name for name in tensors if is_quantized(name, {"quantization_config": QUANTIZATION})]
    assert len(names) == 7 * CONFIG["num_hidden_layers"]
    scales = sum(prod(scale_shape(tensors[name].shape)) for name in names)
    assert sizes[0] - sizes[1] == sum(prod(tensors[name].shape) for name in names) - 4 * scales
    down = tensors["model.layers.0.mlp.down_proj.weight"].shape
    assert sizes[2] - sizes[1] == prod(down) - 4 * prod(scale_shape(down))


@pytest.mark.usefixtures("untraced")
def test_a_plan_that_stalls_is_shown(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stalls = [Stall(rank, 0, "hop 0 of round 7", (rank + 4,)) for rank in (0, 1)]
    monkeypatch.setattr(forecast, "find_stalls", lambda _: stalls)
    assert explain(model, "--train", "tp=4,dp=2", "--gen", "tp=2", "--strategy", "exact", "gather_hf") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("exact ", "gather_hf "))}
    assert "stalls" in rows["exact"]
    assert "ok" in rows["gather_hf"]
    assert "exact: the sync would hang over NCCL: rank 0 waits in hop 0 of round 7 for rank 4 (and 1 more)" in out


@pytest.mark.usefixtures("untraced")
def test_table_and_unsupported_strategies(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--train", "tp=2,dp=2", "--gen", "tp=4", "--bucket-mb", "1") == 0
    out, err = capsys.readouterr()
    assert "tiny, 1.4 MB, 4 ranks, 1-2-2 -> 1-4" in out
    assert "auto: exact" in out
    assert "micro_dp left out: micro_dp needs the training sizes to be multiples" in err
    assert "tp 2 % 4 = 2" in err


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("train", "gen", "message"),
    [
        ("tp=4,dp=x", "tp=2", "--train needs pp=N,vpp=N,tp=N,cp=N,dp=N,ep=N,etp=N, got 'tp=4,dp=x' at 'dp=x'"),
        ("tp=4,tp=2", "tp=2", "got 'tp=4,tp=2' at 'tp=2'"),
        ("tp=4", "dp=2", "--gen needs pp=N,tp=N,ep=N, got 'dp=2'"),
        ("tp=0", "tp=2", "--train needs sizes of at least 1, got tp=0"),
        ("pp=3", "tp=1", "--train pp=3: layers that do not divide, 4 % 3 = 1; the nearest that can be served: 2 and 4"),
        ("tp=3", "tp=1", "k_proj.weight has key-value heads that do not divide, 4 % 3 = 1; the nearest"),
        ("tp=4,dp=2", "tp=5", "q_proj.weight has query heads that do not divide, 12 % 5 = 2; the nearest"),
        ("pp=3", "tp=1", "; --first-stage-layers and --last-stage-layers give those two a number of their own"),
        ("pp=2,vpp=4", "tp=1", "--train pp=2: vpp needs to divide the layers of every stage, got 2 % 4 = 2 on stage 0"),
        ("tp=2,ep=2", "tp=2", "--train tp=2,ep=2: etp 2 * ep 2 = 4 needs to divide the ranks of a pipeline stage"),
        ("tp=2,ep=2,etp=1", "tp=2", "--train ep=2: Qwen3ForCausalLM has no experts; it can only be 1"),
        ("tp=2", "tp=2,ep=2", "--gen ep=2: Qwen3ForCausalLM has no experts; it can only be 1"),
        ("tp=2", "tp=2,pp=2", "an engine takes pp 2 * tp 2 = 4 ranks, --train has 2"),
    ],
)
def test_impossible_sizes_are_rejected(
    model: str, train: str, gen: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(model, "--train", train, "--gen", gen) == 2
    assert message in capsys.readouterr().err


def test_layers_between_the_first_and_last_stage_need_to_divide(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--train", "pp=3", "--last-stage-layers", "1", "--gen", "tp=1") == 2
    expected = (
        "--train pp=3: pp needs to divide the layers, got (4 - 1) % 2 = 1; the nearest that can be served: 2 and 4"
    )
    assert expected in capsys.readouterr().err


def test_feed_forward_rows_need_to_divide(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 100}))
    assert explain(model, "--train", "tp=4,dp=3", "--gen", "tp=12") == 2
    expected = "--gen tp=12: model.layers.0.mlp.gate_proj.weight has rows that do not divide, 100 % 12 = 4; the nearest"
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("untraced")
def test_values_that_need_all_plans_are_left_out_for_many_ranks(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--train", "tp=4,dp=2", "--gen", "tp=2", "--nodes", "2", "--strategy", "exact", "gather_hf")
    assert explain(model, *sizes, "--json") == 0
    planned = {row["strategy"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    monkeypatch.setattr(forecast, "MAX_PLANNED_PIECES", 100)
    assert explain(model, *sizes, "--json") == 0
    out, err = capsys.readouterr()
    summed = {row["strategy"]: row for row in map(json.loads, out.splitlines())}
    assert {name for name, value in summed["exact"].items() if value is None} == set(BY_PLANS)
    for name, row in planned.items():
        differs = {*TIMES, *(BY_PLANS if name == "exact" else ())}
        assert {k: v for k, v in summed[name].items() if k not in differs} == {
            k: v for k, v in row.items() if k not in differs
        }
    assert err.splitlines()[:3] == [
        "computing the layouts of trainer and engines",
        "exact: placing engine ranks",
        "exact: adding up 8 ranks",
    ]
    assert explain(model, *sizes) == 0
    out = capsys.readouterr().out
    expected = "exact: values shown as - need the plans of all 8 ranks; rank 0, which receives the most bytes, has"
    assert expected in out
    assert " - " in next(line for line in out.splitlines() if line.startswith("exact  "))


@pytest.mark.usefixtures("untraced")
def test_an_engine_on_several_nodes_is_reported(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--train", "tp=2,dp=2", "--gen", "tp=4", "--nodes", "2", "--strategy", "exact") == 0
    assert (
        "exact: tensor-parallel ranks of an engine are on 2 nodes; only engines with a pool" in capsys.readouterr().out
    )


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("train", "gen", "message"),
    [
        (
            "dp=3,ep=3",
            "tp=1",
            "--train ep=3: model.layers.0.mlp has experts that do not divide, 8 % 3 = 2; the nearest",
        ),
        ("tp=4", "tp=4,ep=3", "--gen ep=3: model.layers.0.mlp has experts that do not divide"),
        ("tp=4", "tp=4,ep=8", "--gen ep=8: tp ranks that do not divide, 4 % 8 = 4; the nearest"),
        ("dp=5,etp=5", "tp=1", "--train etp=5: model.layers.0.mlp.experts.0.gate_proj.weight has rows that do not div"),
    ],
)
def test_expert_sizes_that_do_not_divide_are_rejected(
    model: str, train: str, gen: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    assert explain(model, "--train", train, "--gen", gen) == 2
    assert message in capsys.readouterr().err


def test_experts_of_a_traced_engine(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    sizes = ("--train", "pp=2,tp=2,dp=2,ep=2,etp=1", "--first-stage-layers", "3", "--gen", "tp=2,ep=2")
    assert explain(model, *sizes, "--strategy", "exact", "--json") == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["world"] == 8
    assert 0 < row["bytes_in_bound_max"] <= row["bytes_in_max"] < row["model_bytes"]


@pytest.mark.usefixtures("untraced")
def test_a_requested_strategy_that_does_not_support_the_sizes_is_an_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(model, "--train", "tp=2,dp=2", "--gen", "tp=4", "--strategy", "micro_dp") == 2
    assert "strategy exact serves any sizes" in capsys.readouterr().err


def test_unsupported_architectures_and_missing_files(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))
    assert explain(model, "--train", "tp=1", "--gen", "tp=1") == 2
    assert "architecture GPT2LMHeadModel is not supported; supported are Qwen2" in capsys.readouterr().err
    assert explain(f"{model}/none", "--train", "tp=1", "--gen", "tp=1") == 2
    assert "cannot be read: " in capsys.readouterr().err


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("moe_layer_freq", "moe_layer_freq is missing; SGLang needs 1"),
        (
            "rope_scaling",
            "rope_scaling is missing; without a GPU, SGLang needs rope type yarn for latent attention",
        ),
    ],
)
def test_a_missing_key_is_reported_before_sglang_starts(
    key: str, problem: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline_trace.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(offline_trace, "_run_child", None)
    file = Path(model) / "config.json"
    file.write_text(json.dumps({k: v for k, v in (CONFIG | LATENT).items() if k != key}))
    assert explain(model, "--train", "tp=2", "--gen", "tp=2") == 2
    assert f"error: {file}: {problem}" in capsys.readouterr().err


def test_first_layers_are_dense_in_trainer_and_engine_if_config_json_does_not_say(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout of the engine is traced from SGLang, and planning fails if it has other tensors than the trainer."""
    config = CONFIG | LATENT | {"q_lora_rank": 32, "n_shared_experts": 1, "num_hidden_layers": 4}
    file, found = Path(model) / "config.json", []
    for dense in ({"first_k_dense_replace": 3}, {}):  # transformers' default
        file.write_text(json.dumps(config | dense))
        found.append(load_architecture_and_dtype(model))
    assert found[0] == found[1]
    fork_traces(monkeypatch)
    assert explain(model, "--train", "tp=2", "--gen", "tp=2", "--strategy", "exact", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model_bytes"] > 0


def test_a_family_outside_the_package(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def layouts(path: str, *, tp: int, ep: int, device: str, dtype: str) -> list[WeightLayout]:
        return engine_layouts(load_architecture_and_dtype(path, family=MISTRAL_PATH)[0], tp, dtype)

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)
    file = Path(model) / "config.json"
    file.write_text(json.dumps(CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}))
    sizes = ("--train", "tp=2", "--gen", "tp=2")
    assert explain(model, *sizes) == 2
    assert "model.family names a family outside the package" in capsys.readouterr().err
    assert explain(model, *sizes, "--family", "no_such_module:FAMILY") == 2
    assert "--family: cannot import no_such_module" in capsys.readouterr().err
    assert explain(model, *sizes, "--family", MISTRAL_PATH, "--strategy", "exact", "--json") == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "exact"


def test_the_traced_layout_gives_the_same_numbers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)
    args = ("--train", "pp=2,tp=4", "--gen", "pp=2,tp=2", "--strategy", "exact", "--json")
    assert explain(model, *args) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["bytes_in_max"] == row["bytes_in_bound_max"]
    assert row["fraction_in_max"] == pytest.approx(0.125, abs=2e-3)
