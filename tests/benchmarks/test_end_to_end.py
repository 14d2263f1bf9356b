"""The comparison with another trainer: what is run, and what is reported."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.chaos.targets import ProcessRow
from benchmarks.end_to_end import __main__ as program
from benchmarks.end_to_end import megarl_run
from benchmarks.end_to_end.compare import compare, require_equal_lengths
from benchmarks.end_to_end.processor_time import ProcessorTime
from benchmarks.end_to_end.timed_run import TimedRun
from benchmarks.end_to_end.trl_run import COMPLETIONS_PER_UPDATE
from benchmarks.end_to_end.workloads import LONG_TAIL_VOCABULARY, Workload, make_long_tail
from megarl.config import RunConfig

LENGTHS = tuple(range(1, 101))


@pytest.fixture(scope="module")
def long_tail(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return make_long_tail(tmp_path_factory.mktemp("long-tail"), lambda _: None)


def test_the_random_model_ends_completions_with_a_nearly_constant_probability(long_tail: Workload) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(long_tail.model)
    end = AutoTokenizer.from_pretrained(long_tail.model).eos_token_id
    ids = torch.randint(2, LONG_TAIL_VOCABULARY, (8, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ends = model(ids).logits.softmax(-1)[..., end]
    lengths = torch.arange(long_tail.max_new_tokens)
    expected = float((1 - ends.mean()).pow(lengths).sum())  # of a geometric length, at most max_new_tokens
    assert 240 < expected < 300
    assert float(ends.std() / ends.mean()) < 0.4


def test_both_trainers_sample_256_completions_and_make_two_updates_a_step(long_tail: Workload, tmp_path: Path) -> None:
    config = RunConfig.model_validate(megarl_run._config(long_tail, tmp_path / "data.jsonl", tmp_path / "run"))
    algorithm = config.algorithm
    assert algorithm.group_size * algorithm.prompts_per_step == 256 == 2 * COMPLETIONS_PER_UPDATE
    assert algorithm.num_mini_batches == 2
    assert len(long_tail.prompts) >= algorithm.prompts_per_step


def run(seconds: float, lengths: tuple[int, ...] = LENGTHS) -> TimedRun:
    return TimedRun(
        seconds=(seconds, seconds, 100.0),
        lengths=lengths,
        phases={"rollout": seconds / 2},
        processor_seconds={"trainer": seconds / 4},
    )


def test_runs_alternate_and_medians_are_reported() -> None:
    order: list[str] = []

    def trainer(name: str, seconds: list[float]) -> Callable[[int], TimedRun]:
        return lambda number: (order.append(name), run(seconds[number]))[1]

    ours, theirs = trainer("ours", [1.0, 9.0, 2.0]), trainer("theirs", [3.0, 9.0, 3.0])
    report = compare(ours, theirs, 3, batch_size=64, notify=lambda _: None)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (report.megarl_seconds, report.peer_seconds, report.ratio) == (2, 3, 1.5)
    assert report.ratios == (1.0, 1.5, 3.0)
    assert report.phases == {"rollout": 1.0}
    assert report.processor_seconds == {"trainer": 0.5}
    assert (report.megarl_length, report.length_distance) == (50.5, 0)


def test_other_lengths_are_an_error() -> None:
    from scipy.stats import ks_2samp

    generator = np.random.default_rng(0)
    first, second = generator.geometric(1 / 270, 2000), generator.geometric(1 / 270, 2000)
    assert require_equal_lengths(first, second) == pytest.approx(ks_2samp(first, second).statistic)
    with pytest.raises(ArithmeticError, match=r"completions of different lengths, of mean 2\d\d\.\d and 3\d\d\.\d"):
        require_equal_lengths(first, second * 13 // 10)


def test_json_has_the_ratios(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folders: list[Path] = []

    def run_trl(python: Path, workload: Workload, folder: Path, *, batch_size: int, num_steps: int = 3) -> TimedRun:
        return run(3.0 if batch_size == 32 else 4.0)

    def run_megarl(workload: Workload, folder: Path, overrides: list[str]) -> TimedRun:
        assert overrides == ["rollout.engine.deterministic=false"]
        folders.append(folder)
        return run(2.0)

    monkeypatch.setattr(program, "make_trl_environment", lambda folder, notify: folder / "bin/python")
    monkeypatch.setattr(program, "run_trl", run_trl)
    monkeypatch.setattr(program, "run_megarl", run_megarl)
    monkeypatch.setattr(program, "WORKLOADS", dict.fromkeys(program.WORKLOADS, lambda folder, notify: None))
    assert program.main(["--peer", "trl", "--json", "--runs", "2", "--set", "rollout.engine.deterministic=false"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["peer"], report["ratio_toy"], report["ratio_long_tail"]) == ("trl", 1.5, 1.5)
    assert report["toy"]["peer_batch_size"] == 32
    assert [folder.name for folder in folders] == ["megarl-0", "megarl-1"] * 2


class FakeCommand:
    """A command that makes one step per poll, and then ends."""

    driver = os.getpid()

    def __init__(self, metrics: Path, num_steps: int) -> None:
        self.metrics, self.rows = metrics, ['{"loss": 0.1}\n'] * num_steps

    def exit_code(self) -> int | None:
        if not self.rows:
            return 0
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        with self.metrics.open("a") as file:
            file.write(self.rows.pop())
        return None

    def table(self) -> list[ProcessRow]:
        return [ProcessRow(pid=self.driver, parent=0, title="python")]


def test_processor_time_is_measured_per_step(tmp_path: Path) -> None:
    command: Any = FakeCommand(tmp_path / "metrics.jsonl", 8)
    processor_time = ProcessorTime(command, command.metrics, 2)
    assert processor_time.seconds_per_step == {}
    assert processor_time.wait() == 0
    assert processor_time.seconds_per_step == {"driver": pytest.approx(0.05, abs=0.03)}
    assert processor_time.machine_seconds_per_step >= processor_time.seconds_per_step["driver"] - 0.02
