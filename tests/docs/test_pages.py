"""What the pages say is true: code blocks and links, tables against types and modules, excerpts as printed."""

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import megarl
from megarl import algorithms, errors
from megarl.algorithms.registry import BUILT_IN, find_algorithm
from megarl.checkpoint.run_lock import LOCK_TIMEOUT_SECONDS
from megarl.cli.main import INTERRUPTED, SUMMARIES
from megarl.config import RunConfig, load_config
from megarl.config.algorithm_presets import PRESETS
from megarl.config.load import make_config
from megarl.config.placement import AUXILIARY_ROLES
from megarl.config.policy import KlConfig
from megarl.config.reward import RewardConfig
from megarl.controller.preflight.run_checks import check_run
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.reward.python_function import load_reward
from megarl.rollout.agents.episode import Episode
from tests.algorithms.scripted_run import run_script
from tests.docs.code_blocks import ROOT, blocks, find_problems, pages
from tests.end_to_end.tiny_world import SIZES
from tests.maintenance.tree_measures import tracked_files
from tests.required_tools import skip_or_fail


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_problems(page):
    assert find_problems([page]) == []


BAD_BLOCKS = [
    ("", "make demo", "got none"),
    ("bash", "ls\nif true; then\n  ls", "not valid bash: "),
    ("bash", "ls\nmegarl trane my.yaml", "megarl trane: argument COMMAND: invalid choice: 'trane'"),
    ("bash", "ls && megarl train \\\n  --fast", "the following arguments are required: CONFIG"),
    ("bash", "megarl train yaml/missing.yaml", "there is no yaml/missing.yaml"),
    ("bash", "megarl train yaml/demo.yaml --set trainer.stepz=2", "yaml/demo.yaml: trainer.stepz: unknown key"),
    ("bash", "sbatch --nodes 4 launch/slurm/train.sbatch my.yaml --set a=1", "a: unknown key"),
    ("bash", 'make test ARG="-k loss"', "the Makefile has no ARG"),
    ("bash", "cat > my.yaml <<'EOF'\ntrainer:\n  stepz: 1\nEOF", "trainer.stepz: unknown key"),
    ("yaml", "algorithm: {type: my_algorithm:SoftClip, softnes: 1}", "algorithm.softnes: unknown key"),
    ("yaml", "run_dir: r\nmodel: {path: m}\ndata: {path: d}\nrollout: {tp: 2}", "rollout needs tp * replicas"),
    ("python", "x = 1\ndef f(:", "not valid Python"),
    ("python", "import os\nfrom megarl.algorithms import Algoritm", "cannot import name 'Algoritm'"),
]
GOOD_BLOCKS = [
    ("bash", "megarl train my.yaml --resume auto > log.txt 2>&1 &  # a 'comment'\nkill $!"),
    ("bash", 'megarl train my.yaml --set "reward.terms={a: {type: numeric}}" \\\n  reward.terms.a.weight=2'),
    ("yaml", "algorithm: {type: my_package.missing:Algorithm, key: 1}"),
    ("python", "import torch, missing\nfrom megarl.algorithms import Algorithm"),
]
TEXTS = [
    ("`megarl trane CONFIG`", "megarl has no command trane"),
    ("| a |\n| --- |\n| `trainer.optimizer.lrr` |", "no configuration has the key trainer.optimizer.lrr"),
    ("| verl | megarl |\n| --- | --- |\n| `trainer.lrr` | `rollout.tpp` |", "no configuration has the key rollout.tpp"),
    ("`rollout.agent: {path: a:b}` `reward.terms.NAME.weight` `model.safetensors` `os.path`", None),
    ("    make demo", "only indented"),
    ("[text](missing.md#part)", "a link leads to missing.md"),
    ("[text](page.md#part) <https://example.org> [here](#part)", None),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"```{language}\n{text}\n```", message) for language, text, message in BAD_BLOCKS),
        *((f"```{language}\n{text}\n```", None) for language, text in GOOD_BLOCKS),
        *TEXTS,
    ],
)
def test_problems_are_found(text, message, tmp_path):
    file = tmp_path / "page.md"
    file.write_text(f"# Title\n\n{text}\n")
    found = find_problems([file], tmp_path)
    assert len(found) == (message is not None), found
    assert message is None or message in found[0]
    assert all(re.match(r"page\.md:[35]: ", line) for line in found)  # a block's first line, or that of a table's row


@cache
def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


def section(text: str, title: str) -> str:
    """Return the text below the heading `title`, up to the next heading of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found is not None, f"there is no section {title}"
    return re.split(rf"^#{{1,{len(found[1])}}} ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the first table of a text, row by row, without its header."""
    (table, *_) = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    lines = table.splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def column(name: str, title: str, index: int = 0) -> list[str]:
    """Return the cells of a column of the first table of a section, without backquotes."""
    return [row[index].strip("`") for row in rows(section(page(name), title))]


KINDS = {algorithm.Config.model_fields["type"].default: algorithm.Config for algorithm in BUILT_IN}
ALGORITHMS = page("algorithms")


