"""Training saved so that it goes on as if it had not stopped: weights, optimizer, schedule, random generators.

    __0_0.distcp, ...                        tensors: weights as in `checkpoint`, and for each parameter
                                             optimizer.state.{exp_avg, exp_avg_sq}.<its name>, and in 16 bits .param
    .metadata, metadata.json, common.pt      as in every checkpoint of megatron-core; steps taken are in the last
    generators_0.pt, ...                     of each rank

Tensors are whole tensors to a reader, whatever the layout, and any layout can load them. Each rank writes what it has:
nothing is gathered, and but for `finish_save` ranks do not wait for one another. Each reads what it steps of its
parameters; the rest of them comes from the data-parallel ranks that step it, as after every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megarl.errors import DataError
from megarl.megatron.checkpoint.background_writer import (
    BackgroundWriter,
    HostCopy,
    NewFile,
    Outcome,
    on_host,
    write_files,
)
from megarl.megatron.checkpoint.model_state import CHECKPOINT_VERSION, CONTENT, SHOWN
from megarl.megatron.checkpoint.optimizer_state import optimizer_shards, read_step, spread_parameters, write_step
from megarl.megatron.checkpoint.shards import Piece, pieces_held, pieces_to_load, pieces_to_save
from megarl.megatron.checkpoint.storage_index import (
    COMMON,
    INDEX,
    KIND,
    StoredPiece,
    StoredTensors,
    kind,
    make_index,
    serialized,
)
from megarl.megatron.requests import LoadReport, SavedFile, SavedPart, SaveOrder, SaveStats
from megarl.megatron.runtime import platform
from megarl.megatron.runtime.rng_state import read_generators, write_generators

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import ModelRank
    from megarl.megatron.runtime.offload import TrainerMemory

Place = tuple[str, int, int]
"""File, and offset and length in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """One that has begun."""

    order: SaveOrder
    pieces: tuple[int, ...]
    """Which, in the order of writing."""
    files: tuple[str, ...]
    """By piece in that order."""
    outcome: Callable[[], Outcome]
    is_over: Callable[[], bool]


