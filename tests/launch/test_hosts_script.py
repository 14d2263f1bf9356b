"""`launch/torchrun/hosts.sh`: what it runs where, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.launched import wait_until
from tests.end_to_end.tiny_world import write_sft
from tests.launch.conftest import MakeHosts
from tests.launch.hosts import Hosts

SCRIPT = Path(__file__).parents[2] / "launch/torchrun/hosts.sh"

HERE_IS_SSH = """\
#!/bin/sh
host=$1; shift
exec env -i PATH=/usr/bin:/bin HOST="$host" sh -c "cd /; $*"
"""

PROGRAM = """\
#!/bin/bash
printf '%s|' "${0##*/}" "$PWD" "$NCCL_DEBUG" "$@"; echo
trap 'echo told; exit 9' TERM
case " $* " in
*" fails-on-$HOST "*) sleep 0.5; exit 3 ;;
*" stays "*) echo stays; while :; do sleep 0.05; done ;;
esac
"""


class Script:
    """The script with machines n1 and n2, both of which are this one, and with programs that say what they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("ssh", HERE_IS_SSH), ("bin/megarl", PROGRAM), ("bin/torchrun", PROGRAM)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "hosts").write_text("# two machines\nuser@n1  slots=4\n\n  n2 10.0.0.2 # the other\n")
        self.environment = os.environ | {"SSH": str(folder / "ssh"), "VENV": str(folder), "MEGARL_ROOT": str(folder)}

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Its lines arrive as they are written; it leads a process group, as from a terminal."""
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(
                [SCRIPT, self.folder / "hosts", *arguments],
                env=self.environment | variables,
                stdout=said,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                # a shell's background jobs ignore Ctrl-C, and so would their children
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def said(self) -> list[str]:
        """In the order of machines."""
        return sorted((self.folder / "said").read_text().splitlines(), key=lambda line: line.partition(":")[0][-2:])


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_each_machine_is_told_its_rank_and_where_the_first_is(script: Script) -> None:
    awkward = "a 'b' $HOME \\ \"c\" ; *"
    assert script.start("train", awkward, NCCL_DEBUG="x 'y'").wait(10) == 0
    common = f"{script.folder}|x 'y'|launch|--nodes|2|--node-rank"
    assert script.said == [
        f"user@n1: megarl|{common}|0|--head|n1|train|{awkward}|",
        f"n2: megarl|{common}|1|--head|n1|train|{awkward}|",
    ]
    (script.folder / "hosts").write_text("n1 10.0.0.1\n")
    script.start("launch", "--node-timeout", "5", "sft", "x").wait(10)
    (said,) = script.said
    assert said.endswith("|--nodes|1|--node-rank|0|--head|10.0.0.1|--node-timeout|5|sft|x|")


@pytest.mark.parametrize("command", ["sft", "rm", "dpo", "score", "benchmarks.reshard"])
def test_stages_without_engines_are_torchruns(command: str, script: Script) -> None:
    assert script.start(command, "x", PROCS_PER_NODE="8", RDZV_PORT="1234").wait(10) == 0
    first, second = (line.split("|") for line in script.said)
    assert {"--nnodes", "2", "--nproc-per-node", "8", "n1:1234", "is_host=1"} < set(first)
    assert {"--nnodes", "2", "--nproc-per-node", "8", "n1:1234", "is_host=0"} < set(second)
    assert [words[words.index("--local-addr") + 1] for words in (first, second)] == ["n1", "10.0.0.2"]
    assert first[first.index("--rdzv-id") + 1] == second[second.index("--rdzv-id") + 1]
    module = ["-m", command] if "." in command else ["-m", "megarl", command]
    assert first[-len(module) - 2 :] == [*module, "x", ""]


def test_where_one_fails_all_end(script: Script) -> None:
    run = script.start("train", "fails-on-n2", "stays")
    assert run.wait(10) == 3
    assert run.communicate()[1] == "error: n2 has ended with code 3; so do all\n"
    assert "user@n1: told" in script.said


@pytest.mark.parametrize(("how", "code"), [("Ctrl-C", 130), ("terminated", 143), ("killed", -9)])
def test_all_end_with_the_script(how: str, code: int, script: Script) -> None:
    run = script.start("train", "stays")
    assert wait_until(lambda: sum(line.endswith(": stays") for line in script.said) == 2, 10)
    match how:
        case "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)
        case "terminated":
            run.terminate()
        case "killed":
            run.kill()
    assert run.wait(10) == code
    assert wait_until(lambda: {"user@n1: told", "n2: told"} <= set(script.said), 10), script.said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the script needs a host file and a command"),
        (("train",), "the script needs a host file and a command"),
        (("{folder}/none", "train", "x"), "HOSTFILE needs a file, got {folder}/none"),
        (("{folder}/empty", "train", "x"), "HOSTFILE needs a machine a line, got none in {folder}/empty"),
        (("{folder}/hosts", "trian", "x"), "the command needs to be train, eval, launch, .*, got trian"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], message: str, script: Script) -> None:
    (script.folder / "empty").write_text("# n1\n")
    command = [str(SCRIPT), *(argument.replace("{folder}", str(script.folder)) for argument in arguments)]
    done = subprocess.run(command, env=script.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.match("error: " + message.replace("{folder}", str(script.folder)), done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_it_fine_tunes_on_hosts_of_their_own(make_hosts: MakeHosts, world: Path, tmp_path: Path) -> None:
    hosts: Hosts = make_hosts()
    (tmp_path / "hosts").write_text("".join(f"{host.name} {host.address}\n" for host in hosts))
    config = write_sft(world, tmp_path)
    ssh = hosts.ssh(tmp_path)
    done = subprocess.run(
        [SCRIPT, tmp_path / "hosts", "sft", config],
        env=os.environ | {"SSH": str(ssh), "PROCS_PER_NODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a: step 3/3" in done.stdout
    for host in hosts:
        host.assert_nothing_runs(5)
