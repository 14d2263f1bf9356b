"""Measures on real ranks how long synchronous and asynchronous saves stall training, and how long loading takes."""

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

from megarl.checkpoint.manifest import hash_file
from megarl.config.trainer import OptimizerConfig, ParallelConfig
from megarl.megatron.requests import ModelSpec, SavedFile, SaveRequest, TrainerSpec
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megarl.megatron.checkpoint.training_state import TrainCheckpoint
    from megarl.megatron.training.trainer import MegatronTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Times in seconds of the slowest rank; for saves the median without the first one of each kind."""

    ranks: int
    bytes: int
    """Size of the training state in bytes."""
    staging_bytes: int
    synchronous_seconds: float
    """Duration of a synchronous save, for which training waits."""
    first_seconds: float
    """Training stall of the first asynchronous save, which allocates host memory."""
    asynchronous_seconds: float
    """Training stall at start and end of a later asynchronous save."""
    begin_seconds: float
    """Part of `asynchronous_seconds` at the start of the save: the copy."""
    ratio: float
    """`asynchronous_seconds` divided by `synchronous_seconds`."""
    background_seconds: float
    """Duration of a rank's writing while training continues."""
    verify_seconds: float
    """Time for one process to compare every file with its checksum."""
    load_seconds: float
    read_bytes: int
    """Bytes that all ranks read in that load, as the system counts."""
    other_layout: str
    """Another parallel layout that loads the same files."""
    other_load_seconds: float
    other_read_bytes: int


def measure(config: Path, *, ranks: int, sizes: Mapping[str, int], folder: Path, repeats: int) -> SaveReport:
    """Spawn `ranks` processes that save and load a training state of random numbers, and return the report.

    Args:
        config: folder with the model's config.json.
        sizes: fields of `ParallelConfig`.
        folder: folder to write to, on the disk to measure.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = folder / "report.pt"
    arguments = (ranks, port, str(config), dict(sizes), folder, repeats, out)
    mp.spawn(_run_rank, arguments, ranks)  # type: ignore[attr-defined, no-untyped-call]
    report: SaveReport = torch.load(out, weights_only=False)
    return report


def _run_rank(
    rank: int, ranks: int, port: int, config: str, sizes: dict[str, int], folder: Path, repeats: int, out: Path
) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
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
    shards = collect_optimizer_shards(trainer.optimizer).values()
    for tensor in (
        *trainer.model.tensors().values(),
        *(values for shard in shards for values in shard.tensors.values()),
    ):
        tensor.detach().normal_()  # pages of zeros might not be backed by memory
    target = folder / "saved"
    synchronous_saves = [_save(trainer.checkpoint, target, asynchronous=False) for _ in range(repeats + 1)]
    asynchronous_saves = [_save(trainer.checkpoint, target, asynchronous=True) for _ in range(repeats + 1)]
    verify = _verify(target, asynchronous_saves[-1].files)
    load, read = _load(trainer.checkpoint, target)
    other = {**sizes, "tp": dist.get_world_size() if sizes["tp"] == 1 else 1}
    other_load, other_read = _load(_trainer(config, other).checkpoint, target)
    synchronous, asynchronous = (
        median(save.stall for save in of[1:]) for of in (synchronous_saves, asynchronous_saves)
    )
    return SaveReport(
        ranks=dist.get_world_size(),
        bytes=asynchronous_saves[-1].bytes,
        staging_bytes=asynchronous_saves[-1].staging_bytes,
        synchronous_seconds=synchronous,
        first_seconds=asynchronous_saves[0].stall,
        asynchronous_seconds=asynchronous,
        begin_seconds=median(save.begin for save in asynchronous_saves[1:]),
        ratio=asynchronous / synchronous,
        background_seconds=median(save.background for save in asynchronous_saves[1:]),
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
    """Return the seconds that rank 0 takes to compare all files with their checksums."""
    dist.barrier()
    began = time.perf_counter()
    for file in files if dist.get_rank() == 0 else ():
        assert hash_file(folder / file.name).sha256 == file.sha256, file.name
    dist.barrier()
    return time.perf_counter() - began


def _load(checkpoint: TrainCheckpoint, folder: Path) -> tuple[float, int]:
    """Return the load time of the slowest rank in seconds, and the bytes that all ranks read."""
    dist.barrier()
    before, began = _num_bytes_read(), time.perf_counter()
    checkpoint.load(folder)
    seconds = torch.tensor(time.perf_counter() - began)
    read = torch.tensor(_num_bytes_read() - before)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(read)
    return float(seconds), int(read)


def _num_bytes_read() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    bytes: int
    staging_bytes: int
    begin: float
    stall: float
    background: float
    files: tuple[SavedFile, ...]
    """Files of all ranks."""


def _save(saves: TrainCheckpoint, folder: Path, *, asynchronous: bool) -> _Save:
    """Save into an empty folder; times in seconds are those of the slowest rank."""
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
        stall=float(seconds[1]),
        background=part.write_seconds,
        files=tuple(file for each in of_ranks for file in each.files),
    )
