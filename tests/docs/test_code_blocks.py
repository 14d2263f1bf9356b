"""Code blocks, inline code and links of the pages are right, and the checks find those that are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT, find_problems, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_problems(page: Path) -> None:
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
def test_problems_are_found(text: str, message: str | None, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# Title\n\n{text}\n")
    found = find_problems([file], tmp_path)
    assert len(found) == (message is not None), found
    assert message is None or message in found[0]
    assert all(re.match(r"page\.md:[35]: ", line) for line in found)  # a block's first line, or that of a table's row
