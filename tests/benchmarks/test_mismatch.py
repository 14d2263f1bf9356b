"""The benchmark of trainer and engine log-probabilities: which recipes it runs, and what its tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mismatch.families import FAMILIES
from benchmarks.mismatch.measure import MismatchReport
from benchmarks.mismatch.prepare import ROOT
from benchmarks.mismatch.recipes import RECIPES
from benchmarks.mismatch.show import markdown
from megarl.config import STAGES
from megarl.config.load import make_config, read_tree
from megarl.megatron.families.load_architecture import FAMILY_READERS


def make_report(name: str, *, kl: list[float], **fields: object) -> MismatchReport:
    mismatch = {"logprob_kl": kl, "logprob_abs_p99": [0.01] * len(kl), "logprob_abs_max": [0.1] * len(kl)}
    given = {"difference": "", "entropy": [0.5, 1.0], "stopped_by": "", "mismatch": mismatch if kl else {}} | fields
    return MismatchReport(name=name, dtype="bfloat16", steps=len(kl), **given)  # type: ignore[arg-type]


def test_every_recipe_is_run_and_its_overrides_are_valid() -> None:
    files = [*ROOT.glob("yaml/**/*.yaml"), *ROOT.glob("examples/*/*.yaml")]
    assert sorted(recipe.file for recipe in RECIPES) == sorted(str(file.relative_to(ROOT)) for file in files)
    for recipe in RECIPES:
        tree = read_tree(ROOT / recipe.file)
        algorithm = tree.get("algorithm")
        if isinstance(algorithm, dict) and ":" in algorithm["type"]:
            continue  # the module that it names imports Ray, which changes this process
        overrides = [f"{key}={value}" for key, value in recipe.overrides.items()]
        make_config(STAGES[recipe.command], tree, overrides)


def test_every_family_has_a_model() -> None:
    architectures = {name.replace("_", "") + "forcausallm" for name in FAMILIES}
    assert architectures == {name.lower() for name in FAMILY_READERS}


def test_share_of_the_limit_counts_the_steps_before() -> None:
    report = make_report("a", kl=[1e-5] * 8 + [3e-5, 3.1e-5])
    assert report.share_of_limit("logprob_kl") == pytest.approx(3 / 4)
    assert make_report("a", kl=[2e-3]).share_of_limit("logprob_kl") == pytest.approx(0.2)


def test_the_tables_state_ranges_and_what_ended_a_run(tmp_path: Path) -> None:
    recipes = [make_report("a.yaml", kl=[2e-6, 1e-6, 4e-6]), make_report("b.yaml", kl=[], entropy=[])]
    family = make_report("llama", kl=[0.5], stopped_by="error: step 1: ...", rounding_kl=1e-3, difference="smaller")
    family.write(tmp_path / "reports/llama.json")
    text = markdown(recipes, [MismatchReport.read(tmp_path / "reports/llama.json")])
    assert "| a.yaml | none | all steps | 3 | 0.75 | 1.0e-06 to 4.0e-06 (median 2.0e-06) | 0.00 | 1.0e-02 to" in text
    assert "| b.yaml | none | all steps | 0 | - | no engine | - | no engine | - |" in text
    assert "| llama | smaller | stopped by its limit | 1 |" in text
    assert "| 50.00 |" in text
