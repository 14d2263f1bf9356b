"""Code blocks and inline code of the pages are right, and the checks find those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.code_blocks import find_page_problems, find_problems, pages


def test_the_pages_have_no_problems() -> None:
    assert "\n".join(str(problem) for problem in find_problems(pages())) == ""


def block(language: str, text: str) -> str:
    return f"# Title\n\n```{language}\n{text}\n```\n"


@pytest.mark.parametrize(
    ("language", "text", "line", "message"),
    [
        ("", "make demo", 3, "a code block needs a language"),
        ("sh", "make demo", 3, "needs to be bash"),
        ("mermaid", "graph TD", 4, "needs to be a sequenceDiagram"),
        ("mermaid", "sequenceDiagram\nparticipant A as a\nA->>B: x", 6, "no participant B"),
        ("mermaid", "sequenceDiagram\nparticipant A as a\nA->>A: x; y", 6, "no line of a sequence diagram"),
        ("mermaid", "sequenceDiagram\nparticipant A as a\nloop twice\nA->>A: x", 8, "loop has no end"),
        ("bash", "ls\nif true; then\n  ls", 7, "not valid bash: syntax error: unexpected end of file"),
        ("bash", "ls\nmegarl trane my.yaml", 5, "megarl trane: argument COMMAND: invalid choice: 'trane'"),
        ("bash", "A=1 .venv/bin/megarl train my.yaml --resum auto --fast", 4, "unrecognized arguments: --fast"),
        ("bash", "ls && megarl train \\\n  --fast", 4, "the following arguments are required: CONFIG"),
        ("bash", "megarl train yaml/missing.yaml", 4, "there is no yaml/missing.yaml"),
        ("bash", "megarl train yaml/demo.yaml --set trainer.stepz=2", 4, "yaml/demo.yaml: trainer.stepz: unknown key"),
        ("bash", "megarl train my.yaml --set trainer.steps=0", 4, "trainer.steps: Input should be greater"),
        ("bash", "megarl sft my.yaml --set rollout.tp=2", 4, "rollout: unknown key"),
        ("bash", "megarl check my.yaml --stage sft --set trainer.batch_sice=2", 4, "trainer.batch_sice: unknown key"),
        ("bash", "megarl launch --nodes 2 train my.yaml --set seeed=1", 4, "seeed: unknown key"),
        ("bash", "megarl score --model m --input i --output o --set trainer.steps=1", 4, "trainer.steps: unknown key"),
        ("bash", "megarl checkpoint list runs/x", 4, "invalid choice: 'list'"),
        ("bash", "srun --ntasks 2 megarl launch --rank 1 train my.yaml", 4, "megarl launch:"),
        ("bash", "torchrun --nproc-per-node 2 -m megarl sft", 4, "the following arguments are required: CONFIG"),
        ("bash", "sbatch --nodes 4 launch/slurm/train.sbatch my.yaml --set a=1", 4, "a: unknown key"),
        ("bash", "launch/torchrun/hosts.sh HOSTFILE train my.yaml --set a=1", 4, "a: unknown key"),
        ("bash", "python -m benchmarks.missing", 4, "there is no module benchmarks.missing"),
        ("bash", "python -m benchmarks.reshard --modle synthetic:2", 4, "benchmarks.reshard: "),
        ("bash", "torchrun -m benchmarks.reshard --gen 2", 4, "benchmarks.reshard: "),
        ("bash", "make demo tset", 4, "the Makefile has no target tset"),
        ("bash", 'make test ARG="-k loss"', 4, "the Makefile has no variable ARG"),
        ("bash", "cp my.yaml x; PYTHONPATH=examples/missing ls", 4, "there is no examples/missing"),
        ("bash", "cat > my.yaml <<'EOF'\ntrainer:\n  stepz: 1\nEOF", 6, "trainer.stepz: unknown key"),
        ("yaml", "trainer: {steps: 1", 4, "not valid YAML"),
        ("yaml", "trainer:\n  steps: 1\n  optimizer:\n    lrr: 1", 7, "trainer.optimizer.lrr: unknown key"),
        ("yaml", "algorithm: {type: ppoo}", 4, "algorithm.type: needs one of"),
        ("yaml", "trainer: {}\nalgorithm:\n  type: grpo\n  critic: {}", 5, "grpo has no critic"),
        ("yaml", "algorithm: {type: my_algorithm:Missing}", 4, "algorithm.type"),
        ("yaml", "algorithm: {type: my_algorithm:SoftClip, softnes: 1}", 4, "algorithm.softnes: unknown key"),
        ("yaml", "rm:\n  x: 1", 5, "rm.x: unknown key"),
        ("yaml", "reward: {terms: {a: {type: python}}}", 4, "reward.terms.a.path: this key is required"),
        ("yaml", "run_dir: r\nmodel: {path: m}\ndata: {path: d}\nrollout: {tp: 2}", 4, "rollout needs tp * replicas"),
        ("yaml", "- a\n- b", 4, "needs keys of a configuration, got list"),
        ("python", "x = 1\ndef f(:", 5, "not valid Python"),
        ("python", "import os\nfrom megarl.algorithms import Algoritm", 5, "cannot import Algoritm from"),
        ("python", "from megarl.missing import x", 4, "cannot import x from megarl.missing"),
        ("python", "import megarl.missing", 4, "there is no module megarl.missing"),
        ("json", '{"a": 1,\n}', 4, "not valid JSON"),
        ("jsonl", '{"a": 1}\n{"a": }', 5, "not valid JSON"),
    ],
)  # fmt: skip
def test_a_bad_block_is_refused_with_its_line(language: str, text: str, line: int, message: str) -> None:
    ((found_line, found),) = find_page_problems(block(language, text))
    assert message in found
    assert abs(found_line - line) <= (language in ("json", "yaml") and "not valid" in message), found


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("text", "megarl trane"),
        ("bash", "megarl train my.yaml --resume auto > log.txt 2>&1 &  # a 'comment'\nkill $!"),
        ("bash", 'for n in 1 2; do\n  megarl launch --nodes "$N" --node-rank $n --head HOST train my.yaml\ndone'),
        ("bash", 'megarl train my.yaml --set "reward.terms={a: {type: numeric}}" \\\n  reward.terms.a.weight=2'),
        ("bash", "megarl --help; pip install megarl; git clone URL megarl"),
        ("bash", "cat > prompts.jsonl <<EOF\nmegarl trane\nEOF"),
        ("bash", 'make setup TORCH_INSTALL_ARGS="--index-url URL"'),
        ("yaml", "algorithm: {type: my_algorithm:SoftClip}"),
        ("yaml", "algorithm: {type: my_package.missing:Algorithm, key: 1}"),
        ("yaml", "placement: {slots_per_node: 8}\nrollout: {tp: 4, replicas: 2}"),
        ("yaml", "rollout: {tp: 4}"),
        ("yaml", "trainer: {batch_size: 4}"),
        ("yaml", "dpo: {beta: 0.1}"),
        ("yaml", "apiVersion: v1\nkind: Pod"),
        ("python", "import torch\nfrom megarl.megatron.losses import loss\nfrom megarl.algorithms import Algorithm"),
    ],
)
def test_a_good_block_is_accepted(language: str, text: str) -> None:
    assert find_page_problems(block(language, text)) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("megarl trane CONFIG", "megarl has no command trane"),
        ("make tset", "the Makefile has no target tset"),
        ("python -m benchmarks.missing", "there is no module benchmarks.missing"),
        ("yaml/missing.yaml", "there is no yaml/missing.yaml"),
        ("trainer.optimizer.lrr", "no configuration has the key trainer.optimizer.lrr"),
        ("rollout.agent: {path: a:b}", None),
        ("reward.terms.NAME.weight", None),
        ("trainer.parallel.tp=2", None),
        ("algorithm.critic.warmup_steps", None),
        ("model.safetensors", None),
        ("megarl train CONFIG", None),
        ("os.path", None),
    ],
)
def test_inline_code_is_checked(code: str, message: str | None) -> None:
    expected = [] if message is None else [(2, message)]
    assert find_page_problems(f"# Title\nUse `{code}`.\n") == expected


def test_an_indented_command_is_refused() -> None:
    ((line, message),) = find_page_problems("# Title\n\n    make demo\n")
    assert (line, "fenced block" in message) == (3, True)


def test_an_admonition_is_refused() -> None:
    ((line, message),) = find_page_problems("# Title\n\n!!! note\n    Text\n")
    assert (line, "use a quote" in message) == (3, True)


def test_a_problem_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(block("bash", "make tset"))
    (problem,) = find_problems([tmp_path / "page.md"], tmp_path)
    assert str(problem) == "page.md:4: the Makefile has no target tset"
