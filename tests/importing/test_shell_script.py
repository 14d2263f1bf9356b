"""Words of launch commands, compared with what bash itself passes to the command where nothing is unknown."""

import subprocess
from pathlib import Path

import pytest

from megarl.errors import ConfigError, DataError
from megarl.importing.shell_script import LaunchCommand, find_launch_command

SCRIPTS = {
    "quotes and continued lines": r"""
A="two words"
train.py one 'single $A' "double $A" mixed"$A"'x' back\ slash \
    "escaped \" \$ \\ quote" $'dollar'  # comment
""",
    "word splitting": """
OPTS="--lr 1e-6   --n 8"
train.py $OPTS "$OPTS" x$OPTS
""",
    "defaults": """
A=given
EMPTY=
train.py ${A:-x} ${B:-"y z"} "${B:-y z}" ${EMPTY:-e} "${EMPTY-unset}" ${C:=set} $C ${A:+alternative} ${D:+none} end
""",
    "arrays": """
ARGS=(--a 1 "b c")  # comment
ARGS+=(
  --d=$((2 * 3))
  # comment inside
  "--e"
)
train.py "${ARGS[@]}" ${ARGS[1]} "${ARGS[*]}" "pre ${ARGS[@]} post" ${#ARGS[@]} "${NONE[@]}" end
""",
    "arithmetic": """
N=8; M=3
train.py $((N * 4)) $(( (N + M) / 2 )) $((N % M)) $((-N / M)) $((${N} - 1)) "x$((N**2))"
""",
    "removed and replaced parts": """
P=/models/qwen/Qwen3-8B.tar.gz
train.py ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P//q/Q} ${P/models/m}
""",
    "separators, redirections and here-documents": """
cat <<END > /dev/null
train.py not this "one
END
X=1; Y=2 && Z=3
train.py $X$Y$Z 2> /dev/null | cat
""",
    "environment before the command": """
export A=1 B=2
C=3 train.py $A $B
""",
    "branches": """
if [ -z "$UNSET_HERE" ]; then A=1; fi
case x in
  x) B=2 ;;
esac
train.py $A $B
""",
    "arguments of the script": """
train.py a "$@" b $@ c ${1:-first} "${2:-second one}"
""",
    "append to text": """
A=x
A+=" y"
train.py $A "$A"
""",
}


def words(text: str, **variables: str) -> list[str]:
    return [word.text for word in found(text, **variables).words[1:]]


def found(text: str, **variables: str) -> LaunchCommand:
    command = find_launch_command(text, Path("run.sh"), lambda word: word == "train.py", variables=variables)
    return LaunchCommand(words=command.words[command.entry :], entry=0, notes=command.notes)


def run_by_bash(text: str, folder: Path) -> list[str]:
    """Return the arguments that bash passes to a program train.py, which prints one per line."""
    program = folder / "train.py"
    program.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > {folder}/arguments\n")
    program.chmod(0o755)
    subprocess.run(["bash", "-c", f"PATH={folder}:$PATH\n{text}"], cwd=folder, check=True, capture_output=True)
    return (folder / "arguments").read_text().splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_passes(name: str, tmp_path: Path):
    assert words(SCRIPTS[name]) == run_by_bash(SCRIPTS[name], tmp_path)


def test_nothing_is_executed(tmp_path):
    marker = tmp_path / "ran"
    text = f"A=$(touch {marker})\ntouch {marker}\nB=`touch {marker}`\ntrain.py $A $B\n"
    command = found(text)
    assert not marker.exists()
    assert [word.unknown for word in command.words[1:]] == [(f"$(touch {marker})",), (f"`touch {marker}`",)]


def test_unknown_values_are_named_as_they_are_written():
    command = found('train.py a=$1 "b=${OUTSIDE}/x" c=$(date +%F) d=$((OUTSIDE2 * 2)) e=known\n')
    unknown = {word.text: word.unknown for word in command.words[1:]}
    assert unknown == {
        "a=$1": ("$1",),
        "b=${OUTSIDE}/x": ("${OUTSIDE}",),
        "c=$(date +%F)": ("$(date +%F)",),
        "d=$((OUTSIDE2 * 2))": ("$((OUTSIDE2 * 2))",),
        "e=known": (),
    }
    assert words("train.py $OUTSIDE", OUTSIDE="/x") == ["/x"]


def test_words_have_the_line_on_which_they_are_written():
    command = found('ARGS=(\n  --a\n  --b\n)\n\ntrain.py \\\n  first \\\n  "${ARGS[@]}" last\n')
    assert [(word.text, word.line) for word in command.words[1:]] == [
        ("first", 7),
        ("--a", 2),
        ("--b", 3),
        ("last", 8),
    ]


def test_commands_within_words_are_read():
    assert words('srun bash -c "cd x && train.py --a 1"') == ["--a", "1"]
    assert words('CMD="train.py --a"\neval $CMD --b') == ["--a", "--b"]


def test_a_sourced_file_next_to_the_script_is_read(tmp_path):
    (tmp_path / "model.sh").write_text("MODEL=(--layers 4)\n")
    text = 'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$DIR/model.sh"\ntrain.py "${MODEL[@]}"\n'
    command = find_launch_command(text, tmp_path / "run.sh", lambda word: word == "train.py")
    assert [word.text for word in command.arguments] == ["--layers", "4"]
    missing = found("source ./none.sh\ntrain.py\n")
    assert missing.notes == ("run.sh:1: sources ./none.sh, which was not read",)


def test_of_several_launches_the_last_is_read_and_noted():
    command = found("train.py --first\ntrain.py --second\n")
    assert [word.text for word in command.words[1:]] == ["--second"]
    assert command.notes == ("run.sh starts the trainer on lines 1, 2: the command of line 2 was read",)


def test_arguments_after_a_missing_backslash_are_noted():
    assert "begins a command of its own" in found("train.py --a\n  --b 1\n").notes[0]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("\ntrain.py 'x", DataError, "run.sh:2: a single quote is not closed"),
        ('\n\ntrain.py "x', DataError, "run.sh:3: a double quote is not closed"),
        ("A=(x\n", DataError, "run.sh:1: the array has no closing parenthesis"),
        ("train.py ${x", DataError, "run.sh:1: ${ is not closed by }"),
        ("train.py `x", DataError, "run.sh:1: a backquote is not closed"),
        ("other.py", ConfigError, "run.sh: no command of the script starts the trainer"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_with_its_line(text, error, message):
    with pytest.raises(error) as refusal:
        found(text)
    assert str(refusal.value) == message
