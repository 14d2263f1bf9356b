"""Code in model folders: no command runs it or asks whether to, unless the configuration trusts it."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

import megarl
from megarl.cli.main import SUMMARIES, main
from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.data.chat_template import ChatTemplateError, apply_chat_template
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.engine_spec import EngineSpec, make_engine_spec
from megarl.engines.sglang.server_args import make_engine_arguments
from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
from megarl.errors import ConfigError, DataError
from tests.cli.tiny_run import write_config, write_tiny_run
from tests.engines.engine_server import ForkedProcess
from tests.engines.remote import engine_variables, fork_traces, server_address
from tests.engines.sglang.weight_layout.test_offline_trace import LATENT
from tests.errors import expect_error
from tests.model_files.hostile_code import add_code, mark_of
from tests.rollout.environments.chat_templates import DAY
from tests.time_limits import HANG_SECONDS

ROOT = Path(megarl.__file__).parents[1]

WITHOUT_MODEL = {
    "attach": "follows a run that another command has checked",
    "replay": "repeats a run that another command has checked",
    "checkpoint": "reads run folders",
    "schema": "reads nothing",
    "import": "reads a script or a YAML file",
    "launch": "starts another command",
    "demo": "makes its model",
}
"""Commands that take no model -> what they do instead."""

REFUSED = "tokenizer_config.json: auto_map.AutoTokenizer names hostile.Tokenizer, code in the model folder"


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_config(folder / "run.json", write_tiny_run(folder))
    return folder


@pytest.fixture
def model(tiny_run: Path, tmp_path: Path) -> Path:
    """Return a model folder that holds code and no tokenizer.json."""
    folder = Path(shutil.copytree(tiny_run / "model", tmp_path / "model"))
    add_code(folder)
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def tree(tiny_run: Path, model: Path, tmp_path: Path) -> dict[str, Any]:
    data = {"path": str(tiny_run / "train.jsonl"), "eval_path": str(tiny_run / "heldout.jsonl")}
    return {"run_dir": str(tmp_path / "run"), "model": {"path": str(model)}, "data": data}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the standard input of this process, which answers every question with yes."""
    stdin = io.StringIO("yes\n" * 1000)
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


def stage_words(kind: str, tree: dict[str, Any], folder: Path) -> list[str]:
    sections = {"rm": {"rm": {}}, "dpo": {"dpo": {}}}.get(kind, {})
    return [kind, str(write_config(folder / "config.yaml", tree | sections))]


def words_of(name: str, tree: dict[str, Any], model: Path, folder: Path) -> tuple[list[str], str]:
    """Return a command on the model, and what it reports: that it needs code, or another problem, or nothing."""
    if name == "doctor":  # reads the machine and, with --cluster, sizes of a configuration
        return [name], ""
    if name == "score":
        (folder / "tokens.jsonl").write_text('{"token_ids": [1, "x"]}\n')
        files = ["--input", str(folder / "tokens.jsonl"), "--output", str(folder / "scores.jsonl")]
        return [name, "--model", str(model), *files], "tokens.jsonl:1"
    if name == "convert":
        (folder / "full").mkdir()
        (folder / "full" / "file").touch()
        words = [name, "hf-to-megatron", "--model", str(model), "--output", str(folder / "full")]
        return words, "--output"
    if name == "reshard":
        return [name, "explain", "--model", str(model), "--train", "tp=1", "--gen", "tp=1"], ""
    if name == "data":
        return [name, tree["data"]["path"], "--model", str(model)], REFUSED
    if name == "check":
        return ["check", *stage_words("train", tree, folder)[1:]], REFUSED
    return stage_words(name, tree, folder), REFUSED


