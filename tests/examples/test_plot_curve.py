"""`examples/plot_curve.py`: the curve of a metric, and one sentence where there is none."""

from __future__ import annotations

import json
import math
import runpy
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.config.tracking import TrackingConfig
from megarl.tracking.tracker import Tracker

SCRIPT: Mapping[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "examples/plot_curve.py"))
LIGHT, DARK = "#ffffff", "#0d1117"


def write_run(folder: Path, rewards: Mapping[int, float]) -> Path:
    """Write the metrics of a run as megarl does."""
    with Tracker(TrackingConfig(tensorboard=False), folder) as tracker:
        for step, reward in rewards.items():
            tracker.log({"reward/mean": reward, "loss": 0.5}, step=step)
    return folder


def plot(*arguments: str | Path) -> int:
    return int(SCRIPT["main"]([str(word) for word in arguments]))


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_file_is_the_same_each_time_and_names_the_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {1: 0.25, 2: 0.5, 3: 0.75}) for name in ("first", "second")]
    files = [tmp_path / "new" / f"{i}.svg" for i in range(2)]
    for file in files:
        assert plot(*runs, "--metric", "reward/mean", "--out", file) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    texts = {element.text for element in ET.parse(files[0]).iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "reward/mean", "first", "second"} <= texts
    assert "dc:date" not in files[0].read_text()
    assert plot(runs[0], "--metric", "reward/mean", "--out", files[1]) == 0
    assert "first" not in files[1].read_text(), "one curve needs no legend"


def test_a_step_without_the_metric_is_left_out_and_no_number_is_a_gap(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {1: 0.25, 2: math.nan})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "eval/accuracy": 0.5}) + '\n{"step": 3, "reward/me')
    curve = SCRIPT["read_curve"](run, "reward/mean")
    assert (curve[1], math.isnan(curve[2]), len(curve)) == (0.25, True, 2)
    assert SCRIPT["read_curve"](run, "eval/accuracy") == {2: 0.5}


def test_a_missing_metric_is_answered_by_the_names_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", {1: 0.25})
    assert plot(run, "--metric", "reward", "--out", tmp_path / "curve.svg") == 2
    expected = f"error: {run}/metrics.jsonl has no metric reward; it has:\n  loss\n  reward/mean\n"
    assert capsys.readouterr().err == expected
    assert plot(tmp_path, "--metric", "reward", "--out", tmp_path / "curve.svg") == 2
    assert f"there is no {tmp_path}/metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "curve.svg").exists()


def test_runs_of_the_same_name_are_labeled_by_their_paths() -> None:
    assert SCRIPT["label_runs"]([Path("a/run"), Path("b/other")]) == ["run", "other"]
    assert SCRIPT["label_runs"]([Path("a/run"), Path("b/run")]) == ["a/run", "b/run"]


@pytest.mark.parametrize("color", [SCRIPT["GRAY"], *SCRIPT["COLORS"]])
def test_colors_are_readable_on_light_and_dark_backgrounds(color: str) -> None:
    assert min(contrast(color, LIGHT), contrast(color, DARK)) > 4
