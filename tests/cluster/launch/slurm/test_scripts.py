"""Tests of the commands that the job scripts run, with stand-ins for Slurm's programs, and of their errors."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.launch.slurm.cluster import ROOT
from tests.cluster.launch.slurm.job import SCRIPTS
from tests.end_to_end.launched import run_program

FAKE_PROGRAM = """\
#!/usr/bin/env bash
[[ $* == --help ]] && { echo "$SRUN_HELP"; exit 0; }
printf '%s\\n' "${0##*/} $*" >> "$CALLS"
[[ $* == *"show node"* ]] && echo "NodeName=a1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=a1"
[[ $0 == */srun ]] && exit "$SRUN_CODE"
exit 0
"""

CONFIG = "yaml/demo.yaml"
PYXIS = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"


class Done(NamedTuple):
    code: int
    stderr: str
    calls: list[str]
    """Command lines in the order in which they were started."""


@pytest.fixture
def run(tmp_path: Path):
    """Function that runs a script of launch/slurm as Slurm would: in a job of two nodes, in the checkout."""
    venv = tmp_path / "venv/bin"
    programs = tmp_path / "programs"
    for folder, names in ((venv, ("megarl", "torchrun")), (programs, ("srun", "scontrol"))):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(FAKE_PROGRAM)
            (folder / name).chmod(0o755)
    job = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SRUN_HELP": PYXIS,
        "SRUN_CODE": "0",
        "VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURMD_NODENAME": "a1",
    }

    def run(script: str, *arguments: str, **changes: str) -> Done:
        done = run_program("bash", SCRIPTS / script, *arguments, env=job | changes, cwd=tmp_path)
        calls = tmp_path / "calls"
        return Done(done.returncode, done.stderr, calls.read_text().splitlines() if calls.exists() else [])

    return run


def test_train_runs_one_launcher_on_each_node(run, tmp_path):
    done = run("train.sbatch", CONFIG, "--set", "trainer.steps=1", COMMAND="rm", JOIN_TIMEOUT="9", NODE_TIMEOUT="8")
    assert done.code == 0
    assert done.calls == [
        "srun --wait=60 --nodes=2 --ntasks=2 --ntasks-per-node=1 "
        f"{tmp_path}/venv/bin/megarl launch --join-timeout 9 --node-timeout 8 rm {CONFIG} --set trainer.steps=1"
    ]
    heterogeneous = run("train.sbatch", CONFIG, SLURM_HET_SIZE="3").calls[-1]
    assert heterogeneous.startswith("srun --wait=60 --het-group=0-2 --ntasks-per-node=1 ")


@pytest.mark.parametrize(
    ("script", "arguments", "module"),
    [
        ("sft.sbatch", (CONFIG, "--set", "a=b"), f"megarl sft {CONFIG} --set a=b --resume auto"),
        ("rm.sbatch", (CONFIG, "--resume", "20"), f"megarl rm {CONFIG} --resume 20"),
        ("bench_reshard.sbatch", ("--model", "m"), "benchmarks.reshard --nodes 2 --model m"),
    ],
)
def test_torchrun_on_each_node(run, tmp_path, script, arguments, module):
    done = run(script, *arguments, SLURM_RESTART_COUNT="1")
    assert done.code == 0
    assert done.calls == [
        "scontrol --oneliner show node a1",
        "srun --wait=60 --nodes=2 --ntasks=2 --ntasks-per-node=1 "
        """bash -c exec "$0" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@" """
        f"{tmp_path}/venv/bin/torchrun --nnodes 2 "
        "--nproc-per-node auto --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:24711 --rdzv-id 4711.1 "
        f"--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 -m {module}",
    ]


@pytest.mark.parametrize(
    ("script", "changes", "resumes"),
    [
        ("train.sbatch", {"SLURM_RESTART_COUNT": "1"}, True),
        ("train.sbatch", {"SLURM_RESTART_COUNT": "1", "COMMAND": "dpo"}, True),
        ("train.sbatch", {"SLURM_RESTART_COUNT": "1", "COMMAND": "eval"}, False),
        ("train.sbatch", {"SLURM_RESTART_COUNT": "0"}, False),
        ("train.sbatch", {}, False),
        ("rm.sbatch", {}, False),
    ],
)
def test_requeued_job_resumes(run, script, changes, resumes):
    assert run(script, CONFIG, **changes).calls[-1].endswith(f" {CONFIG} --resume auto") == resumes


