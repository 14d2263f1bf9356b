import json
import os
import sys

import pytest

from megarl.config import RunConfig
from megarl.errors import ConfigError, DataError
from megarl.rollout.engine_spec import EngineSpec, make_engine_spec, read_stop_token_ids
from megarl.rollout.sglang.engine_environment import STUBS_FOLDER, make_engine_environment
from megarl.rollout.sglang.server_args import make_engine_arguments


def folder(tmp_path, **files):
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return str(tmp_path)


EVERYWHERE = {
    "config": {"eos_token_id": 3},
    "generation_config": {"eos_token_id": [3, 9]},
    "tokenizer_config": {"eos_token": {"content": "<end>"}},
    "tokenizer": {"added_tokens": [{"id": 12, "content": "<end>"}], "model": {"vocab": {"a": 0}}},
}
IN_THE_VOCABULARY = {
    "config": {"eos_token_id": None},
    "tokenizer_config": {"eos_token": "</s>"},
    "tokenizer": {"added_tokens": [], "model": {"vocab": {"</s>": 2}}},
}


@pytest.mark.parametrize(("files", "ids"), [(EVERYWHERE, (3, 9, 12)), (IN_THE_VOCABULARY, (2,))])
def test_stop_tokens_are_read_from_every_file(tmp_path, files, ids):
    assert read_stop_token_ids(folder(tmp_path, **files)) == ids


def test_folder_without_a_stop_token_is_rejected(tmp_path):
    with pytest.raises(DataError, match="needs an end-of-sequence token"):
        read_stop_token_ids(folder(tmp_path, config={}))


def run_config(path, **rollout):
    return RunConfig.model_validate(
        {
            "run_dir": "runs/1",
            "seed": 7,
            "model": {"path": path},
            "data": {"path": "x.jsonl"},
            "placement": {"slots_per_node": 4},
            "rollout": rollout,
        }
    )


def test_defaults_depend_on_the_device(tmp_path):
    config = run_config(folder(tmp_path, config={"eos_token_id": 1}), tp=2, replicas=2)
    cpu, cuda = make_engine_spec(config, 1, "cpu"), make_engine_spec(config, 1, "cuda")
    assert (cpu.dtype, cpu.max_total_tokens, cpu.max_running_requests) == ("float32", 65_536, 128)
    assert (cuda.dtype, cuda.max_total_tokens, cuda.max_running_requests) == ("bfloat16", None, None)
    assert cpu.tp == 2
    assert cpu.seed == 8
    assert cpu.port is None
    assert cpu.log_dir == "runs/1/logs/engine-1"
    assert cpu.stop_token_ids == (1,)


def test_configured_values_override_defaults(tmp_path):
    config = run_config(
        folder(tmp_path, config={"eos_token_id": 1}),
        engine={
            "base_port": 20_000,
            "max_total_tokens": 100,
            "max_running_requests": 3,
            "extra_args": {"page_size": 1},
        },
    )
    spec = make_engine_spec(config, 2, "cpu")
    assert (spec.port, spec.max_total_tokens, spec.max_running_requests) == (20_200, 100, 3)
    assert spec.extra_args == {"page_size": 1}


def test_engines_compute_logits_in_float32_if_the_trainer_does(tmp_path):
    config = run_config(folder(tmp_path, config={"eos_token_id": 1}))
    config = config.model_copy(update={"model": config.model.model_copy(update={"fp32_lm_head": True})})
    assert make_engine_spec(config, 0, "cpu").fp32_lm_head
    assert make_engine_arguments(EngineSpec(model_path="m", fp32_lm_head=True))["enable_fp32_lm_head"] is True


def test_extra_arguments_reach_the_engine():
    arguments = make_engine_arguments(EngineSpec(model_path="m", extra_args={"chunked_prefill_size": 64}))
    assert arguments["chunked_prefill_size"] == 64
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["enable_fp32_lm_head"] is False
    assert "nccl_port" not in arguments


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model_path", "rollout.engine.extra_args: model_path: megarl sets this argument itself, from model.path"),
        ("chunked_prefil_size", "no such argument; did you mean chunked_prefill_size"),
        ("pp_size", "pp_size: a weight sync reaches the tensor-parallel ranks of one pipeline stage only"),
    ],
)
def test_invalid_extra_argument_is_rejected(name, message):
    with pytest.raises(ConfigError, match=message):
        make_engine_arguments(EngineSpec(model_path="m", extra_args={name: 1}))


def test_environment_that_reorders_weights_is_rejected(monkeypatch):
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "false")
    make_engine_arguments(EngineSpec(model_path="m"))
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "1")
    with pytest.raises(ConfigError, match="SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED must not be set for engines"):
        make_engine_arguments(EngineSpec(model_path="m"))


def test_stub_folder_comes_first_and_once(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}{STUBS_FOLDER}{os.pathsep}/b")
    variables = make_engine_environment("cpu", 1)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(STUBS_FOLDER), "/a", "/b"]
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in variables


def test_every_rank_is_bound_to_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    assert make_engine_environment("cpu", 3)["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5|4"
    assert make_engine_environment("cuda", 8) == {}


def test_stubs_are_not_on_the_path_of_this_process():
    assert str(STUBS_FOLDER) not in sys.path
