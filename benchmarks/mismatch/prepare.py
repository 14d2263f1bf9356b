"""Prepares a folder in which the recipes of the repository find their data and models, and runs them there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.mismatch.measure import MismatchReport, make_report, run_megarl
from benchmarks.mismatch.recipes import Recipe
from megarl.config.load import read_tree

ROOT = Path(__file__).parents[2]


def prepare_folder(folder: Path, *, gsm8k: Path | None, real_model: Path | None, openai_agents: Path | None) -> None:
    """Link the repository's recipes into `folder` and write the data of those that have some; once."""
    folder.mkdir(parents=True, exist_ok=True)
    links = {"yaml": ROOT / "yaml", "examples": ROOT / "examples"}
    if gsm8k is not None:
        links["data/gsm8k"] = gsm8k.resolve()
    if real_model is not None:
        links["runs/real-model/model"] = real_model.resolve()
    if openai_agents is not None:
        links["runs/gateway/openai-agents"] = openai_agents.resolve()
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target)
    if not (folder / "runs/demo/data").exists():
        run_megarl_demo(folder)
    for example, *arguments in (
        ("custom-family", "runs/custom-family/model"),
        ("two-policies", "runs/two-policies/data"),
        ("environments", "calculator", "runs/calculator/data"),
        ("environments", "guess", "runs/guess/data"),
        ("environments", "python", "runs/python/data"),
        ("environments", "search", "runs/search/data"),
        ("environments", "tool-calls", "runs/gateway/data"),
        ("environments", "http", "runs/http/data"),
        *([("real-model", "runs/real-model/data")] if real_model is not None else []),
    ):
        script = ROOT / "examples" / example / "make_data.py"
        subprocess.run([sys.executable, script, *arguments], cwd=folder, check=True)


def run_megarl_demo(folder: Path) -> None:
    """Write the demo's data, which the example with a reward model uses too."""
    megarl = Path(sys.executable).with_name("megarl")
    subprocess.run([megarl, "demo", "--data-only", "--out", "runs/demo"], cwd=folder, check=True, capture_output=True)
    shutil.copytree(folder / "runs/demo/data", folder / "runs/reward-model-ppo/data")


def run_recipe(recipe: Recipe, *, dtype: str, folder: Path) -> MismatchReport:
    """Run the recipe in `folder` with the limits as they are by default."""
    overrides: dict[str, object] = {"model.dtype": dtype, **recipe.overrides}
    if recipe.steps is not None:
        overrides["trainer.steps"] = recipe.steps
    run_dir = folder / str(read_tree(ROOT / recipe.file)["run_dir"])
    stopped_by = run_megarl(
        recipe.command, recipe.file, overrides, folder=folder, python_path=[(ROOT / recipe.file).parent]
    )
    return make_report(run_dir, name=recipe.file, dtype=dtype, stopped_by=stopped_by, difference=recipe.difference)
