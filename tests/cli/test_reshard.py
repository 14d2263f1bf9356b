"""`megarl reshard explain`: its numbers, and the messages for impossible sizes."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reshard.synthetic import engine_layouts
from megarl.engines.sglang.weight_layout import offline_trace
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.model_files.quantization import is_quantized, scale_shape
from megarl.reshard.analysis import forecast, sync_report
from megarl.reshard.analysis.nccl_progress import Stall
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.quantized_layout import quantize_layout
from tests.engines.remote import fork_traces
from tests.megatron.families.outside import MISTRAL_PATH
from tests.megatron.fidelity.models import CONFIGS
from tests.model_files.quantized import QUANTIZATION

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

TIMING = ("seconds_planned", "busiest_nic_bytes", "nic_share", "groups", "p2p_calls")
BY_PLANS = ("peak_extra_bytes", "messages", "collectives", *TIMING)
TIMES = ("plan_seconds_cold", "plan_seconds_cached")


@pytest.fixture
def model(tmp_path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    return write_config(folder)


def write_config(folder: Path | str, changes: dict[str, Any] | None = None) -> str:
    """Write `CONFIG` with changes; return the folder."""
    (Path(folder) / "config.json").write_text(json.dumps(CONFIG | (changes or {})))
    return str(folder)


@pytest.fixture
def untraced(model: str, monkeypatch) -> None:
    """Compute the engine's layout without SGLang, which takes seconds to import."""

    def layouts(path: str, *, tp: int, ep: int, options: Any, device: str, dtype: str) -> list[WeightLayout]:
        assert (ep, options, device) == (1, {"attn_dp_size": 1}, "cuda")
        return engine_layouts(load_architecture_and_dtype(path)[0], tp, dtype)

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)


@pytest.fixture
def command(model: str) -> Callable[..., list[str]]:
    """Function from training and generation sizes and other words to a command."""
    return lambda train, gen, *words: ["reshard", "explain", "--model", model, "--train", train, "--gen", gen, *words]


@pytest.fixture
def rows(output, command) -> Callable[..., dict[str, dict[str, Any]]]:
    """Function that runs a command with --json; returns strategy -> what it prints."""

    def explain(*words: str) -> dict[str, dict[str, Any]]:
        found = map(json.loads, output(*command(*words, "--json")).splitlines())
        return {row["strategy"]: row for row in found}

    return explain


@pytest.mark.usefixtures("untraced")
def test_json_of_every_strategy(rows):
    found = rows("tp=4,dp=2", "tp=2", "--nodes", "2", "--bucket-mb", "0.1")
    assert list(found) == ["gather_hf", "micro_dp", "exact", "auto"]
    expected = {"gather_hf": 0.75, "micro_dp": 0.25, "exact": 0.25}
    for name, fraction in expected.items():  # off by the norms, which every tensor-parallel rank holds
        assert found[name]["fraction_in_max"] == pytest.approx(fraction, abs=2e-3)
        assert [found[name][key] for key in ("world", "train", "gen", "model")] == [8, "1-4-2", "1-2", "tiny"]
    assert found["auto"] == found["micro_dp"] | {"strategy": "auto"}
    assert found["micro_dp"]["bytes_cross_node"] == 0
    assert found["gather_hf"]["model_bytes"] > found["exact"]["peak_extra_bytes"] > 0
    assert {row["nccl_progress"] for row in found.values()} == {True}