class TrainCheckpoint:
    """One rank's; see `TrainerWorker` for what may be called."""

    def __init__(self, rank: ModelRank, optimizer: Any, scheduler: Any, memory: TrainerMemory) -> None:
        self._rank, self._optimizer, self._scheduler, self._memory = rank, optimizer, scheduler, memory
        self._pieces: list[Piece] = []
        """To save; the same ones every time."""
        self._num_bytes = 0
        """Of these."""
        self._writer = BackgroundWriter()
        self._copy: HostCopy | None = None
        self._save: _Save | None = None
        self._places: tuple[Place, ...] = ()
        """Where the pieces were in the last save; depends on nothing but the layout and the order."""
        self._index: tuple[SaveOrder, bytes] | None = None
        """On rank 0, the last save's."""

    def begin_save(self, order: SaveOrder) -> SaveStats:
        """See `TrainerWorker`."""
        began = time.perf_counter()
        assert self._save is None, "begin_save needs finish_save of the save before"
        self._memory.onload()
        if not self._pieces:
            self._pieces = pieces_to_save(self._rank, optimizer_shards(self._optimizer))
            self._num_bytes = sum(piece.num_bytes for piece in self._pieces)
        self._save = self._begin_copied(order) if order.asynchronous else self._write(order)
        return SaveStats(
            staging_bytes=self._copy.num_bytes if self._copy is not None and order.asynchronous else 0,
            bytes=self._num_bytes,
            seconds=time.perf_counter() - began,
        )

    @property
    def is_written(self) -> bool:
        """This rank's part of the save is on the disk, or has failed."""
        return self._save is None or self._save.is_over()

    def finish_save(self) -> SavedPart:
        """See `TrainerWorker`; of this rank's files."""
        assert self._save is not None, "finish_save needs begin_save first"
        save, self._save = self._save, None
        outcome = save.outcome()
        files = {file.name: file for file in outcome.files}
        places = self._places
        if outcome.failure is None:
            places = self._place(save, outcome)
        lacks_index = dist.get_rank() == 0 and INDEX not in files
        failed, is_new = _on_any_rank(outcome.failure is not None, lacks_index or places != self._places)
        if failed:
            _require_written(save.order, outcome.failure)
        if is_new:
            files |= {file.name: file for file in self._write_index(save.order, places)}
        self._places = places
        return SavedPart(files=tuple(files.values()), write_seconds=outcome.seconds)

    def _write_index(self, order: SaveOrder, places: Sequence[Place]) -> Sequence[SavedFile]:
        """On rank 0, from where all ranks have their pieces."""
        mine = [
            StoredPiece(piece.key, piece.data.dtype, piece.global_shape, piece.offset, piece.sizes, *place)
            for piece, place in zip(self._pieces, places, strict=True)
        ]
        of_ranks = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, of_ranks)
        outcome = Outcome()
        if of_ranks is not None:
            index = make_index(piece for of_rank in of_ranks for piece in of_rank)
            outcome = write_files(Path(order.folder), [NewFile(INDEX, [index])])
            self._index = order, index
        _require_written(order, outcome.failure)
        return outcome.files

    def load(self, folder: Path) -> LoadReport:
        """See `TrainerWorker`."""
        self._memory.onload()
        shards = optimizer_shards(self._optimizer)
        held = pieces_held(self._rank, shards)
        problems: list[str] = []
        stored = None
        try:
            stored = StoredTensors(folder)
            common = _read(folder / COMMON)
            problems = self._problems(folder, common, stored.problems(held, vocab_size=self._rank.model.vocab_size))
            same_layout = common.get("megarl", {}).get("layout") == self._layout()
            generators = _read(folder / _generators_file()) if same_layout and not problems else {}
        except DataError as e:
            problems.append(str(e))
        _require_none(problems)
        assert stored is not None
        self._require_all_used(folder, stored.names, held)
        try:
            num_bytes = stored.read(pieces_to_load(self._rank, shards))
        except DataError as e:
            problems.append(f"rank {dist.get_rank()}: {e}")
        _require_none(problems)
        spread_parameters(self._optimizer)
        write_step(self._optimizer, common["megarl"]["step"])
        self._scheduler.num_steps = common["megarl"]["scheduled"]
        self._scheduler.step(0)  # sets the groups' learning rates
        if same_layout:
            write_generators(self._rank, generators)
        return LoadReport(same_layout=same_layout, bytes=num_bytes)

    def _write(self, order: SaveOrder) -> _Save:
        """All of it, now."""
        name = f"__{dist.get_rank()}_0.distcp"
        tensors = on_host(piece.data for piece in self._pieces)
        outcome = write_files(Path(order.folder), [NewFile(name, tensors), *self._small_files(order)])
        count = len(self._pieces)
        return _Save(
            order=order,
            pieces=tuple(range(count)),
            files=(name,) * count,
            outcome=lambda: outcome,
            is_over=lambda: True,
        )

    def _begin_copied(self, order: SaveOrder) -> _Save:
        """What the copy has no room for now, the rest in the background."""
        folder, limit = Path(order.folder), order.max_staging_bytes
        if self._copy is None or self._copy.limit != limit:
            self._copy = None  # given back first
            self._copy = HostCopy([piece.data for piece in self._pieces], limit)
        copy = self._copy
        names = [f"__{dist.get_rank()}_{number}.distcp" for number in range(2)]
        first = Outcome()
        if copy.rest:
            tensors = on_host(self._pieces[number].data for number in copy.rest)
            first = write_files(folder, [NewFile(names[0], tensors)])
        copy.fill()
        rest = [] if first.failure else [NewFile(names[1], copy.tensors), *self._small_files(order)]
        background = self._writer.write(folder, rest)
        return _Save(
            order=order,
            pieces=(*copy.rest, *copy.copied),
            files=(names[0],) * len(copy.rest) + (names[1],) * len(copy.copied),
            outcome=lambda: first + background.outcome(),
            is_over=lambda: background.is_over,
        )

    def _small_files(self, order: SaveOrder) -> Iterator[NewFile]:
        """What is to be written beside tensors, as it is now."""
        yield NewFile(_generators_file(), _later(read_generators(self._rank)))
        if dist.get_rank() != 0:
            return
        step = read_step(self._optimizer)
        common = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": step,
            "content_metadata": CONTENT,
            "megarl": {"step": step, "scheduled": self._scheduler.num_steps, "layout": self._layout()},
        }
        yield NewFile(COMMON, _later(common))
        yield NewFile(KIND, [kind()])
        if self._index is not None and _split(self._index[0]) == _split(order):
            yield NewFile(INDEX, [self._index[1]])

    def _place(self, save: _Save, outcome: Outcome) -> tuple[Place, ...]:
        """By piece."""
        written = zip(save.pieces, save.files, outcome.places, strict=True)
        found = {number: (file, *place) for number, file, place in written}
        return tuple(found[number] for number in range(len(self._pieces)))

    def _problems(self, folder: Path, common: Mapping[str, Any], of_tensors: list[str]) -> list[str]:
        """Why the checkpoint cannot be loaded; nothing where it can."""
        if "megarl" not in common:
            return [f"{folder} holds a model alone, needs a training state"]
        return [self._of_another_model(folder, of_tensors)] if of_tensors else []

    def _require_all_used(self, folder: Path, stored: Sequence[str], held: Sequence[Piece]) -> None:
        """Return if some rank holds a part of each stored tensor, else raise DataError on all of them.

        A model with fewer layers finds all that it looks for.
        """
        names = {piece.key for piece in held}
        used = _on_any_rank(*(name in names for name in stored))
        unknown = [f"the model has no {name}" for name, is_used in zip(stored, used, strict=True) if not is_used]
        if unknown:
            raise DataError(self._of_another_model(folder, unknown))

    def _of_another_model(self, folder: Path, why: Sequence[str]) -> str:
        more = f" and {len(why) - SHOWN} more" if len(why) > SHOWN else ""
        return f"{folder} is no training state of this {self._rank.model.architecture}: {'; '.join(why[:SHOWN])}{more}"

    def _layout(self) -> dict[str, int]:
        """What decides which random numbers are whose."""
        p = self._rank.spec.parallel
        sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep, "etp": p.expert_tp, "vpp": p.vpp}
        return {"world": dist.get_world_size(), **sizes}