@pytest.mark.parametrize(("script", "program"), [("train.sbatch", "megarl"), ("sft.sbatch", "torchrun")])
def test_container_uses_the_programs_of_the_image(run, script, program):
    done = run(script, CONFIG, VENV="", CONTAINER_IMAGE="site#megarl:1", CONTAINER_MOUNTS="/data:/data")
    assert done.code == 0
    assert (
        f" --container-image=site#megarl:1 --container-workdir={ROOT} --container-mounts={ROOT}:{ROOT},/data:/data "
        in done.calls[-1]
    )
    assert f" {program} " in done.calls[-1]
    assert "venv" not in done.calls[-1]


@pytest.mark.parametrize(
    ("code", "requeue", "requeued"), [("75", "1", True), ("75", "0", False), ("1", "1", False), ("0", "1", False)]
)
def test_only_a_run_that_stopped_early_is_requeued(run, code, requeue, requeued):
    done = run("train.sbatch", CONFIG, SRUN_CODE=code, REQUEUE=requeue)
    assert done.code == int(code)
    assert done.calls[1:] == (["scontrol requeue 4711"] if requeued else [])


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ("train.sbatch", {"SLURM_JOB_ID": ""}, "the script needs a Slurm job: start it with sbatch"),
        ("rm.sbatch", {"MEGARL_ROOT": "/"}, "MEGARL_ROOT needs a checkout of megarl, got / (submit from the "),
        ("train.sbatch", {"VENV": "/nowhere"}, "VENV needs an environment with megarl, got /nowhere without bin/meg"),
        ("sft.sbatch", {"CONTAINER_IMAGE": "i"}, "CONTAINER_IMAGE needs VENV to be empty, got VENV=/"),
        ("sft.sbatch", {"CONTAINER_MOUNTS": "/a:/a"}, "CONTAINER_MOUNTS needs CONTAINER_IMAGE, got none"),
        ("train.sbatch", {"VENV": "", "CONTAINER_IMAGE": "i", "SRUN_HELP": ""}, "CONTAINER_IMAGE needs Pyxis: this "),
        ("train.sbatch", {"COMMAND": "check"}, "COMMAND needs to be train, sft, rm, dpo or eval, got 'check'"),
        ("train.sbatch", {"REQUEUE": "yes"}, "REQUEUE needs 0 or 1, got 'yes'"),
        ("train.sbatch", {"JOIN_TIMEOUT": "1m"}, "JOIN_TIMEOUT needs a whole number above 0, got '1m'"),
        ("train.sbatch", {"NODE_TIMEOUT": "0"}, "NODE_TIMEOUT needs a whole number above 0, got '0'"),
        ("rm.sbatch", {"PROCS_PER_NODE": "all"}, "PROCS_PER_NODE needs auto or a whole number above 0, got 'all'"),
        ("sft.sbatch", {"RDZV_PORT": "-1"}, "RDZV_PORT needs a whole number above 0, got '-1'"),
        ("bench_reshard.sbatch", {"SLURM_HET_SIZE": "2"}, "torchrun needs identical nodes, got a heterogeneous "),
    ],
)
def test_invalid_knob_gives_a_one_line_error(run, script, changes, message):
    done = run(script, CONFIG, **changes)
    assert (done.code, done.calls) == (2, [])
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["train.sbatch", "sft.sbatch", "rm.sbatch"])
def test_script_without_configuration_fails(run, script):
    assert run(script).stderr.startswith("error: the script needs a configuration: sbatch launch/slurm/")
    assert run(script, "no.yaml") == (
        2,
        f"error: CONFIG needs the path of a file, relative to {ROOT} or absolute, got no.yaml\n",
        [],
    )