@pytest.mark.usefixtures("untraced")
def test_times_scale_with_the_rates_of_links(rows, output, command):
    """pp=2 on two nodes: half of the model leaves each, with exact once, with micro_dp once for each engine."""
    sizes = ("pp=2,tp=4,dp=2", "tp=2", "--nodes", "2", "--bucket-mb", "0.05")
    options = ("--nics-per-machine", "{}", "--network-gb-per-second", "{}", "--nvlink-gb-per-second", "1e9")
    found = {}
    for nics, rate in ((8, "0.001"), (4, "0.001"), (8, "0.002")):
        words = [word.format(value) for word, value in zip(options, ("", nics, "", rate, "", ""), strict=True)]
        found[nics, rate] = rows(*sizes, *words, "--strategy", "gather_hf", "micro_dp", "exact")
    full, half, fast = found.values()
    for name, row in full.items():
        assert row["seconds_bound"] == pytest.approx(half[name]["seconds_bound"] / 2)
        assert row["seconds_bound"] == pytest.approx(fast[name]["seconds_bound"] * 2)
        assert row["seconds_bound"] <= row["seconds_planned"] < half[name]["seconds_planned"]
        assert fast[name]["seconds_planned"] < row["seconds_planned"]
        assert 0 < row["nic_share"] <= 1
        assert row["busiest_nic_bytes"] >= row["seconds_bound"] * 1e6
    exact, micro = full["exact"], full["micro_dp"]
    assert exact["seconds_bound"] == exact["bytes_into_node_bound_max"] / 8e6
    assert exact["seconds_planned"] < micro["seconds_planned"]
    assert exact["p2p_calls"] > exact["groups"] > 0
    assert full["gather_hf"]["p2p_calls"] == 0
    text = output(*command(*sizes, "--strategy", "exact"))
    row = [line.split() for line in text.splitlines() if line.startswith("exact ")][1]
    assert row[1] == f"{exact['seconds_bound'] * 1e3 / 50e3:,.1f}"
    assert row[-2:] == [str(exact["groups"]), str(exact["p2p_calls"])]


