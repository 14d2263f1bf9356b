"""The tables of other trainers' keys in docs/coming-from.md, from the tables that `megarl import` reads.

`python -m tests.docs.peer_tables` writes them.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.importing.conversion import PEERS, import_run
from megarl.importing.tables import PeerTable, Row

PAGE = Path(__file__).parents[2] / "docs/coming-from.md"
MAX_KEYS = 9
"""Number of keys, or of groups of keys, that a row names at most."""

EXAMPLE = """\
python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=256 \\
    data.max_response_length=4096 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.top_p=0.95 trainer.total_training_steps=500 trainer.save_freq=50
"""


def begin(name: str) -> str:
    return f"<!-- {name}: written by python -m tests.docs.peer_tables -->\n"


def end(name: str) -> str:
    return f"<!-- end of {name} -->\n"


def generated() -> dict[str, str]:
    """Return the text between the marks of each name: trainers, and the example."""
    return {"example": example(), **{name: tables(peer.table) for name, peer in PEERS.items()}}


def example() -> str:
    """Return a script and what `megarl import` prints for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sh"
        path.write_text(EXAMPLE)
        conversion = import_run("verl", path, {})
    return f"```text\n{EXAMPLE}```\n\nbecomes, with `megarl import verl run.sh`:\n\n```yaml\n{conversion.yaml()}```\n"


def tables(table: PeerTable) -> str:
    """Return the tables of one trainer: its keys by topic, and those without an equivalent."""
    lines = [f"Read in {table.versions} of [{table.name}]({table.repository})."]
    if table.abbreviations:
        short = [f"`{name}` for `{prefix}`" for prefix, name in table.abbreviations.items()]
        lines += ["", f"The tables write {' and '.join(short)}."]
    for topic, rows in table.topics.items():
        mapped = [row for row in rows if row.kind == "mapped"]
        lines += ["", f"### {table.name}: {topic.lower()}", "", f"| {table.name} | megarl | note |", "|---|---|---|"]
        lines += [f"| {keys_of(row, table)} | {targets(row)} | {cell(row.note)} |" for row in mapped]
    for heading, kinds in (
        ("no equivalent", ("missing", "refused")),
        ("no equivalent needed", ("no_effect",)),
    ):
        lines += ["", f"### {table.name}: {heading}", "", f"| {table.name} | why |", "|---|---|"]
        for row in table.rows():
            if row.kind in kinds:
                why = f"refused: {row.note}" if row.kind == "refused" else row.note
                lines.append(f"| {keys_of(row, table)} | {cell(why)} |")
    return "\n".join(lines) + "\n"


def keys_of(row: Row, table: PeerTable) -> str:
    return listed([abbreviate(key, table) for key in row.keys])


def targets(row: Row) -> str:
    return listed(row.to) or "-"


def listed(keys: Sequence[str]) -> str:
    """Return keys as Markdown; those of one section in braces."""
    groups = list(grouped(keys))
    more = [f"and {len(groups) - MAX_KEYS} more"] if len(groups) > MAX_KEYS else []
    return ", ".join([*(f"`{group}`" for group in groups[:MAX_KEYS]), *more])


def grouped(keys: Sequence[str]) -> Iterator[str]:
    by_section: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        by_section.setdefault(section, []).append(name)
    for section, names in by_section.items():
        if not section:
            yield from names
        elif len(names) == 1:
            yield f"{section}.{names[0]}"
        else:
            yield f"{section}.{{{', '.join(names)}}}"


def abbreviate(key: str, table: PeerTable) -> str:
    for prefix, name in table.abbreviations.items():
        if key.startswith(f"{prefix}."):
            return f"{name}{key.removeprefix(prefix)}"
    return key


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, content in generated().items():
        before, rest = text.split(begin(name))
        text = before + begin(name) + content + end(name) + rest.split(end(name))[1]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
