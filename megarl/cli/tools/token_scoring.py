"""Score a file of token sequences: check it, then process it in chunks over the ranks, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from megarl.batch.balance import MICRO_BATCHES_PER_CHUNK
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.group import Group, Processes, WorkerFuture, WorkerProcesses
from megarl.cluster.workers.spmd import SpmdWorld
from megarl.config import ScoreConfig
from megarl.controller.preflight.cluster_check import RequiredPaths
from megarl.controller.ray_session import reserved_slots
from megarl.data.token_file import TokenFile, TokenSequence
from megarl.errors import ConfigError, DataError, MegarlError
from megarl.megatron.command_workers import SCORE_BY_DP, ScoreRequest, Scores, ScoreWorker
from megarl.megatron.families.architecture import sequence_cost
from megarl.megatron.families.load_architecture import (
    find_folder_notices,
    find_weight_problems,
    load_architecture_and_dtype,
    load_architecture_from_folder,
    require_family,
)
from megarl.megatron.families.trainer_layouts import parallel_problems
from megarl.megatron.requests import ModelSpec
from megarl.run.remote.trainer_group import make_rank_processes

LINES_PER_CHUNK = 8192

Sequences = Sequence[NDArray[np.int32]]
"""Token ids by sequence and position."""


CHUNKS_AHEAD = 2
"""Chunks in flight before the oldest is awaited, so that ranks do not idle while lines are read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreProgress:
    """Progress of scoring a file."""

    num_lines: int
    num_tokens: int
    seconds: float
    """Seconds since the ranks were ready."""


class ScoreGroup:
    """Megatron ranks, one per slot, that only score sequences."""

    def __init__(self, config: ScoreConfig, processes: Processes) -> None:
        self.grid = RankGrid.of(config.trainer.parallel, processes.size)
        self._group: Group[ScoreWorker] = processes.group("scorer", self.grid)
        self._config = config
        model, _ = load_architecture_and_dtype(config.model.path, family=config.model.family)
        self._cost = sequence_cost(model)

    def start_workers(self) -> WorkerFuture[None]:
        """Start building the model on every rank."""
        config = self._config
        spec = ModelSpec(
            model_path=str(Path(config.model.path).absolute()),
            family=config.model.family,
            dtype=config.model.dtype,
            fused_lm_head=config.trainer.fused_lm_head,
            fp32_lm_head=config.model.fp32_lm_head,
            parallel=config.trainer.parallel,
            temperature=config.temperature,
            seed=config.seed,
        )
        return self._group.start(ScoreWorker, (spec,))

    def begin_score(self, sequences: Sequences) -> WorkerFuture[Scores]:
        """Start scoring the sequences, split over the data-parallel replicas."""
        work = ScoreRequest(
            sequences=self._group.put(sequences),
            lengths=tuple(map(len, sequences)),
            max_tokens_per_micro_batch=self._config.trainer.max_tokens_per_micro_batch,
            cost=self._cost,
        )
        return self._group.begin(ScoreWorker.score, work, dispatch=SCORE_BY_DP)


def open_tokens(config: ScoreConfig, path: Path, notify: Callable[[str], None]) -> TokenFile:
    """Check the model folder and the parallel sizes, and return the token file in `path`.

    Args:
        notify: receives the notices about the model folder.

    Raises:
        ConfigError: all problems of the model folder and the parallel sizes.
    """
    folder, family = Path(config.model.path), config.model.family
    require_family(str(folder), family)
    try:
        model = load_architecture_from_folder(folder, family=family)
    except (ConfigError, DataError) as e:
        raise ConfigError(f"model.path: {e}") from e
    problems = [f"model.path: {problem}" for problem in find_weight_problems(folder, model)]
    problems += parallel_problems(model, config.trainer.parallel, config.sized_placement.slots)
    if problems:
        raise ConfigError("\n".join(problems))
    for notice in find_folder_notices(folder, family=family):
        notify(f"model.path: {notice}")
    return TokenFile(path=path, vocab_size=model.vocab_size, max_positions=model.max_positions)


@contextmanager
def scorer_processes(config: ScoreConfig) -> Iterator[WorkerProcesses]:
    """Yield processes for ranks on a Ray cluster, which is joined or started for the block."""
    places = RequiredPaths(readable={"model.path": str(Path(config.model.path).absolute())})
    with reserved_slots(config.sized_placement, places, what="score", name="a scorer") as pool:
        yield make_rank_processes(pool, "scorer")


def score_file(
    config: ScoreConfig,
    processes: Processes,
    tokens: TokenFile,
    out: TextIO,
    report: Callable[[ScoreProgress], None],
    *,
    broadcast: Callable[[Sequences | None], object] = lambda sequences: None,
) -> None:
    """Write a line of scores for every line of `tokens`, in order.

    Args:
        report: receives the progress after each chunk.
        broadcast: sends the sequences to other ranks, which run `score_with_first`: an empty list once everything is
            checked, then each chunk, then None.

    Raises:
        MegarlError: a rank failed, a line is bad, or `out` cannot be written.
    """
    broadcast([])
    group = _start_group(config, processes)
    per_replica = MICRO_BATCHES_PER_CHUNK * config.trainer.max_tokens_per_micro_batch

    def chunks() -> Iterator[tuple[Sequence[TokenSequence], Sequences]]:
        for lines in tokens.chunks(max_tokens=group.grid.dp * per_replica, max_lines=LINES_PER_CHUNK):
            sequences = [line.token_ids for line in lines]
            broadcast(sequences)
            yield lines, sequences
        broadcast(None)

    started = time.perf_counter()
    num_lines = num_tokens = 0
    for lines, scores in _score_chunks(group, chunks()):
        _write(out, (line.to_json_line(scores[i].logprobs, scores[i].entropy) for i, line in enumerate(lines)))
        num_lines += len(lines)
        num_tokens += sum(len(line.token_ids) for line in lines)
        report(ScoreProgress(num_lines=num_lines, num_tokens=num_tokens, seconds=time.perf_counter() - started))


def score_with_first(config: ScoreConfig, ranks: SpmdWorld) -> None:
    """Score on a rank other than the first the sequences that the first one broadcasts in `score_file`."""
    ranks.broadcast_from_rank0(None)  # the first rank has checked everything: errors from here on are this rank's own
    group = _start_group(config, ranks)

    def chunks() -> Iterator[tuple[None, Sequences]]:
        while (sequences := ranks.broadcast_from_rank0(None)) is not None:
            yield None, sequences

    deque(_score_chunks(group, chunks()), maxlen=0)


def _start_group(config: ScoreConfig, processes: Processes) -> ScoreGroup:
    """Start the ranks and build the model on them."""
    group = ScoreGroup(config, processes)
    group.start_workers().result(config.placement.start_timeout_seconds)
    return group


def _score_chunks[L](group: ScoreGroup, chunks: Iterable[tuple[L, Sequences]]) -> Iterator[tuple[L, Scores]]:
    """Yield each chunk's lines with its scores, in order."""
    in_flight: deque[tuple[L, WorkerFuture[Scores]]] = deque()
    for lines, sequences in chunks:
        in_flight.append((lines, group.begin_score(sequences)))
        if len(in_flight) == CHUNKS_AHEAD:
            oldest, pending = in_flight.popleft()
            yield oldest, pending.result()
    for oldest, pending in in_flight:
        yield oldest, pending.result()


def _write(out: TextIO, lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        out.write(text)
        out.flush()
    except OSError as e:
        raise MegarlError(f"{out.name}: cannot be written: {e.strerror}") from e