def test_fp8_engines_are_sent_half_the_bytes(rows, model, monkeypatch):
    def layouts(path, *, tp, ep, options, device, dtype):
        config = json.loads((Path(path) / "config.json").read_text())
        dense = engine_layouts(load_architecture_and_dtype(path)[0], tp, dtype)
        return [quantize_layout(each, {n for n in each.tensors if is_quantized(n, config)}) for each in dense]

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)
    sizes = []
    for stated in (None, QUANTIZATION, QUANTIZATION | {"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}):
        write_config(model, {"quantization_config": stated})
        sizes.append(rows("tp=2", "tp=1", "--strategy", "exact")["exact"]["model_bytes"])
    tensors = load_architecture_and_dtype(model)[0].tensors("bfloat16")
    names = [name for name in tensors if is_quantized(name, {"quantization_config": QUANTIZATION})]
    assert len(names) == 7 * CONFIG["num_hidden_layers"]
    scales = sum(prod(scale_shape(tensors[name].shape)) for name in names)
    assert sizes[0] - sizes[1] == sum(prod(tensors[name].shape) for name in names) - 4 * scales
    down = tensors["model.layers.0.mlp.down_proj.weight"].shape
    assert sizes[2] - sizes[1] == prod(down) - 4 * prod(scale_shape(down))


@pytest.mark.usefixtures("untraced")
def test_a_plan_that_stalls_is_shown(output, command, monkeypatch):
    stalls = [Stall(rank, 0, "hop 0 of round 7", (rank + 4,)) for rank in (0, 1)]
    monkeypatch.setattr(forecast, "find_stalls", lambda _: stalls)
    out = output(*command("tp=4,dp=2", "tp=2", "--strategy", "exact", "gather_hf"))
    lines = [line for line in out.splitlines() if line.startswith(("exact ", "gather_hf "))]
    rows = {line.split()[0]: line.split() for line in lines[:2]}
    assert lines[2].split()[2:] == ["-"] * 6  # has no time
    assert "stalls" in rows["exact"]
    assert "ok" in rows["gather_hf"]
    assert "exact: the sync would hang over NCCL: rank 0 waits in hop 0 of round 7 for rank 4 (and 1 more)" in out


@pytest.mark.usefixtures("untraced")
def test_table_and_unsupported_strategies(run, refusal, command, model):
    code, out, err = run(*command("tp=2,dp=2", "tp=4", "--bucket-mb", "1"))
    assert code == 0
    assert "tiny, 1.4 MB, 4 ranks, 1-2-2 -> 1-4" in out
    assert "auto: exact" in out
    assert "micro_dp left out: micro_dp needs the training tp to be a multiple" in err
    assert "tp 2 % 4 = 2" in err
    requested = refusal(*command("tp=2,dp=2", "tp=4", "--strategy", "micro_dp"))
    assert "strategy exact serves any sizes" in requested
    _, out, _ = run(*command("tp=2,dp=2", "tp=4", "--nodes", "2", "--strategy", "exact"))
    assert "exact: tensor-parallel ranks of an engine are on 2 nodes; only engines with a pool" in out
    (Path(model) / "config.json").unlink()
    assert "cannot be read: " in refusal(*command("tp=1", "tp=1"))


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
NARROW = {"intermediate_size": 100}
LAST = ["--last-stage-layers", "1"]
REJECTED = [
    ({}, "tp=4,dp=x", "tp=2", [], "--train needs pp=N,vpp=N,tp=N,cp=N,dp=N,ep=N,etp=N, got 'tp=4,dp=x' at 'dp=x'"),
    ({}, "tp=4,tp=2", "tp=2", [], "got 'tp=4,tp=2' at 'tp=2'"),
    ({}, "tp=4", "cp=2", [], "--gen needs pp=N,tp=N,ep=N,dp=N, got 'cp=2'"),
    ({}, "tp=4", "tp=4,dp=3", [], "--gen dp=3: tp ranks that do not divide, 4 % 3 = 1"),
    ({}, "tp=0", "tp=2", [], "--train needs sizes of at least 1, got tp=0"),
    ({}, "pp=3", "tp=1", [], "pp=3: layers that do not divide, 4 % 3 = 1; the nearest that can be served: 2 and 4"),
    ({}, "tp=3", "tp=1", [], "k_proj.weight has key-value heads that do not divide, 4 % 3 = 1; the nearest"),
    ({}, "tp=4,dp=2", "tp=5", [], "q_proj.weight has query heads that do not divide, 12 % 5 = 2; the nearest"),
    ({}, "pp=3", "tp=1", [], "; --first-stage-layers and --last-stage-layers give those two a number of their own"),
    ({}, "pp=3", "tp=1", LAST, "the layers, got (4 - 1) % 2 = 1; the nearest that can be served: 2 and 4"),
    ({}, "pp=2,vpp=4", "tp=1", [], "pp=2: vpp needs to divide the layers of every stage, got 2 % 4 = 2 on stage 0"),
    ({}, "tp=2,ep=2", "tp=2", [], "etp 2 * ep 2 = 4 needs to divide the ranks of a pipeline stage"),
    ({}, "tp=2,ep=2,etp=1", "tp=2", [], "--train ep=2: Qwen3ForCausalLM has no experts; it can only be 1"),
    ({}, "tp=2", "tp=2,ep=2", [], "--gen ep=2: Qwen3ForCausalLM has no experts; it can only be 1"),
    ({}, "tp=2", "tp=4", [], "an engine takes tp = 4 ranks, --train has 2"),
    ({}, "tp=4", "tp=2,pp=2", [], "--gen pp=2: a sync reaches one pipeline stage of an engine; it can only be 1"),
    (NARROW, "tp=4,dp=3", "tp=12", [], "mlp.gate_proj.weight has rows that do not divide, 100 % 12 = 4; the nearest"),
    (EXPERTS, "dp=3,ep=3", "tp=1", [], "--train ep=3: model.layers.0.mlp has experts that do not divide, 8 % 3 = 2; "),
    (EXPERTS, "tp=4", "tp=4,ep=3", [], "--gen ep=3: model.layers.0.mlp has experts that do not divide"),
    (EXPERTS, "tp=4", "tp=4,ep=8", [], "--gen ep=8: tp ranks that do not divide, 4 % 8 = 4; the nearest"),
    (EXPERTS, "dp=5,etp=5", "tp=1", [], "etp=5: model.layers.0.mlp.experts.0.gate_proj.weight has rows that do not d"),
    ({}, "tp=4", "tp=2", ["--nodes", "8"], "--nodes needs to divide the ranks, got 4 % 8 = 4"),
    ({}, "tp=4", "tp=2", ["--network-gb-per-second", "0"], "--network-gb-per-second needs a positive number, got 0"),
    ({}, "tp=4", "tp=2", ["--nvlink-gb-per-second", "-1"], "--nvlink-gb-per-second needs a positive number, got -1"),
    ({}, "tp=4", "tp=2", ["--nvlink-gb-per-second", "nan"], "--nvlink-gb-per-second needs a positive number, got nan"),
    ({}, "tp=4", "tp=2", ["--nics-per-machine", "0"], "--nics-per-machine needs to be at least 1, got 0"),
    ({}, "tp=4", "tp=2", ["--nics-per-machine", "3"], "be a multiple of them, got 3 NICs for 4 ranks"),
    ({"architectures": ["GPT2LMHeadModel"]}, "tp=1", "tp=1", [], "GPT2LMHeadModel is not supported, "),
]


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("config", "train", "gen", "words", "message"), REJECTED)
def test_impossible_sizes_are_rejected(config, train, gen, words, message, refusal, command, model):
    write_config(model, config)
    assert message in refusal(*command(train, gen, *words))


@pytest.mark.usefixtures("untraced")
def test_values_that_need_all_plans_are_left_out_for_many_ranks(run, rows, output, command, monkeypatch):
    sizes = ("tp=4,dp=2", "tp=2", "--nodes", "2", "--strategy", "exact", "gather_hf")
    planned = rows(*sizes)
    monkeypatch.setattr(sync_report, "MAX_PLANNED_PIECES", 100)
    summed = rows(*sizes)
    assert {name for name, value in summed["exact"].items() if value is None} == set(BY_PLANS)
    for name, row in planned.items():
        differs = {*TIMES, *(BY_PLANS if name == "exact" else ())}
        assert summed[name] | dict.fromkeys(differs) == row | dict.fromkeys(differs)
    code, out, err = run(*command(*sizes))
    assert code == 0
    assert err.splitlines()[:3] == [
        "computing the layouts of trainer and engines",
        "exact: placing engine ranks",
        "exact: adding up 8 ranks",
    ]
    assert "exact: values shown as - need the plans of all 8 ranks; rank 0, which receives the most bytes, has" in out
    assert " - " in next(line for line in out.splitlines() if line.startswith("exact  "))


LATENT = CONFIGS["deepseek_v3"] | {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 12}
LATENT |= {key: CONFIG[key] for key in ("num_attention_heads", "hidden_size")}


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("moe_layer_freq", "moe_layer_freq is missing; SGLang needs 1"),
        ("rope_parameters", "rope_scaling is missing; without a GPU, SGLang needs rope type yarn for latent attention"),
    ],
)
def test_a_missing_key_is_reported_before_sglang_starts(key, problem, refusal, command, model, monkeypatch):
    monkeypatch.setattr(offline_trace.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(offline_trace, "trace_in_child", None)
    file = Path(model) / "config.json"
    file.write_text(json.dumps({k: v for k, v in (CONFIG | LATENT).items() if k != key}))
    assert f"error: {file}: {problem}" in refusal(*command("tp=2", "tp=2"))


def test_a_family_outside_the_package(refusal, rows, command, model, monkeypatch):
    def layouts(path, *, tp, ep, options, device, dtype):
        return engine_layouts(load_architecture_and_dtype(path, family=MISTRAL_PATH)[0], tp, dtype)

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)
    write_config(model, {"architectures": ["MistralForCausalLM"], "model_type": "mistral"})
    sizes = ("tp=2", "tp=2")
    assert "model.family names a family outside the package" in refusal(*command(*sizes))
    unknown = refusal(*command(*sizes, "--family", "no_such_module:FAMILY"))
    assert "--family: cannot import no_such_module" in unknown
    assert list(rows(*sizes, "--family", MISTRAL_PATH, "--strategy", "exact")) == ["exact"]


