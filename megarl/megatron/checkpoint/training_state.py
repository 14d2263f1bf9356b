"""Checkpoints of the full training state: weights, optimizer, learning-rate schedule, random number generators.

    __0_0.distcp, ...                        tensors: weights as in `model_state`; for each parameter
                                             optimizer.state.{exp_avg, exp_avg_sq}.<its name>, or the names that
                                             another optimizer than Adam has, and for 16-bit parameters
                                             optimizer.state.param.<its name>
    .metadata, metadata.json, common.pt      as in every megatron-core checkpoint; common.pt holds the step count
    generators_0.pt, ...                     random number generator states of each rank

Readers see full tensors, so a checkpoint can be loaded in any layout. Each rank writes its own shards: nothing is
gathered, and ranks wait for each other only in `finish_save`. Each rank reads the parameter ranges that its optimizer
steps; the other ranges come from the data-parallel ranks that step them, as after every step.
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
    HostStaging,
    NewFile,
    WriteResult,
    tensors_on_host,
    write_files,
)
from megarl.megatron.checkpoint.model_state import CHECKPOINT_VERSION, CONTENT_METADATA, MAX_SHOWN
from megarl.megatron.checkpoint.optimizer_state import (
    MAIN_PARAM,
    collect_optimizer_shards,
    is_adam,
    prepare_own_state,
    read_step,
    sync_parameters,
    write_step,
)
from megarl.megatron.checkpoint.shards import (
    COMMON,
    INDEX,
    METADATA_JSON,
    OPTIMIZER_STATE,
    CheckpointShard,
    StoredShard,
    StoredTensors,
    held_shards,
    make_index,
    metadata_json,
    serialize,
    shards_to_load,
    shards_to_save,
)
from megarl.megatron.requests import LoadReport, SavedFile, SavedShard, SaveRequest, SaveStats
from megarl.megatron.runtime import platform
from megarl.model_files.json_object import refuse_lfs_pointer

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from megarl.megatron.modeling.megatron_model import MegatronModel
    from megarl.megatron.runtime.offload import TrainerMemory
import random

import numpy as np
from megatron.core import tensor_parallel

from megarl.megatron.modeling.megatron_model import MegatronModel


def collect_rng_states(model: MegatronModel) -> dict[str, Any]:
    """Return all RNG states of a model in this process, in a form that `torch.load(weights_only=True)` accepts."""
    model.activate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    keys = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracked": {name: state.clone() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": {**numpy, "state": {"key": keys, "pos": int(numpy["state"]["pos"])}},
    }


def restore_rng_states(model: MegatronModel, states: dict[str, Any]) -> None:
    """Restore the RNG states that `collect_rng_states` returned."""
    model.activate()
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracked"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["host"])
    random.setstate(states["python"])
    numpy = states["numpy"]
    keys = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {"key": keys, "pos": numpy["state"]["pos"]}})


Location = tuple[str, int, int]
"""File name, offset and length in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingSave:
    """A save that has begun and is not finished."""

    request: SaveRequest
    shards: tuple[int, ...]
    """Indices of the shards, in the order of writing."""
    files: tuple[str, ...]
    """File of each shard, in the same order."""
    result: Callable[[], WriteResult]
    is_done: Callable[[], bool]


