"""`megarl launch`: parsing of its options and of the command."""

import sys

import pytest

from megarl.cli import launch as launch_command
from megarl.cli.main import main


@pytest.fixture
def launched(monkeypatch):
    """Arguments of the calls of `launch`, outside of Slurm and torchrun."""
    calls = []

    def launch(world, options, command, *, notify):
        calls.append((world, options, command))
        return 75

    monkeypatch.setattr(launch_command, "launch", launch)
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_ON_NODE", "TORCHELASTIC_RUN_ID", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGARL_LAUNCH_SECRET", "the secret of this test")
    return calls


def test_options_after_the_command_are_passed_to_it(launched):
    words = ["--nodes", "2", "--node-rank", "1", "--head", "a:1234", "--labels", "gpu=h100,rack=3", "--labels", "x=y"]
    words += ["--gpus", "8", "--node-timeout", "5", "train", "run.yaml", "--set", "a.b=c", "--head", "d"]
    assert main(["launch", *words]) == 75
    ((world, options, command),) = launched
    assert (world.rank, world.size, world.head_hosts, world.ports) == (1, 2, ("a",), (1234,))
    assert options.labels == {"gpu": "h100", "rack": "3", "x": "y"}
    assert (options.gpus, options.node_timeout, options.join_timeout) == (8, 5.0, 60.0)
    assert command == [sys.executable, "-m", "megarl", "train", "run.yaml", "--set", "a.b=c", "--head", "d"]


@pytest.mark.parametrize(("slurm", "words", "cpus"), [(None, [], 3), ("12", [], 12), ("12", ["--cpus", "5"], 5)])
def test_number_of_cpus_comes_from_the_option_or_slurm_or_the_machine(launched, monkeypatch, slurm, words, cpus):
    if slurm is not None:
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", slurm)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert main(["launch", "--nodes", "1", *words, "doctor"]) == 75
    assert launched[0][1].cpus == cpus


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "41001",
}


@pytest.mark.parametrize(
    ("environment", "flags"), [({}, ["--nodes", "2", "--node-rank", "0", "--head", "a"]), (TORCHRUN, [])]
)
def test_several_nodes_without_a_secret_are_refused(launched, monkeypatch, refusal, environment, flags):
    monkeypatch.delenv("MEGARL_LAUNCH_SECRET")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused = refusal("launch", *flags, "doctor")
    assert refused.startswith("error: launch needs a secret in MEGARL_LAUNCH_SECRET, the same on all 2")
    assert not launched
    assert main(["launch", "--insecure", *flags, "doctor"]) == 75
    assert launched[0][0].secret == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "1"], "launch needs a command, one of train, sft, "),
        (["--nodes", "1", "launch", "train"], "got launch train"),
        (["--nodes", "1", "--join-timeout", "0", "doctor"], "--join-timeout needs a number above 0, got 0"),
        (["--nodes", "1", "--labels", "gpu", "doctor"], "--labels needs KEY=VALUE"),
        (["doctor"], "launch needs to know the nodes: start it with `srun"),
    ],
)
def test_invalid_arguments_are_rejected(launched, refusal, words, message):
    assert message in refusal("launch", *words)
    assert not launched
