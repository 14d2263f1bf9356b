"""Objects of a dataclass in columns: thousands of them are unpickled, read and replaced without making any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, overload, override


class ObjectColumns[T](Sequence[T]):
    """Objects of one dataclass, which are made when they are first asked for one by one."""

    __slots__ = ("_cls", "_columns", "_objects")

    def __init__(self, cls: type[T], columns: tuple[tuple[Any, ...], ...]) -> None:
        """`columns`: the values of each field of the dataclass, one for each object."""
        self._cls: Any = cls
        self._columns: tuple[tuple[Any, ...], ...] | None = columns
        self._objects: tuple[T, ...] | None = None

    @classmethod
    def of(cls, kind: type[T], objects: Sequence[T]) -> ObjectColumns[T]:
        """Return the columns of objects of `kind`; those that are columns already stay as they are."""
        if isinstance(objects, ObjectColumns):
            return objects
        found = cls(kind, ())
        found._columns, found._objects = None, tuple(objects)
        return found

    def column(self, name: str) -> tuple[Any, ...]:
        """Return the field of each object."""
        return self._all_columns()[_positions(self._cls)[name]]

    def replace(self, **columns: Sequence[Any]) -> ObjectColumns[T]:
        """Return the objects with other values of these fields, one for each object."""
        positions, found = _positions(self._cls), list(self._all_columns())
        for name, values in columns.items():
            assert len(values) == len(self), f"{name}: {len(values)} values for {len(self)} objects"
            found[positions[name]] = tuple(values)
        return ObjectColumns(self._cls, tuple(found))

    def _all_columns(self) -> tuple[tuple[Any, ...], ...]:
        if self._columns is None:
            names, objects = _field_names(self._cls), self._all_objects()
            rows = map(attrgetter(*names), objects)
            self._columns = tuple(zip(*rows, strict=True)) if objects else ((),) * len(names)
        return self._columns

    def _all_objects(self) -> tuple[T, ...]:
        if self._objects is None:
            names, rows = _field_names(self._cls), zip(*self._all_columns(), strict=True)
            self._objects = tuple([self._cls(**dict(zip(names, row, strict=True))) for row in rows])
        return self._objects

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    @override
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._all_objects()[index]

    @override
    def __iter__(self) -> Iterator[T]:
        return iter(self._all_objects())

    @override
    def __len__(self) -> int:
        return len(self._objects if self._columns is None else self._columns[0])  # type: ignore[arg-type]

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, ObjectColumns):
            return self._cls is other._cls and self._all_columns() == other._all_columns()
        return self._all_objects() == other if isinstance(other, tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        return repr(self._all_objects())

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # objects with equal values share one of them where they are unpickled
        columns = [(column[0],) * len(column) if _is_constant(column) else column for column in self._all_columns()]
        return ObjectColumns, (self._cls, tuple(columns))


def _is_constant(column: tuple[Any, ...]) -> bool:
    return len(column) > 1 and all(value == column[0] and type(value) is type(column[0]) for value in column)


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple([each.name for each in fields(cls)])


@cache
def _positions(cls: Any) -> dict[str, int]:
    return {name: i for i, name in enumerate(_field_names(cls))}