class TrainCheckpoint:
    """Saves and loads one rank's training state. `TrainerWorker` documents the order of calls."""

    def __init__(
        self,
        model: MegatronModel,
        optimizer: ChainedOptimizer,
        scheduler: OptimizerParamScheduler,
        memory: TrainerMemory,
    ) -> None:
        self._model, self._optimizer, self._scheduler, self._memory = model, optimizer, scheduler, memory
        self._shards: list[CheckpointShard] = []
        """Shards that this rank writes. Adam's are the same in every save, other optimizers may replace their state."""
        self._num_bytes = 0
        """Size of these shards in bytes."""
        self._writer = BackgroundWriter()
        self._staging: HostStaging | None = None
        self._save: _PendingSave | None = None
        self._locations: tuple[Location, ...] = ()
        """Locations of the shards in the last save; they depend only on the layout and the save request."""
        self._index: tuple[SaveRequest, bytes] | None = None
        """Request and index of the last save; on rank 0."""

    def begin_save(self, request: SaveRequest) -> SaveStats:
        """Start a save: write the shards now, or stage host copies that a background thread writes."""
        began = time.perf_counter()
        assert self._save is None, "begin_save needs finish_save of the previous save"
        self._memory.onload()
        if not self._shards or not is_adam(self._optimizer):
            self._shards = shards_to_save(self._model, collect_optimizer_shards(self._optimizer))
            num_bytes, before = sum(shard.num_bytes for shard in self._shards), self._num_bytes
            self._num_bytes, self._staging = num_bytes, self._staging if num_bytes == before else None
        self._save = self._begin_async(request) if request.asynchronous else self._write(request)
        return SaveStats(
            staging_bytes=self._staging.num_bytes if self._staging is not None and request.asynchronous else 0,
            bytes=self._num_bytes,
            seconds=time.perf_counter() - began,
        )

    @property
    def is_written(self) -> bool:
        """This rank's part of the save is on disk, or has failed."""
        return self._save is None or self._save.is_done()

    def wait_written(self) -> None:
        """Block until this rank's part of the save is on disk, or has failed; does not wait for other ranks."""
        if self._save is not None:
            self._save.result()

    def finish_save(self) -> SavedShard:
        """Wait for the save on all ranks and return this rank's files; rank 0 also writes a changed index.

        Raises:
            DataError: a rank could not write; raised on all ranks.
        """
        assert self._save is not None, "finish_save needs begin_save first"
        save, self._save = self._save, None
        result = save.result()
        files = {file.name: file for file in result.files}
        locations = self._locations
        if result.failure is None:
            locations = self._locate(save, result)
        lacks_index = dist.get_rank() == 0 and INDEX not in files
        failed, is_new = _any_rank(result.failure is not None, lacks_index or locations != self._locations)
        if failed:
            _raise_if_failed(save.request, result.failure)
        if is_new:
            files |= {file.name: file for file in self._write_index(save.request, locations)}
        self._locations = locations
        if not is_adam(self._optimizer):
            self._shards = []  # the memory of state that the next step replaces
        return SavedShard(files=tuple(files.values()), write_seconds=result.seconds)

    def _write_index(self, request: SaveRequest, locations: Sequence[Location]) -> Sequence[SavedFile]:
        """Gather the locations of all ranks' shards; rank 0 writes the index."""
        mine = [
            StoredShard(shard.key, shard.data.dtype, shard.global_shape, shard.offset, shard.sizes, *location)
            for shard, location in zip(self._shards, locations, strict=True)
        ]
        by_rank = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, by_rank)
        result = WriteResult()
        if by_rank is not None:
            index = make_index(shard for shards in by_rank for shard in shards)
            result = write_files(Path(request.folder), [NewFile(INDEX, [index])])
            self._index = request, index
        _raise_if_failed(request, result.failure)
        return result.files

    def load(self, folder: Path) -> LoadReport:
        """Load the training state in `folder`; random number generators only if the parallel layout is the same.

        Raises:
            DataError: the checkpoint cannot be loaded; raised on all ranks.
        """
        self._memory.onload()
        problems: list[str] = []
        stored = None
        try:
            stored = StoredTensors(folder)
            common = _load_serialized(folder / COMMON)
        except DataError as e:
            problems.append(str(e))
        _raise_if_any(problems)
        assert stored is not None
        prepare_own_state(self._optimizer, is_saved=_has_own_state(stored, common))
        optim_shards = collect_optimizer_shards(self._optimizer)
        held = held_shards(self._model, optim_shards)
        try:
            problems = self._problems(
                folder, common, stored.problems(held, vocab_size=self._model.architecture.vocab_size)
            )
            same_layout = common.get("megarl", {}).get("layout") == self._layout()
            generators = _load_serialized(folder / _rng_state_file()) if same_layout and not problems else {}
        except DataError as e:
            problems.append(str(e))
        _raise_if_any(problems)
        self._require_all_used(folder, stored.names, held)
        try:
            num_bytes = stored.read(shards_to_load(self._model, optim_shards))
        except DataError as e:
            problems.append(f"rank {dist.get_rank()}: {e}")
        _raise_if_any(problems)
        sync_parameters(self._optimizer)
        write_step(self._optimizer, common["megarl"]["step"])
        self._scheduler.num_steps = common["megarl"]["scheduled"]
        self._scheduler.step(0)  # sets the learning rates of the parameter groups
        if same_layout:
            restore_rng_states(self._model, generators)
        return LoadReport(same_layout=same_layout, bytes=num_bytes)

    def _write(self, request: SaveRequest) -> _PendingSave:
        """Write all shards synchronously."""
        name = f"__{dist.get_rank()}_0.distcp"
        tensors = tensors_on_host(shard.data for shard in self._shards)
        result = write_files(Path(request.folder), [NewFile(name, tensors), *self._metadata_files(request)])
        count = len(self._shards)
        return _PendingSave(
            request=request,
            shards=tuple(range(count)),
            files=(name,) * count,
            result=lambda: result,
            is_done=lambda: True,
        )

    def _begin_async(self, request: SaveRequest) -> _PendingSave:
        """Stage host copies for the background thread; write the shards that do not fit synchronously."""
        folder, limit = Path(request.folder), request.max_staging_bytes
        if self._staging is None or self._staging.limit != limit:
            self._staging = None  # free the memory first
            self._staging = HostStaging([shard.data for shard in self._shards], limit)
        staging = self._staging
        names = [f"__{dist.get_rank()}_{number}.distcp" for number in range(2)]
        first = WriteResult()
        if staging.not_staged:
            tensors = tensors_on_host(self._shards[number].data for number in staging.not_staged)
            first = write_files(folder, [NewFile(names[0], tensors)])
        staging.stage([shard.data for shard in self._shards])
        rest = [] if first.failure else [NewFile(names[1], staging.tensors), *self._metadata_files(request)]
        background = self._writer.write(folder, rest)
        return _PendingSave(
            request=request,
            shards=(*staging.not_staged, *staging.staged),
            files=(names[0],) * len(staging.not_staged) + (names[1],) * len(staging.staged),
            result=lambda: first + background.result(),
            is_done=lambda: background.is_done,
        )

    def _metadata_files(self, request: SaveRequest) -> Iterator[NewFile]:
        """Yield the files without tensors, with their current content."""
        yield NewFile(_rng_state_file(), _serialize_lazily(collect_rng_states(self._model)))
        if dist.get_rank() != 0:
            return
        step = read_step(self._optimizer)
        common = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": step,
            "content_metadata": CONTENT_METADATA,
            "megarl": {"step": step, "scheduled": self._scheduler.num_steps, "layout": self._layout()},
        }
        yield NewFile(COMMON, _serialize_lazily(common))
        yield NewFile(METADATA_JSON, [metadata_json()])
        if self._index is not None and _file_assignment(self._index[0]) == _file_assignment(request):
            yield NewFile(INDEX, [self._index[1]])

    def _locate(self, save: _PendingSave, result: WriteResult) -> tuple[Location, ...]:
        """Return the location of each shard."""
        written = zip(save.shards, save.files, result.locations, strict=True)
        found = {number: (file, *location) for number, file, location in written}
        return tuple(found[number] for number in range(len(self._shards)))

    def _problems(self, folder: Path, common: Mapping[str, object], tensor_problems: list[str]) -> list[str]:
        """Return the reasons why the checkpoint cannot be loaded; empty if it can."""
        if "megarl" not in common:
            return [f"{folder} holds only a model, needs a training state"]
        return [self._mismatch_message(folder, tensor_problems)] if tensor_problems else []

    def _require_all_used(self, folder: Path, stored: Sequence[str], held: Sequence[CheckpointShard]) -> None:
        """Raise DataError on all ranks if some stored tensor has no shard on any rank.

        Without this check, a model with fewer layers would load successfully.
        """
        names = {shard.key for shard in held}
        used = _any_rank(*(name in names for name in stored))
        unknown = [f"the model has no {name}" for name, is_used in zip(stored, used, strict=True) if not is_used]
        if unknown:
            raise DataError(self._mismatch_message(folder, unknown))

    def _mismatch_message(self, folder: Path, why: Sequence[str]) -> str:
        more = f" and {len(why) - MAX_SHOWN} more" if len(why) > MAX_SHOWN else ""
        name = self._model.architecture.name
        return f"{folder} is not a training state of this {name}: {'; '.join(why[:MAX_SHOWN])}{more}"

    def _layout(self) -> dict[str, int]:
        """Return the sizes that determine how random number generator states are distributed over ranks."""
        p = self._model.spec.parallel
        sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep, "etp": p.expert_tp, "vpp": p.vpp}
        return {"world": dist.get_world_size(), **sizes}


