"""`megarl score` compared with transformers' log-softmax in several layouts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import make_score_config
from tests.end_to_end.conftest import Launch, RunCommand
from tests.end_to_end.launched import RAY_AGENTS
from tests.megatron.fidelity.models import save_model

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


def test_scores_equal_those_of_transformers(
    model: str,
    rows: list[dict[str, Any]],
    logits: list[torch.Tensor],
    tmp_path: Path,
    run_here: RunCommand,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = arguments_of("tp2", model, rows, tmp_path)
    assert run_here(*arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["scores", str(tmp_path / "scores.jsonl")]
    check_scores(tmp_path / "scores.jsonl", rows, logits, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_on_ray_and_under_torchrun(
    layout: str, model: str, rows: list[dict[str, Any]], logits: list[torch.Tensor], tmp_path: Path, launch: Launch
) -> None:
    arguments, output = arguments_of(layout, model, rows, tmp_path), tmp_path / "scores.jsonl"
    command = launch(*arguments)
    assert command.wait() == 0, command.stderr
    command.assert_no_processes_left()
    assert command.find_leftovers() == []
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
def test_only_the_first_torchrun_rank_reports_an_error(
    folder: str | None, line: str, message: str, model: str, tmp_path: Path, launch: Launch
) -> None:
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
def test_interrupted_scoring_leaves_no_output(
    number: signal.Signals, model: str, tmp_path: Path, launch: Launch
) -> None:
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