def test_every_algorithm_has_a_row_and_a_command():
    commands = blocks(section(ALGORITHMS, "Run each of them on the demo"), "bash")
    overrides = [re.findall(r"'([^']+)'", line) for block in commands for line in block.splitlines()]
    run = [load_config(RunConfig, ROOT / "yaml/demo.yaml", each).algorithm.type for each in overrides if each]
    assert run == column("algorithms", "Built-in algorithms")
    assert sorted(run) == sorted(KINDS)


def shown(value: Any) -> str:
    if isinstance(value, KlConfig):
        return f"{value.kind}, {value.coefficient:g}"
    return "null" if value is None else str(value)


@pytest.mark.parametrize("row", rows(section(ALGORITHMS, "Defaults and presets")), ids=lambda row: row[0].strip("`"))
def test_defaults_and_presets_are_those_of_the_algorithm(row):
    kind, fields = row[0].strip("`"), KINDS[row[0].strip("`")].model_fields
    names = ("aggregation", "clip_ratio_low", "clip_ratio_high", "kl_loss", "kl_reward")
    assert [cell.strip("`") for cell in row[1:6]] == [
        shown(fields[name].default) if name in fields else "-" for name in names
    ]
    assert code(row[6]) == [name for of, name in PRESETS if of == kind]


def test_the_api_pages_list_all_that_algorithms_use():
    if find_spec("mkdocs") is None:
        skip_or_fail("the packages of requirements/docs.txt, which `make docs` installs, are missing")
    hook = runpy.run_path(str(ROOT / "docs/hooks/generated_pages.py"))
    assert {*hook["GUIDES"]} == {name for name in megarl.__all__ if name.islower()} | {"reshard"}
    listed = hook["RUN_METHODS"]
    assert [member for member in listed if not hasattr(algorithms.RLRun, member)] == []
    modules = [*ROOT.glob("megarl/algorithms/*.py"), *ROOT.glob("examples/custom-algorithm/*.py")]
    read = {name for module in modules for name in re.findall(r"\brun\.(\w+)", module.read_text())}
    called = {name for name in read if callable(getattr(algorithms.RLRun, name, None))}
    assert 15 < len(called) == len(called & set(listed))


def test_the_main_path_names_functions_that_exist():
    steps = rows(section(page("architecture"), "The main path: one step of `megarl train`"))
    assert len(steps) > 10
    for number, file, function, *_ in steps:
        source = (ROOT / "megarl" / file.strip("`")).read_text()
        for name in function.strip("`").split("."):
            assert re.search(rf"^ *(async def|def|class) {name}\b", source, re.MULTILINE), f"step {number}: no {name}"


def test_every_package_and_kernel_is_listed():
    modules = [module.relative_to(ROOT / "megarl") for module in (ROOT / "megarl").rglob("*.py")]
    found = {str(module.parent) for module in modules if module.name != "__init__.py" and "stubs" not in module.parts}
    found = found - {"."} | {"losses.py", "stages.py"}  # wings of one file
    assert sorted(name.rstrip("/") for name in column("architecture", "Packages")) == sorted(found)
    kernels = {f"`{module.name}`" for module in (ROOT / "kernels/megarl_kernels").glob("[!_]*.py")}
    assert [name for name in kernels if name not in section(page("architecture"), "Kernels")] == []


def test_the_layers_are_those_that_import_linter_checks():
    contracts = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r'name = "imports point down".*?layers = \[(.*?)\]', contracts, re.DOTALL)
    (drawn,) = re.findall(r"`(cli > [^`]*)`", section(page("architecture"), "Packages"))
    assert [" ".join(layer.split()) for layer in drawn.split(">")] == re.findall(r'"([\w| ]+)"', block)


def test_fields_calls_and_roles_of_algorithms_are_those_of_the_code():
    fields = {name for config in KINDS.values() for name in config.model_fields}
    named = {
        word for span in code(section(ALGORITHMS, "Fields of every algorithm")) for word in re.findall(r"\w+", span)
    }
    assert fields - {"type", "preset"} <= named
    calls = [call for cell in column("algorithms", "What a run offers") for call in re.findall(r"\brun\.(\w+)", cell)]
    assert len(calls) > 10
    assert [call for call in calls if not hasattr(algorithms.RLRun, call)] == []
    roles = {cell.removeprefix("placement.") for cell in column("algorithms", "Auxiliary models", 3)}
    assert roles == set(AUXILIARY_ROLES)