def _has_own_state(stored: StoredTensors, common: Mapping[str, Any]) -> bool:
    """Return whether the optimizer had more state than main parameters, which it has from its first step on."""
    names = [name for name in stored.names if name.startswith(OPTIMIZER_STATE)]
    has_tensors = any(not name.startswith(f"{OPTIMIZER_STATE}{MAIN_PARAM}.") for name in names)
    return has_tensors or bool(common.get("megarl", {}).get("step"))


def _file_assignment(request: SaveRequest) -> tuple[bool, int | None]:
    """Return the options that determine which shard is in which file."""
    return request.asynchronous, request.max_staging_bytes


def _rng_state_file() -> str:
    return f"generators_{dist.get_rank()}.pt"


def _serialize_lazily(value: Mapping[str, object]) -> Iterator[bytes]:
    yield serialize(value)


def _load_serialized(path: Path) -> dict[str, Any]:
    """Read a file written with `serialize`."""
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as e:
        refuse_lfs_pointer(path)
        raise DataError(f"{path} cannot be read: {e}") from e
    return found


def _any_rank(*flags: bool) -> list[bool]:
    """Return which flags are set on any rank. One all-reduce for all flags, because the training step waits for it."""
    found = torch.tensor(flags, dtype=torch.int32, device=platform.device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def _raise_if_failed(request: SaveRequest, failure: str | None) -> None:
    """Raise DataError on all ranks if any rank could not write."""
    by_rank: list[str | None] = [failure] * dist.get_world_size()
    dist.all_gather_object(by_rank, failure)
    for rank, each in enumerate(by_rank):
        if each is not None:
            raise DataError(f"{request.folder}: the checkpoint could not be written, on rank {rank}: {each}")


def _raise_if_any(problems: list[str]) -> None:
    """Raise DataError on all ranks if any rank has a problem."""
    by_rank: list[list[str]] = [problems] * dist.get_world_size()
    dist.all_gather_object(by_rank, problems)
    every = sorted({problem for each in by_rank for problem in each})
    if every:
        raise DataError(every[0])
