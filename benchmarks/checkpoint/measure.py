"""How long a save holds up training, at once and in the background, on real ranks."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.checkpoint.verify import hash_file
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.megatron.requests import ModelSpec, SavedFile, SaveRequest, TrainerSpec
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megarl.megatron.checkpoint.training_state import TrainCheckpoint
    from megarl.megatron.training.trainer import MegatronTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Seconds are the longest of any rank; of saves but the first one of its kind, the median."""

    ranks: int
    bytes: int
    """Of the training state."""
    staging_bytes: int
    synchronous_seconds: float
    """All of a save: training waits for it."""
    first_seconds: float
    """The first save in the background, which takes host memory: how long training waits at its start and end."""
    asynchronous_seconds: float
    """A later one."""
    begin_seconds: float
    """Of these, how long its start took: the copy."""
    ratio: float
    """`asynchronous_seconds` to `synchronous_seconds`."""
    background_seconds: float
    """What a rank writes for while training goes on."""
    verify_seconds: float
    """Comparing every file with its checksum, by one process."""
    load_seconds: float
    read_bytes: int
    """By all ranks together in that load, as the system counts."""
    other_layout: str
    """Another one, that loads the same files."""
    other_load_seconds: float
    other_read_bytes: int


def measure(config: Path, *, ranks: int, sizes: Mapping[str, int], folder: Path, repeats: int) -> SaveReport:
    """Save and load a state of random numbers.

    Args:
        config: folder with the model's config.json.
        sizes: of `ParallelConfig`.
        folder: where to write, on the disk that is measured.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = folder / "report.pt"
    arguments = (ranks, port, str(config), dict(sizes), folder, repeats, out)
    mp.spawn(_on_rank, arguments, ranks)  # type: ignore[attr-defined, no-untyped-call]
    report: SaveReport = torch.load(out, weights_only=False)
    return report


def _on_rank(
    rank: int, ranks: int, port: int, config: str, sizes: dict[str, int], folder: Path, repeats: int, out: Path
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    if platform.is_cuda():
        torch.cuda.set_device(rank)
    platform.prepare()
    report = _measure(config, sizes, folder, repeats)
    if rank == 0:
        torch.save(report, out)
    dist.destroy_process_group()


def _measure(config: str, sizes: dict[str, int], folder: Path, repeats: int) -> SaveReport:
    from megarl.megatron.checkpoint.optimizer_state import collect_optimizer_shards

    trainer = _trainer(config, sizes)
    shards = collect_optimizer_shards(trainer._optimizer).values()
    for tensor in (
        *trainer.model.tensors().values(),
        *(values for shard in shards for values in shard.tensors.values()),
    ):
        tensor.detach().normal_()  # zeros would be pages that no memory stands behind
    target = folder / "saved"
    at_once = [_save(trainer.checkpoint, target, asynchronous=False) for _ in range(repeats + 1)]
    later = [_save(trainer.checkpoint, target, asynchronous=True) for _ in range(repeats + 1)]
    verify = _verify(target, later[-1].files)
    load, read = _load(trainer.checkpoint, target)
    other = {**sizes, "tp": dist.get_world_size() if sizes["tp"] == 1 else 1}
    other_load, other_read = _load(_trainer(config, other).checkpoint, target)
    synchronous, asynchronous = (median(save.held_up for save in of[1:]) for of in (at_once, later))
    return SaveReport(
        ranks=dist.get_world_size(),
        bytes=later[-1].bytes,
        staging_bytes=later[-1].staging_bytes,
        synchronous_seconds=synchronous,
        first_seconds=later[0].held_up,
        asynchronous_seconds=asynchronous,
        begin_seconds=median(save.begin for save in later[1:]),
        ratio=asynchronous / synchronous,
        background_seconds=median(save.background for save in later[1:]),
        verify_seconds=verify,
        load_seconds=load,
        read_bytes=read,
        other_layout=f"tp {other['tp']}",
        other_load_seconds=other_load,
        other_read_bytes=other_read,
    )


def _trainer(config: str, sizes: dict[str, int]) -> MegatronTrainer:
    from megarl.megatron.training.trainer import MegatronTrainer

    model = ModelSpec(model_path=config, dtype="auto", parallel=ParallelConfig(**sizes), weights="none")
    return MegatronTrainer(TrainerSpec(model=model, optimizer=OptimizerConfig(), optimizer_steps=1))


def _verify(folder: Path, files: Sequence[SavedFile]) -> float:
    """Seconds that it took rank 0."""
    dist.barrier()
    began = time.perf_counter()
    for file in files if dist.get_rank() == 0 else ():
        assert hash_file(folder / file.name).sha256 == file.sha256, file.name
    dist.barrier()
    return time.perf_counter() - began


def _load(checkpoint: TrainCheckpoint, folder: Path) -> tuple[float, int]:
    """Seconds of the slowest rank, and what all of them have read."""
    dist.barrier()
    before, began = _read_so_far(), time.perf_counter()
    checkpoint.load(folder)
    seconds = torch.tensor(time.perf_counter() - began)
    read = torch.tensor(_read_so_far() - before)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(read)
    return float(seconds), int(read)


def _read_so_far() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    bytes: int
    staging_bytes: int
    begin: float
    held_up: float
    background: float
    files: tuple[SavedFile, ...]
    """Of all ranks."""


def _save(saves: TrainCheckpoint, folder: Path, *, asynchronous: bool) -> _Save:
    """Into an empty folder; seconds of the rank that was held up longest."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()
    began = time.perf_counter()
    stats = saves.begin_save(SaveRequest(folder=str(folder), asynchronous=asynchronous))
    begin = time.perf_counter() - began
    while not saves.is_written:
        time.sleep(0.01)
    dist.barrier()
    finishes = time.perf_counter()
    part = saves.finish_save()
    seconds = torch.tensor([begin, begin + time.perf_counter() - finishes])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    of_ranks = [part] * dist.get_world_size()
    dist.all_gather_object(of_ranks, part)
    counts = torch.tensor([stats.bytes, stats.staging_bytes])
    dist.all_reduce(counts)
    return _Save(
        bytes=int(counts[0]),
        staging_bytes=int(counts[1]),
        begin=float(seconds[0]),
        held_up=float(seconds[1]),
        background=part.write_seconds,
        files=tuple(file for each in of_ranks for file in each.files),
    )