@pytest.mark.parametrize("name", [name for name in SUMMARIES if name not in WITHOUT_MODEL])
def test_no_command_runs_code_or_asks(
    name: str,
    tree: dict[str, Any],
    model: Path,
    tmp_path: Path,
    answers: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fork_traces(monkeypatch)
    words, problem = words_of(name, tree, model, tmp_path)
    code = main(words)
    found = capsys.readouterr()
    assert code in ((2,) if problem else (0, 1)), found
    assert problem in found.out + found.err
    assert answers.tell() == 0
    assert not mark_of(model).exists()


def test_a_pipe_that_says_yes_runs_nothing(model: Path) -> None:
    code = f"from megarl.data.tokenizer import load_tokenizer; load_tokenizer({str(model)!r})"
    done = subprocess.run([sys.executable, "-c", code], input="yes\n" * 99, text=True, capture_output=True, check=False)
    assert REFUSED in done.stderr
    assert done.stdout == ""
    assert not mark_of(model).exists()


def test_trusted_code_of_a_local_folder_runs(model: Path, tiny_run: Path) -> None:
    shutil.copy(tiny_run / "model" / "tokenizer.json", model)
    own = load_tokenizer(model)
    assert not mark_of(model).exists()
    trusted = load_tokenizer(model, trust_remote_code=True)
    assert mark_of(model).exists()
    assert type(trusted).__name__ == "Tokenizer"
    assert trusted.encode("7 + 1 =") == own.encode("7 + 1 =") == load_tokenizer(tiny_run / "model").encode("7 + 1 =")


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_another_repository_is_refused(tiny_run: Path, tmp_path: Path, trust: bool) -> None:
    model = Path(shutil.copytree(tiny_run / "model", tmp_path / "model"))
    add_code(model, tokenizer="other/repository--hostile.Tokenizer")
    (model / "tokenizer.json").unlink()
    expected = "of which no commit is pinned" if trust else "code in the model folder, which has no tokenizer.json"
    with pytest.raises(DataError, match=rf"names other/repository--hostile.Tokenizer, .*{expected}"):
        load_tokenizer(model, trust_remote_code=trust)
    add_code(model, auto_map={"AutoConfig": "other/repository--hostile.Config"})
    with pytest.raises(DataError, match=r"names other/repository--hostile.Config|no tokenizer.json"):
        load_tokenizer(model, trust_remote_code=trust)
    assert not mark_of(model).exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__['os'].mkdir(MARK) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_chat_templates_stay_in_their_sandbox(template: str, tiny_run: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_run / "model")
    tokenizer.chat_template = template.replace("MARK", repr(str(tmp_path / "ran")))
    with pytest.raises(ChatTemplateError):
        apply_chat_template(tokenizer, [{"role": "user", "content": "a"}], DAY)
    assert not (tmp_path / "ran").exists()


def test_the_engine_has_the_switch_of_the_model(tree: dict[str, Any], model: Path) -> None:
    for trust in (False, True):
        changes = [f"model.trust_remote_code={str(trust).lower()}", "rollout.engine.deterministic=false"]
        config = make_config(RunConfig, json.loads(json.dumps(tree)), changes)
        (model / "generation_config.json").write_text('{"eos_token_id": 1}')
        assert make_engine_arguments(make_engine_spec(config, 0, "cpu"))["trust_remote_code"] is trust
    with expect_error(ConfigError, "trust_remote_code", "model.trust_rem"):
        make_engine_arguments(EngineSpec(model_path="m", extra_args={"trust_remote_code": True}))


def test_engines_of_a_corrected_config_run_no_code_either(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.ones(4, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    for trust, rest in ((False, {"auto_map": {}}), (True, {})):
        arguments = make_engine_arguments(EngineSpec(model_path=str(tmp_path), trust_remote_code=trust))
        assert json.loads(str(arguments["json_model_override_args"])) == {"tie_word_embeddings": False} | rest


def test_engines_run_no_code_of_models_that_sglang_does_not_have(model: Path, tiny_run: Path) -> None:
    add_code(model, architectures=["HostileForCausalLM"])
    error = model.parent / "error"
    words = (str(model), str(tiny_run / "model"), str(error))
    variables = engine_variables(EngineSpec(model_path=""))
    assert ForkedProcess(server_address(), variables, build_unknown_model, *words).wait(HANG_SECONDS) == 0
    assert "Cannot find model module" in error.read_text()
    assert not mark_of(model).exists()


def test_engines_of_kimi_k2_need_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config.json names code for a model type that transformers does not have, and SGLang has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fork_traces(monkeypatch)
    folder = tmp_path / "kimi"
    config = AutoConfig.for_model("deepseek_v3", **LATENT, architectures=["DeepseekV3ForCausalLM"])
    config.save_pretrained(folder)
    add_code(folder, model_type="kimi_k2")
    layouts = trace_layouts(str(folder), tp=2, dtype="bfloat16")
    assert [layout.tensors.keys() for layout in layouts] == [layouts[0].tensors.keys()] * 2
    assert not mark_of(folder).exists()


def build_unknown_model(model: str, known_model: str, error: str) -> None:
    """Build the model as an engine would, and write the error; runs where SGLang can be imported."""
    from megarl.engines.sglang.scheduler_process import skip_other_models
    from megarl.engines.sglang.weight_layout.trace_child import build_model

    skip_other_models(known_model)  # importing all takes seconds
    try:
        build_model(EngineSpec(model_path=model), 0)
    except ValueError as e:
        Path(error).write_text(str(e))


@pytest.mark.parametrize("folder", ["megarl", "examples", "benchmarks", "launch", "tests/clients"])
def test_transformers_is_told_everywhere_whether_to_run_code(folder: str) -> None:
    """Without the argument, `from_pretrained` of an Auto class asks on standard input."""
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search("(from|import) transformers", path.read_text())
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and not any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
    ]
    assert asking == []