@pytest.fixture
def traced(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)


@pytest.mark.usefixtures("traced")
def test_experts_of_a_traced_engine(rows, model):
    write_config(model, EXPERTS)
    sizes = ("pp=2,tp=2,dp=2,ep=2,etp=1", "tp=2,ep=2", "--first-stage-layers", "3")
    row = rows(*sizes, "--strategy", "exact")["exact"]
    assert row["world"] == 8
    assert 0 < row["bytes_in_bound_max"] <= row["bytes_in_max"] < row["model_bytes"]


@pytest.mark.usefixtures("traced")
def test_first_layers_are_dense_in_trainer_and_engine_if_config_json_does_not_say(rows, model):
    """The layout of the engine is traced from SGLang, and planning fails if it has other tensors than the trainer."""
    found = []
    for dense in ({"first_k_dense_replace": 3}, {}):  # transformers' default
        latent = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
        found.append(load_architecture_and_dtype(write_config(model, latent | dense)))
    assert found[0] == found[1]
    assert rows("tp=2", "tp=2", "--strategy", "exact")["exact"]["model_bytes"] > 0


@pytest.mark.usefixtures("traced")
def test_the_traced_layout_gives_the_same_numbers(rows):
    row = rows("pp=2,tp=4", "pp=1,tp=2", "--strategy", "exact")["exact"]
    assert row["bytes_in_max"] == row["bytes_in_bound_max"]
    assert row["fraction_in_max"] == pytest.approx(0.375, abs=2e-3)
