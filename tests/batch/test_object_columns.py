"""Objects of a dataclass in columns behave as the tuple of them."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from megarl.batch.packed_trajectories import ObjectColumns, with_values
from megarl.batch.trajectory import TermReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A small object; counts how many are made."""

    number: int
    share: float
    terms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        made.append(self.number)


made: list[int] = []
ROWS = (Row(number=1, share=0.5, terms={"a": 1.0}), Row(number=2, share=0.5), Row(number=3, share=0.5))


@pytest.mark.parametrize("rows", [(), ROWS[:1], ROWS])
@pytest.mark.parametrize("is_sent", [False, True])
def test_they_are_the_objects(rows, is_sent):
    columns = ObjectColumns.of(Row, rows)
    if is_sent:
        columns = pickle.loads(pickle.dumps(columns))
    assert tuple(columns) == rows
    assert columns == rows == columns
    assert columns == ObjectColumns.of(Row, list(rows))
    assert len(columns) == len(rows)
    assert columns[1:] == rows[1:]
    assert columns.column("terms") == tuple(row.terms for row in rows)
    assert ObjectColumns.of(Row, columns) is columns
    changed = columns.replace(number=range(len(rows)))
    assert tuple(changed) == tuple(replace(row, number=i) for i, row in enumerate(rows))
    assert tuple(columns) == rows
    assert repr(columns) == repr(rows)
    assert columns != changed or len(rows) == 0


def test_columns_are_read_without_making_objects():
    stored = pickle.dumps(ObjectColumns.of(Row, ROWS))
    made.clear()
    columns = pickle.loads(stored)
    assert columns.replace(number=(7, 8, 9)).column("number") == (7, 8, 9)
    assert (len(columns), columns.column("share")) == (3, (0.5, 0.5, 0.5))
    assert made == []
    assert columns[0] == ROWS[0]
    assert columns[2] is columns[2]
    assert made == [1, 2, 3]


def test_equal_numbers_of_other_types_keep_their_types():
    columns = pickle.loads(pickle.dumps(ObjectColumns.of(Row, [Row(number=1, share=0), Row(number=1, share=0.0)])))
    assert list(map(type, columns.column("share"))) == [int, float]


def test_copies_with_other_values():
    report = TermReport(seconds=0.5, num_retried=2)
    assert with_values(report, num_retried=3) == replace(report, num_retried=3)
    assert report == TermReport(seconds=0.5, num_retried=2)
