"""Commands on models: `megarl convert` and `megarl score`, compared with transformers, and `megarl eval`."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.config import make_score_config
from megarl.run.remote import build
from tests.end_to_end.launched import RAY_AGENTS
from tests.end_to_end.tiny_world import NUM_HELD_OUT, write_run
from tests.megatron.families.outside import STORY_PATH, write_story
from tests.megatron.fidelity.models import save_model

SCORES = [i / NUM_HELD_OUT for i in range(NUM_HELD_OUT + 1)]


def check_result(line: str, world: Path) -> None:
    result = json.loads(line)
    assert result["eval/one"] in SCORES
    assert result["model"] == str(world / "model")


def test_eval_prints_one_json_object(components, run_here, world, tmp_path, monkeypatch, capsys):
    """With the engine that other tests use too."""
    engines: Any = SimpleNamespace(**vars(components.engines))
    for name in ("remote_engines", "name", "first_completion_time", "wait_started"):
        setattr(engines, name, getattr(components.engines, name))
    has_ended: list[bool] = []
    engines.shutdown = lambda: has_ended.append(True)
    monkeypatch.setattr(build, "EngineGroup", lambda *_: engines)
    earlier = tmp_path / "run" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("{}\n")
    components.weights.push(0)
    assert run_here("eval", write_run(world, tmp_path), "--json") == 0
    check_result(capsys.readouterr().out.splitlines()[-1], world)
    assert has_ended
    assert earlier.read_text() == "{}\n", "the files of an earlier run must not be moved"


@pytest.mark.slow
def test_eval_leaves_no_processes_or_files(world, tmp_path, launch):
    command = launch("eval", write_run(world, tmp_path, placement={"slots_per_node": 1}), "--json")
    assert command.wait() == 0, command.stderr
    check_result(command.stdout.splitlines()[-1], world)
    command.assert_nothing_left()


COMPANIONS = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "merges.txt": "a b\n"}


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(save_model("qwen3_moe", tmp_path_factory.mktemp("models")))
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text)
    return folder


def test_conversion_round_trip_is_bitwise_equal(moe_model, tmp_path, run_here, capsys):
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "parent" / "back"
    sizes = ("trainer.parallel.tp=2", "trainer.parallel.ep=2", "trainer.parallel.etp=1")
    assert run_here("convert", "hf-to-megatron", "--model", moe_model, "--output", checkpoint, "--set", *sizes) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["checkpoint", str(checkpoint)]
    assert err.splitlines()[:3] == ["starting 2 ranks", "reading", "writing"]
    assert {path.name for path in checkpoint.iterdir()} == {"latest_checkpointed_iteration.txt", "release", "hf"}
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "release"
    release = {path.name for path in (checkpoint / "release").iterdir()}
    assert release == {".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__1_0.distcp"}
    companions = {path.name for path in moe_model.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (checkpoint / "hf").iterdir()} == companions

    other = ("--set", "trainer.parallel.pp=2")
    assert run_here("convert", "megatron-to-hf", "--model", checkpoint, "--output", back, *other) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["model", str(back)]
    assert err.splitlines()[-1].startswith("converted ")
    assert {path.name for path in back.iterdir()} == companions | {"model.safetensors"}
    assert {path.name for path in back.parent.iterdir()} == {"back"}
    assert {name: (back / name).read_text() for name in COMPANIONS} == COMPANIONS
    same_logits(back, moe_model)


@pytest.mark.slow
def test_family_outside_the_package(tmp_path, launch):
    model = write_story(Path(save_model("llama3", tmp_path / "models")), tmp_path / "story")
    checkpoint, back, family = tmp_path / "checkpoint", tmp_path / "back", ("--family", STORY_PATH)
    there = launch("convert", "hf-to-megatron", "--model", model, "--output", checkpoint, *family)
    assert there.wait() == 0, there.stderr
    there.assert_nothing_left()
    again = launch("convert", "megatron-to-hf", "--model", checkpoint, "--output", back, *family)
    assert again.wait() == 0, again.stderr
    same_weights(back, model)


def same_weights(back: Path, model: Path) -> None:
    want, got = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def same_logits(back: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    same_weights(back, model)
    loaded, report = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not any(report.values())
    ids = torch.arange(2, 60)[None]
    assert torch.equal(loaded(ids).logits, AutoModelForCausalLM.from_pretrained(model)(ids).logits)


LENGTHS = (1, 2, 200, 3, 40, 1, 700, 5, 90, 17, 64, 33, 2, 128, 129, 9, 310, 25, 6, 80) * 2
"""Sequence lengths: several chunks of 16 * 64 tokens per replica, and sequences longer than a micro-batch."""

LAYOUTS = {
    "tp2": ("trainer.parallel.tp=2", "temperature=0.7"),
    "dp2": ("placement.slots_per_node=2",),
    "cp2 pp2 vpp2": ("trainer.parallel.cp=2", "trainer.parallel.pp=2", "trainer.parallel.vpp=2"),
}
SMALL_MICRO_BATCHES = ("trainer.max_tokens_per_micro_batch=64",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"id": f"row {i}", "token_ids": rng.integers(0, 331, n).tolist()} for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def logits(model: str, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return transformers' float32 logits [T - 1, V] of tokens 1 to T - 1 for each row."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [reference(torch.tensor([row["token_ids"]])).logits[0, :-1] for row in rows]


def test_scores_equal_those_of_transformers(model, rows, logits, tmp_path, run_here, capsys):
    arguments = arguments_of("tp2", model, rows, tmp_path)
    assert run_here(*arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["scores", str(tmp_path / "scores.jsonl")]
    check_scores(tmp_path / "scores.jsonl", rows, logits, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_on_ray_and_under_torchrun(layout, model, rows, logits, tmp_path, launch):
    arguments, output = arguments_of(layout, model, rows, tmp_path), tmp_path / "scores.jsonl"
    command = launch(*arguments)
    assert command.wait() == 0, command.stderr
    command.assert_nothing_left()
    check_scores(output, rows, logits, temperature=0.7 if layout == "tp2" else 1.0)
    scores = output.read_bytes()
    slots = make_score_config(model, arguments[arguments.index("--set") + 1 :]).sized_placement.slots
    spmd = launch("--standalone", "--nproc-per-node", str(slots), "-m", "megarl", *arguments, program="torchrun")
    assert spmd.wait() == 0, spmd.stderr
    assert spmd.stdout.splitlines() == [f"scores       {output}"]
    assert spmd.stderr.count("scored 40/40 lines") == 1
    assert output.read_bytes() == scores


def arguments_of(layout: str, model: str, rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """Write the sequences, and return the arguments of `megarl` to score them in this layout."""
    source = folder / "tokens.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ("--input", str(source), "--output", str(folder / "scores.jsonl"))
    return ["score", "--model", model, *paths, "--set", *LAYOUTS[layout], *SMALL_MICRO_BATCHES]


def check_scores(output: Path, rows: list[dict[str, Any]], logits: list[torch.Tensor], *, temperature: float) -> None:
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["id"] for line in got] == [row["id"] for row in rows]
    for line, row, logits_TV in zip(got, rows, logits, strict=True):
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        want = logprobs_TV.gather(1, torch.tensor(row["token_ids"])[1:, None])[:, 0]
        entropy = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        assert np.abs(np.array(line["logprobs"]) - want.numpy()).max(initial=0) <= 1e-5, row["id"]
        assert np.abs(np.array(line["entropy"]) - entropy.numpy()).max(initial=0) <= 1e-5, row["id"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "line", "message"),
    [
        (None, '{"token_ids": [1, 400]}', "{source}:1: token_ids[1] needs to be below the model's vocab_size = 331"),
        ("nothing", '{"token_ids": [1]}', "model.path: needs a folder in Hugging Face format"),
    ],
)
def test_only_the_first_torchrun_rank_reports_an_error(folder, line, message, model, tmp_path, launch):
    source, output = tmp_path / "tokens.jsonl", tmp_path / "scores.jsonl"
    source.write_text(f"{line}\n")
    ranks = ("--standalone", "--nproc-per-node", "2", "-m", "megarl")
    path = tmp_path / folder if folder else model
    run = launch(*ranks, "score", "--model", path, "--input", source, "--output", output, program="torchrun")
    assert run.wait() == 1  # torchrun's
    (error,) = (line for line in run.stderr.splitlines() if line.startswith("error: "))
    assert error.startswith("error: " + message.replace("{source}", str(source)))
    assert "exitcode  : 2" in run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.jsonl", "stdout", "stderr"}
    run.assert_no_processes_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_scoring_leaves_no_output(number, model, tmp_path, launch):
    source, output, partial = (tmp_path / name for name in ("tokens.jsonl", "scores.jsonl", "scores.jsonl.partial"))
    source.write_text('{"token_ids": [5, 6, 7, 8, 9, 10, 11, 12]}\n' * 500_000)
    command = launch("score", "--model", model, "--input", source, "--output", output)
    command.wait_until(lambda: partial.exists() and partial.stat().st_size)
    command.send(number)
    if number == signal.SIGKILL:
        assert command.wait() == -signal.SIGKILL
        command.assert_no_processes_left(but=RAY_AGENTS)
    else:
        assert command.wait() == 130
        command.assert_no_processes_left()
        assert command.stderr.endswith("error: interrupted\n")
        assert command.find_leftovers() == []
        assert not partial.exists()
    assert not output.exists()
