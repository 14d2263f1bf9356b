"""`megarl check`: the resolved configuration, all problems at once, and plans for jobs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import RunConfig, load_config
from tests.cli.tiny_run import write_config, write_tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("check")


@pytest.fixture(scope="module")
def tree(folder: Path) -> dict[str, Any]:
    return write_tiny_run(folder)


@pytest.fixture
def recipe(folder: Path, tree: dict[str, Any]) -> str:
    return str(write_config(folder / "run.yaml", tree))


def test_prints_the_resolved_configuration(run, recipe, tmp_path):
    code, out, err = run("check", recipe, "--set", "seed=3", "trainer.steps=5", "--set", "seed=4")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "# ok: no problems found for megarl train"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(out)
    assert load_config(RunConfig, resolved) == load_config(RunConfig, recipe, ["seed=4", "trainer.steps=5"])
    assert yaml.safe_load(out)["trainer"]["optimizer"]["lr"] == 1e-6


def test_prints_the_values_of_a_preset(output, recipe):
    algorithm = "algorithm={type: dapo, preset: paper, overlong: {buffer: 64}}"
    printed = yaml.safe_load(output("check", recipe, "--set", algorithm))["algorithm"]
    assert (printed["clip_ratio_low"], printed["clip_ratio_high"], printed["kl_loss"]) == (0.2, 0.28, None)
    assert printed["overlong"] == {"max_length": 20480, "buffer": 64, "factor": 1.0}


def test_names_the_modules_that_it_executes(run, recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "executed_by_check.py").write_text("def score(trajectory, text, row): return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    terms = "reward.terms={mine: {type: python, path: executed_by_check:score}}"
    for problem, expected in (("seed=3", 0), ("data.path=none.jsonl", 2)):
        code, out, _ = run("check", recipe, "--set", terms, problem)
        assert code == expected
        first = "# imported executed_by_check for reward.terms.mine.path: executed_by_check:score"
        assert out.splitlines()[0] == first
        assert out.count("# imported ") == 1
    with pytest.raises(SystemExit):
        run("check", "--help")
    assert "which executes them" in " ".join(capsys.readouterr().out.split())


def test_reports_all_problems(run, recipe):
    code, out, err = run("check", recipe, "--set", "data.path=none.jsonl", "rollout.max_new_tokens=500")
    assert (code, out.count("\n")) == (2, 1)
    assert out.startswith("# model: ")
    assert err.startswith("error: ")
    assert "rollout.max_new_tokens: " in err
    assert "data.path: none.jsonl: no such data file" in err


def test_stage_sft(output, refusal, folder, tree, recipe):
    assert "rollout: unknown key" in refusal("check", recipe, "--stage", "sft")
    sft = write_config(folder / "sft.yaml", {key: value for key, value in tree.items() if key != "rollout"})
    assert output("check", sft, "--stage", "sft").endswith("megarl sft\n")


CHECK = """
import sys
from megarl.cli.main import main
code = main(["check", sys.argv[1]])
print([name for name in sys.argv[2:] if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("is_valid", "packages"), [(False, ["torch"]), (True, ["ray", "sglang", "megatron.core"])], ids=["invalid", "valid"]
)
def test_packages_that_take_long_to_import_are_not_needed(is_valid, packages, recipe, tmp_path):
    """Nothing large for a configuration that is refused, and neither Ray nor engines for another one."""
    if not is_valid:
        recipe = str(write_config(tmp_path / "run.yaml", {"run_dir": "x", "model": {"path": "m"}}))
    command = [sys.executable, "-c", CHECK, recipe, *packages]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == (0 if is_valid else 2)
    assert answer.stderr == ("" if is_valid else f"error: {recipe}: data: this key is required\n") + "[]\n"


POOL = [
    "placement={slots_per_node: 2, pools: {r: {nodes: 2}}, rollout: {pool: r}}",
    "placement.pools.r.labels={megarl.het-group: '1'}",
    "rollout.replicas=2",
]
JOBS = {  # overrides, options, and parts of the message
    "too few": (
        ["placement.slots_per_node=8", "placement.nodes=3"],
        ["--nodes", "2", "--gpus-per-node", "8"],
        ("placement: needs nodes * slots_per_node = 3 * 8 = 24 CPU slots on 3 nodes", "has 0 nodes with 8 CPU slots"),
    ),
    "too few for cuda": (
        ["placement.slots_per_node=8", "placement.device=cuda"],
        ["--nodes", "2", "--gpus-per-node", "4"],
        ("placement: needs nodes * slots_per_node = 1 * 8 = 8 GPUs on 1 node", "8 GPUs or more (node0:4 node1:4)"),
    ),
    "a component's": (
        POOL,
        ["--nodes", "1", "1", "--cpus-per-node", "8", "1"],
        ("placement.pools.r: needs nodes * slots_per_node = 2 * 1 = 2", "labeled megarl.het-group=1", "(node1:1)"),
    ),
    "a tensor group over nodes": (
        ["placement.nodes=2", "trainer.parallel.tp=2"],
        ["--nodes", "2", "--gpus-per-node", "8"],
        ("trainer.parallel tp needs to divide the slots of a node", "got placement slots_per_node % tp = 1 % 2 = 1"),
    ),
    "no nodes": (
        [],
        ["--gpus-per-node", "8"],
        ("--nodes needs --gpus-per-node or --cpus-per-node, and those need --nodes, got --gpus-per-node",),
    ),
    "components": (
        [],
        ["--nodes", "2", "1", "--gpus-per-node", "8"],
        ("--gpus-per-node: needs one number per value of --nodes, got 1 for 2",),
    ),
    "a time limit": (
        [],
        ["--nodes", "2", "--cpus-per-node", "8", "--time", "2h"],
        ("--time: needs minutes, minutes:seconds, hours:minutes:seconds, days-hours, ", "got '2h'"),
    ),
}


@pytest.mark.parametrize(("overrides", "job", "messages"), JOBS.values(), ids=JOBS)
def test_impossible_jobs_are_rejected(run, recipe, overrides, job, messages):
    code, out, err = run("check", recipe, *job, *(["--set", *overrides] if overrides else []))
    assert code == 2
    assert all(line.startswith("# model: ") for line in out.splitlines()), out
    assert all(message in err for message in messages), err


def test_a_valid_job_lists_the_nodes_of_each_pool(run, output, recipe):
    placement = "placement={nodes: 2, slots_per_node: 8, pools: {r: {slots_per_node: 4}}, rollout: {pool: r}}"
    job = ["--nodes", "3", "--gpus-per-node", "8", "--time", "1-12"]
    sizes = ["algorithm.prompts_per_step=16", "algorithm.group_size=2"]
    code, out, err = run("check", recipe, *job, "--set", placement, *sizes)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    start = lines.index("# pool main: 8 GPUs on each of node0 node1")
    assert lines[start + 1 : start + 3] == ["# pool r: 4 GPUs on each of node2", "# idle: 4 GPUs"]
    assert lines[-1] == "# ok: no problems found for megarl train"
    over_nodes = placement.replace("{slots_per_node: 4}", "{nodes: 2, slots_per_node: 2}")
    job = ["--nodes", "4", "--gpus-per-node", "8"]
    out = output("check", recipe, *job, "--set", over_nodes, *sizes, "rollout.tp=4")
    assert "# engine 0: tensor-parallel ranks 0 to 3 on node2 node3, in order" in out.splitlines()


def test_prints_what_megatron_core_is_given(output, refusal, recipe):
    lines = output("check", recipe).splitlines()
    assert "# megatron: torch layers, no fused kernels on the CPU" in lines
    fields = "trainer.megatron={ddp: {overlap_grad_reduce: true}, model: {fp8: hybrid, fp8_recipe: tensorwise}}"
    job = ["--nodes", "1", "--gpus-per-node", "1"]
    lines = output("check", recipe, *job, "--set", fields).splitlines()
    rule = "4 x the largest of the last 32 steps, from 1e-05 to 0.01; 0.01 in the first 8 steps"
    assert f"# limits.logprob_kl: {rule} (6.3e-08 to 9.6e-06 in bfloat16 in the demo)" in lines
    start = lines.index("# megatron: Transformer Engine layers")
    printed = " ".join(line.removeprefix("#") for line in lines[start + 1 :])
    given = "apply_rope_fusion gradient_accumulation_fusion overlap_grad_reduce grad_reduce_in_fp32"
    for field in (*given.split(), "use_distributed_optimizer"):
        assert f"{field}=true" in printed
    assert "fp8=hybrid" in printed
    refused = refusal("check", recipe, "--set", fields)
    assert "trainer.megatron.model.fp8: hybrid needs CUDA and Transformer Engine" in refused