def _split(order: SaveOrder) -> tuple[bool, int | None]:
    """What decides which piece is in which file."""
    return order.asynchronous, order.max_staging_bytes


def _generators_file() -> str:
    return f"generators_{dist.get_rank()}.pt"


def _later(value: Mapping[str, Any]) -> Iterator[bytes]:
    yield serialized(value)


def _read(path: Path) -> dict[str, Any]:
    """What `serialized` has made."""
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as e:
        raise DataError(f"{path} cannot be read: {e}") from e
    return found


def _on_any_rank(*flags: bool) -> list[bool]:
    """Which are set on some rank. All of them in one message: the step waits for it."""
    found = torch.tensor(flags, dtype=torch.int32, device=platform.device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def _require_written(order: SaveOrder, failure: str | None) -> None:
    """Return if every rank has written, else raise DataError on all of them."""
    by_rank: list[str | None] = [failure] * dist.get_world_size()
    dist.all_gather_object(by_rank, failure)
    for rank, each in enumerate(by_rank):
        if each is not None:
            raise DataError(f"{order.folder}: the checkpoint could not be written, on rank {rank}: {each}")


def _require_none(problems: list[str]) -> None:
    """Return if no rank has any, else raise DataError on all of them."""
    by_rank: list[list[str]] = [problems] * dist.get_world_size()
    dist.all_gather_object(by_rank, problems)
    every = sorted({problem for each in by_rank for problem in each})
    if every:
        raise DataError(every[0])
