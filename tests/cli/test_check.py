"""`megarl check`: the resolved configuration, all problems at once, and plans for jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.main import main
from megarl.config import RunConfig, load_config
from tests.cli.tiny_run import write_config, write_tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check")


@pytest.fixture(scope="module")
def tree(folder: Path) -> dict[str, Any]:
    return write_tiny_run(folder)


@pytest.fixture
def recipe(folder: Path, tree: dict[str, Any]) -> str:
    return str(write_config(folder / "run.yaml", tree))


def test_prints_the_resolved_configuration(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe, "--set", "seed=3", "trainer.steps=5", "--set", "seed=4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == "# ok: no problems found for megarl train"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(out)
    config = load_config(RunConfig, resolved)
    assert config == load_config(RunConfig, recipe, ["seed=4", "trainer.steps=5"])
    assert yaml.safe_load(out)["trainer"]["optimizer"]["lr"] == 1e-6


def test_prints_the_values_of_a_preset(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    algorithm = "algorithm={type: dapo, preset: paper, overlong: {buffer: 64}}"
    assert main(["check", recipe, "--set", algorithm]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)["algorithm"]
    assert (printed["clip_ratio_low"], printed["clip_ratio_high"], printed["kl_loss"]) == (0.2, 0.28, None)
    assert printed["overlong"] == {"max_length": 20480, "buffer": 64, "factor": 1.0}


def test_names_the_modules_that_it_executes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "executed_by_check.py").write_text("def score(trajectory, text, row): return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    terms = "reward.terms={mine: {type: python, path: executed_by_check:score}}"
    for problem, code in (("seed=3", 0), ("data.path=none.jsonl", 2)):
        assert main(["check", recipe, "--set", terms, problem]) == code
        out = capsys.readouterr().out
        assert out.splitlines()[0] == (
            "# imported executed_by_check for reward.terms.mine.path: executed_by_check:score"
        )
        assert out.count("# imported ") == 1
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert "which executes them" in " ".join(capsys.readouterr().out.split())


def test_reports_all_problems(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", recipe, "--set", "data.path=none.jsonl", "rollout.max_new_tokens=500"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "rollout.max_new_tokens: " in err
    assert "data.path: none.jsonl: no such data file" in err


def test_stage_sft(folder: Path, tree: dict[str, Any], recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe, "--stage", "sft"]) == 2
    assert "rollout: unknown key" in capsys.readouterr().err
    sft = write_config(folder / "sft.yaml", {key: value for key, value in tree.items() if key != "rollout"})
    assert main(["check", str(sft), "--stage", "sft"]) == 0
    assert capsys.readouterr().out.endswith("megarl sft\n")


def test_an_invalid_configuration_is_rejected_without_importing_torch(tmp_path: Path) -> None:
    recipe = write_config(tmp_path / "run.yaml", {"run_dir": "x", "model": {"path": "m"}})
    code = (
        "import sys; from megarl.cli.main import main; code = main(['check', sys.argv[1]]);"
        "sys.exit('torch' in sys.modules or code)"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr == f"error: {recipe}: data: this key is required\n"


def test_imports_neither_ray_nor_engines(recipe: str) -> None:
    code = (
        "import sys; from megarl.cli.main import main; code = main(['check', sys.argv[1]]);"
        "started = [m for m in ('ray', 'sglang', 'megatron.core') if m in sys.modules];"
        "sys.exit(str(started) if started else code)"
    )
    answer = subprocess.run([sys.executable, "-c", code, recipe], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


JOBS: dict[str, tuple[list[str], list[str], str]] = {
    "too few": (
        ["placement.slots_per_node=8", "placement.nodes=3"],
        ["--nodes", "2", "--gpus-per-node", "8"],
        "placement: needs nodes * slots_per_node = 3 * 8 = 24 CPU slots on 3 nodes; the cluster has 0 nodes with 8 CPU "
        "slots or more (node0:0 node1:0)",
    ),
    "too few for cuda": (
        ["placement.slots_per_node=8", "placement.device=cuda"],
        ["--nodes", "2", "--gpus-per-node", "4"],
        "placement: needs nodes * slots_per_node = 1 * 8 = 8 GPUs on 1 node; the cluster has 0 nodes with 8 GPUs or "
        "more (node0:4 node1:4)",
    ),
    "a component's": (
        [
            "placement={slots_per_node: 2, pools: {r: {nodes: 2}}, rollout: {pool: r}}",
            "placement.pools.r.labels={megarl.het-group: '1'}",
            "rollout.replicas=2",
        ],
        ["--nodes", "1", "1", "--cpus-per-node", "8", "1"],
        "placement.pools.r: needs nodes * slots_per_node = 2 * 1 = 2 CPU slots on 2 nodes, labeled "
        "megarl.het-group=1, in addition to placement; the cluster has 1 node with 1 CPU slots or more (node1:1)",
    ),
    "a tensor group over nodes": (
        ["placement.nodes=2", "trainer.parallel.tp=2"],
        ["--nodes", "2", "--gpus-per-node", "8"],
        "RunConfig: trainer.parallel tp needs to divide the slots of a node, so that no tensor-parallel group crosses "
        "nodes, got placement slots_per_node % tp = 1 % 2 = 1",
    ),
    "no nodes": (
        [],
        ["--gpus-per-node", "8"],
        "--nodes needs --gpus-per-node or --cpus-per-node, and those need --nodes, got --gpus-per-node",
    ),
    "components": (
        [],
        ["--nodes", "2", "1", "--gpus-per-node", "8"],
        "--gpus-per-node: needs one number per value of --nodes, got 1 for 2",
    ),
    "a time limit": (
        [],
        ["--nodes", "2", "--cpus-per-node", "8", "--time", "2h"],
        "--time: needs minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or "
        "days-hours:minutes:seconds, got '2h'",
    ),
}


@pytest.mark.parametrize(("overrides", "job", "message"), JOBS.values(), ids=list(JOBS))
def test_impossible_jobs_are_rejected(
    recipe: str, capsys: pytest.CaptureFixture[str], overrides: list[str], job: list[str], message: str
) -> None:
    code = main(["check", recipe, *job, *(["--set", *overrides] if overrides else [])])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err


def test_a_valid_job_lists_the_nodes_of_each_pool(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    placement = "placement={nodes: 2, slots_per_node: 8, pools: {r: {slots_per_node: 4}}, rollout: {pool: r}}"
    job = ["--nodes", "3", "--gpus-per-node", "8", "--time", "1-12"]
    sizes = ["algorithm.prompts_per_step=16", "algorithm.group_size=2"]
    assert main(["check", recipe, *job, "--set", placement, *sizes]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-4:] == [
        "# pool main: 8 GPUs on each of node0 node1",
        "# pool r: 4 GPUs on each of node2",
        "# idle: 4 GPUs",
        "# ok: no problems found for megarl train",
    ]
    over_nodes = placement.replace("{slots_per_node: 4}", "{nodes: 2, slots_per_node: 2}")
    job = ["--nodes", "4", "--gpus-per-node", "8"]
    assert main(["check", recipe, *job, "--set", over_nodes, *sizes, "rollout.tp=4"]) == 0
    engine = "# engine 0: tensor-parallel ranks 0 to 3 on node2 node3, in order"
    assert engine in capsys.readouterr().out.splitlines()


def test_prints_what_megatron_core_is_given(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# megatron: torch layers, no fused kernels on the CPU" in lines
    fields = "trainer.megatron={ddp: {overlap_grad_reduce: true}, model: {fp8: hybrid, fp8_recipe: tensorwise}}"
    job = ["--nodes", "1", "--gpus-per-node", "1"]
    assert main(["check", recipe, *job, "--set", fields]) == 0
    lines = capsys.readouterr().out.splitlines()
    rule = "4 x the largest of the last 32 steps, from 1e-05 to 0.01; 0.01 in the first 8 steps"
    assert f"# limits.logprob_kl: {rule} (6.3e-08 to 9.6e-06 in bfloat16 in the demo)" in lines
    start = lines.index("# megatron: Transformer Engine layers")
    printed = " ".join(line.removeprefix("#") for line in lines[start + 1 :])
    for field in (
        "apply_rope_fusion=true",
        "gradient_accumulation_fusion=true",
        "fp8=hybrid",
        "overlap_grad_reduce=true",
        "grad_reduce_in_fp32=true",
        "use_distributed_optimizer=true",
    ):
        assert field in printed
    assert main(["check", recipe, "--set", fields]) == 2
    assert "trainer.megatron.model.fp8: hybrid needs CUDA and Transformer Engine" in capsys.readouterr().err