def test_reward_types_and_members_of_an_episode_are_those_of_the_code():
    text = page("rewards-and-agents")
    union, _ = get_args(RewardConfig)
    kinds = {get_args(member)[1].tag for member in get_args(union)}
    listed = column("rewards-and-agents", "Rewards")
    assert set(listed) == kinds - {"environment"}  # on a page of its own
    assert [kind for kind in listed if not re.search(rf"^ +type: {kind}$", text, re.MULTILINE)] == []
    members = [span for row in rows(section(text, "Agents")) for span in code(row[0])]
    names = {found[1] for span in members if (found := re.match(r"(?:await )?(\w+)", span))}
    public = {name for name in vars(Episode) if not name.startswith("_")}
    attributes = set(re.findall(r"self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(Episode)))
    assert names <= public | attributes
    assert public - {"max_num_tokens"} <= names


@cache
def templates() -> tuple[str, ...]:
    """Return the strings and f-strings of all modules; a null character in place of what an f-string inserts."""
    files = (ROOT / "megarl").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    joined = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = [[part.value if isinstance(part, ast.Constant) else "\0" for part in values] for values in joined]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    plain = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return (*("".join(map(str, each)) for each in parts), *(value for value in plain if isinstance(value, str)))


@pytest.mark.parametrize("message", blocks(page("troubleshooting"), "text"), ids=lambda message: message[:50])
def test_a_quoted_message_is_in_the_code(message):
    pattern = re.compile(r"[\s\S]*".join(map(re.escape, re.split(r"<[A-Z]+>", message.strip()))))
    assert any(pattern.search(template) for template in templates()), message


def subclasses(kind: type[errors.MegarlError]) -> Iterator[type[errors.MegarlError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


def test_exit_codes_and_the_lock_timeout_are_those_of_the_code():
    text = page("troubleshooting")
    raised: dict[int, set[str]] = {0: set(), INTERRUPTED: set()}
    for each in subclasses(errors.MegarlError):
        if each.__module__ == errors.__name__:
            raised.setdefault(each.exit_code, set()).add(each.__name__)
    assert {int(row[0]): set(code(row[1])) for row in rows(section(text, "Exit codes"))} == raised
    assert set(re.findall(r"(\d+) seconds", section(text, "Checkpoints and locks"))) == {f"{LOCK_TIMEOUT_SECONDS:g}"}
    assert [title for title in re.findall(r"^### (.+)$", text, re.M) if "```text" not in section(text, title)] == []


def test_the_table_of_commands_is_complete():
    assert sorted(re.findall(r"`megarl (\w+)", " ".join(row[0] for row in rows(page("commands"))))) == sorted(SUMMARIES)


def test_no_tracked_file_names_a_folder_outside_the_checkout():
    try:
        files = [ROOT / name for name in tracked_files() if (ROOT / name).is_file()]
    except subprocess.CalledProcessError:
        pytest.skip("needs a git checkout")
    outside = re.compile(r"\.\./share[d]\b|/hom[e]/(?!any\b)\w+|/User[s]/\w+|/roo[t]/\w+")  # no match of itself
    assert len(files) > 500
    found = {str(file.relative_to(ROOT)): outside.findall(file.read_text()) for file in files}
    assert {name: paths for name, paths in found.items() if paths} == {}


README = (ROOT / "README.md").read_text()
MODULES = {text.split()[1]: text for text in blocks(README, "python")}
"""File name, which a Python block begins with as a comment -> the block."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The README's configuration with a local model, in a folder with the data and modules that it describes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    write_tiny_model(tmp_path / "model", ["1 + 2 = 3"], seed=0, **SIZES | {"context_length": 1024})
    (content,) = (yaml.safe_load(text) for text in blocks(README, "yaml") if text.startswith("# my.yaml\n"))
    (tmp_path / content["data"]["path"]).write_text(json.dumps({"prompt": "8 * 9", "answer": "72"}) + "\n")
    yield content | {"model": {"path": str(tmp_path / "model")}}
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_configuration_passes_the_checks_and_the_reward_scores(tree):
    assert check_run(make_config(RunConfig, tree)) == []
    (section,) = (yaml.safe_load(text) for text in blocks(README, "yaml") if text.startswith("reward:"))
    config = make_config(RunConfig, tree | section)
    assert check_run(config) == []
    reward = load_reward(config.reward.terms["mine"], key="reward.terms.mine")  # type: ignore[arg-type]
    row = {"answer": "72"}
    assert reward.function(None, "8 * 9 is 72.", row) == {"reward": 1.2, "correct": True}
    assert reward.function(None, "word " * 60 + "72", row) == {"reward": 1.0, "correct": True}
    assert reward.function(None, "", row) == {"reward": 0.2, "correct": False}


def test_the_algorithm_trains(tree, tmp_path):
    kind = "sign_grpo:SignGrpo"
    assert f'`algorithm: {{type: "{kind}"}}`' in README
    config = make_config(RunConfig, tree | {"algorithm": {"type": kind}})
    assert check_run(config) == []
    assert find_algorithm(config.algorithm.type).__name__ == "SignGrpo"
    rewards = [[0.0, 1.0, 5.0], [2.0, 2.0, 2.0]]
    run = run_script(tmp_path / "run", {"type": kind}, lambda label, number, sample: rewards[number][sample], steps=2)
    assert run.call_order == ["engines sample", "policy train", "weights push"] * 2
    (batch,) = run.arguments("policy", "train")[0].mini_batches
    assert [sample.scalars["advantages"] for sample in batch.samples] == [-1.0, -1.0, 1.0, 0.0, 0.0, 0.0]
