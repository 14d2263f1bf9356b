"""The tables of docs/coming-from.md are those that `megarl import` reads."""

from functools import cache

import pytest

from megarl.cli.schema import make_reference
from megarl.importing.conversion import PEERS
from megarl.importing.nemo_rl.key_tables import TABLES
from megarl.importing.slime.argument_table import SLIME_RL, SLIME_SFT
from megarl.importing.verl.table import VERL
from tests.docs.peer_tables import PAGE, begin, end, generated


@pytest.mark.parametrize("name", ["example", *PEERS])
def test_the_page_has_what_import_knows(name: str):
    written = PAGE.read_text().split(begin(name))[1].split(end(name))[0]
    assert written == generated()[name], "run python -m tests.docs.peer_tables"


@pytest.mark.parametrize("name", PEERS)
def test_every_row_says_what_becomes_of_its_keys(name: str):
    for row in PEERS[name].table.rows():
        assert row.note or (row.kind == "mapped" and row.to), row.keys


RUN_TABLES = {
    "verl": VERL,
    "slime": SLIME_RL,
    "slime sft": SLIME_SFT,
    **{f"nemo-rl {kind}": table for kind, table in TABLES.items()},
}
"""The tables by which runs are converted: one per trainer, or per kind of run."""


@pytest.mark.parametrize("name", RUN_TABLES)
def test_no_key_is_named_by_two_rows(name: str):
    """An exact key of a later row would never be read."""
    keys = [key for row in RUN_TABLES[name].rows() for key in row.keys]
    assert sorted(keys) == sorted(set(keys))


@pytest.mark.parametrize("name", RUN_TABLES)
def test_rows_name_keys_that_megarl_has(name: str):
    table = RUN_TABLES[name]
    wrong = [(row.keys, to) for row in table.rows() for to in row.to if not is_key(to, table.command)]
    assert not wrong


@cache
def reference(command: str) -> str:
    return make_reference(command)


def is_key(key: str, command: str) -> bool:
    """Whether the reference of a command has a key, or a free map that the key is in; algorithms are unions."""
    section, _, name = key.partition(".")
    if section == "algorithm":  # a union of types, whose keys the reference lists by type
        return f".{name.partition('.')[0]} }}" in reference(command)
    key = key.replace("rollout.env.", "data.sources.NAME.env.")  # the same section
    parts = key.split(".")
    if f"#{key} }}" in reference(command) or f"(#{key})" in reference(command):
        return True
    above = [".".join(parts[:i]) for i in range(1, len(parts))]
    return any(f"`{{ #{key} }}, map" in reference(command) for key in above)
