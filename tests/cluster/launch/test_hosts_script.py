"""Tests of `launch/torchrun/hosts.sh`: the commands it runs on each node, and how it ends."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.launched import run_program
from tests.end_to_end.tiny_world import write_sft
from tests.time_limits import HANG_SECONDS, wait_until

SCRIPT = Path(__file__).parents[3] / "launch/torchrun/hosts.sh"

FAKE_SSH = """\
#!/bin/sh
host=$1; shift
exec env -i PATH=/usr/bin:/bin HOST="$host" sh -c "cd /; $*"
"""

FAKE_PROGRAM = """\
#!/bin/bash
printf '%s|' "${0##*/}" "$PWD" "$NCCL_DEBUG" "$@"; echo
echo "$MEGARL_LAUNCH_SECRET" >"$PWD/secret.$HOST"
trap 'echo terminated; exit 9' TERM
case " $* " in
*" fails-on-$HOST "*) until [ -e "$PWD/other-runs" ]; do sleep 0.05; done; exit 3 ;;
*" stays "*) echo running; touch "$PWD/other-runs"; while :; do sleep 0.05; done ;;
esac
"""


class Script:
    """The script with nodes n1 and n2, both on this machine, and with programs that print their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("ssh", FAKE_SSH), ("bin/megarl", FAKE_PROGRAM), ("bin/torchrun", FAKE_PROGRAM)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "hosts").write_text("# two nodes\nuser@n1  slots=4\n\n  n2 10.0.0.2 # the other\n")
        without = {name: value for name, value in os.environ.items() if name != "MEGARL_LAUNCH_SECRET"}
        self.environment = without | {"SSH": str(folder / "ssh"), "VENV": str(folder), "MEGARL_ROOT": str(folder)}

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start the script as the leader of a process group, as from a terminal."""
        with (self.folder / "output").open("w") as output:
            return subprocess.Popen(
                [SCRIPT, self.folder / "hosts", *arguments],
                env=self.environment | variables,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                # a shell's background jobs ignore Ctrl-C, and so would their children
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output_lines(self) -> list[str]:
        """Lines of output, sorted by node."""
        return sorted((self.folder / "output").read_text().splitlines(), key=lambda line: line.partition(":")[0][-2:])

    def wait_until_running(self) -> None:
        """Wait until both nodes run their command."""
        assert wait_until(lambda: sum(line.endswith(": running") for line in self.output_lines) == 2)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_each_node_gets_its_rank_and_the_address_of_the_first(script):
    awkward = "a 'b' $HOME \\ \"c\" ; *"
    assert script.start("train", awkward, NCCL_DEBUG="x 'y'").wait(HANG_SECONDS) == 0
    common = f"{script.folder}|x 'y'|launch|--nodes|2|--node-rank"
    assert script.output_lines == [
        f"user@n1: megarl|{common}|0|--head|n1|train|{awkward}|",
        f"n2: megarl|{common}|1|--head|n1|train|{awkward}|",
    ]
    (script.folder / "hosts").write_text("n1 10.0.0.1\n")
    script.start("launch", "--node-timeout", "5", "sft", "x").wait(HANG_SECONDS)
    (line,) = script.output_lines
    assert line.endswith("|--nodes|1|--node-rank|0|--head|10.0.0.1|--node-timeout|5|sft|x|")


def read_secrets(script: Script) -> set[str]:
    files = list(script.folder.glob("secret.*"))
    assert len(files) == 2
    return {file.read_text().strip() for file in files}


def test_each_run_has_a_new_secret_that_all_nodes_know_and_nobody_can_see(script):
    secrets = set()
    for _ in range(2):
        run = script.start("train", "stays")
        script.wait_until_running()
        command_lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        run.terminate()
        stderr = run.communicate(timeout=HANG_SECONDS)[1]
        (secret,) = read_secrets(script)
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert secret not in "".join([*command_lines, *script.output_lines, stderr])
        secrets.add(secret)
    assert len(secrets) == 2


def test_secret_of_the_user_is_passed_on_but_not_on_a_command_line(script):
    assert script.start("train", "x", MEGARL_LAUNCH_SECRET="my $secret 'x'").wait(HANG_SECONDS) == 0
    assert read_secrets(script) == {"my $secret 'x'"}
    run = script.start("train", "x", EXPORT="NCCL_DEBUG MEGARL_LAUNCH_SECRET", MEGARL_LAUNCH_SECRET="s" * 16)
    assert run.communicate(timeout=HANG_SECONDS)[1].startswith("error: EXPORT must not list MEGARL_LAUNCH_SECRET")
    assert run.returncode == 2


@pytest.mark.parametrize("command", ["sft", "rm", "dpo", "score", "benchmarks.reshard"])
def test_commands_without_engines_run_under_torchrun(command, script):
    assert script.start(command, "x", PROCS_PER_NODE="8", RDZV_PORT="1234").wait(HANG_SECONDS) == 0
    first, second = (line.split("|") for line in script.output_lines)
    assert {"--nnodes", "2", "--nproc-per-node", "8", "n1:1234", "is_host=1"} < set(first)
    assert {"--nnodes", "2", "--nproc-per-node", "8", "n1:1234", "is_host=0"} < set(second)
    assert [words[words.index("--local-addr") + 1] for words in (first, second)] == ["n1", "10.0.0.2"]
    assert first[first.index("--rdzv-id") + 1] == second[second.index("--rdzv-id") + 1]
    module = ["-m", command] if "." in command else ["-m", "megarl", command]
    assert first[-len(module) - 2 :] == [*module, "x", ""]


def test_all_nodes_stop_if_one_fails(script):
    run = script.start("train", "fails-on-n2", "stays")
    assert run.wait(HANG_SECONDS) == 3
    assert run.communicate()[1] == "error: n2 exited with code 3; stopping all nodes\n"
    assert "user@n1: terminated" in script.output_lines


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_all_nodes_stop_with_the_script(number, code, script):
    run = script.start("train", "stays")
    script.wait_until_running()
    (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
    assert run.wait(HANG_SECONDS) == code
    assert wait_until(lambda: {"user@n1: terminated", "n2: terminated"} <= set(script.output_lines)), (
        script.output_lines
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "the script needs a host file and a command"),
        (("{folder}/none", "train", "x"), "HOSTFILE needs a file, got {folder}/none"),
        (("{folder}/empty", "train", "x"), "HOSTFILE needs one node per line, got none in {folder}/empty"),
        (("{folder}/hosts", "trian", "x"), "the command needs to be train, eval, launch, .*, got trian"),
    ],
)
def test_invalid_arguments_give_a_one_line_error(arguments, message, script):
    (script.folder / "empty").write_text("# n1\n")
    words = (argument.replace("{folder}", str(script.folder)) for argument in arguments)
    done = run_program(SCRIPT, *words, env=script.environment)
    assert done.returncode == 2
    assert re.match("error: " + message.replace("{folder}", str(script.folder)), done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_sft_on_two_hosts(hosts, world, tmp_path):
    (tmp_path / "hosts").write_text("".join(f"{host.name} {host.address}\n" for host in hosts))
    config = write_sft(world, tmp_path)
    ssh = hosts.ssh(tmp_path)
    environment = os.environ | {"SSH": str(ssh), "PROCS_PER_NODE": "1"}
    done = run_program(SCRIPT, tmp_path / "hosts", "sft", config, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a: step 3/3" in done.stdout
    for host in hosts:
        host.assert_nothing_runs()
