"""Scores of a file of token sequences: checked first, then chunk by chunk over the ranks, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.config import ScoreConfig
from megarl.controller.ray_session import reserved_slots
from megarl.data.token_file import TokenFile, TokenLine
from megarl.errors import ConfigError, DataError, MegarlError
from megarl.groups.trainer_group import rank_processes
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.layout_checks import parallel_problems
from megarl.megatron.families.load_architecture import read_model
from megarl.megatron.families.model_folder import read_decoder, weight_problems
from megarl.megatron.requests import ModelSpec
from megarl.megatron.score_worker import SCORE_BY_DP, Scores, ScoreWork, ScoreWorker
from megarl.placement.rank_grid import RankGrid
from megarl.preflight.cluster.cluster_check import Places
from megarl.workers.group import Group, Pending, Processes, WorkerProcesses
from megarl.workers.spmd import SpmdWorld

MICRO_BATCHES_PER_CHUNK = 16
"""Of each replica, when full: enough to balance the replicas and to fill a pipeline."""

LINES_PER_CHUNK = 8192

Sequences = Sequence[NDArray[np.int32]]
"""[sequence][token]."""

L = TypeVar("L")

CHUNKS_AHEAD = 2
"""Chunks sent to the ranks before the oldest is waited for: they never idle while lines are read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """How far scoring is."""

    num_lines: int
    num_tokens: int
    seconds: float
    """Since the ranks were ready."""


class ScoreGroup:
    """One Megatron rank per slot, that can only score."""

    def __init__(self, config: ScoreConfig, processes: Processes) -> None:
        self.grid = RankGrid.of(config.trainer.parallel, processes.size)
        self._group: Group[ScoreWorker] = processes.group("scorer", self.grid)
        self._config = config
        model, _ = read_model(config.model.path)
        self._cost = sequence_cost(model)

    def start_workers(self) -> Pending[None]:
        """Build the model on every rank."""
        config = self._config
        spec = ModelSpec(
            model_path=str(Path(config.model.path).absolute()),
            dtype=config.model.dtype,
            parallel=config.trainer.parallel,
            temperature=config.temperature,
            seed=config.seed,
        )
        return self._group.start(ScoreWorker, (spec,))

    def begin_score(self, sequences: Sequences) -> Pending[Scores]:
        """Start to score the sequences, split over the data-parallel replicas."""
        work = ScoreWork(
            sequences=self._group.put(sequences),
            lengths=tuple(map(len, sequences)),
            max_tokens_per_micro_batch=self._config.trainer.max_tokens_per_micro_batch,
            cost=self._cost,
        )
        return self._group.begin(ScoreWorker.score, work, via=SCORE_BY_DP)


def open_tokens(config: ScoreConfig, path: Path) -> TokenFile:
    """The file of tokens in `path`, for the model of `config`.

    Raises:
        ConfigError: names every problem of the model folder, and every parallel size that the model does not allow.
    """
    folder = Path(config.model.path)
    try:
        model = read_decoder(folder)
    except (ConfigError, DataError) as e:
        raise ConfigError(f"model.path: {e}") from e
    problems = [f"model.path: {problem}" for problem in weight_problems(folder, model)]
    problems += parallel_problems(model, config.trainer.parallel, config.sized_placement.slots)
    if problems:
        raise ConfigError("\n".join(problems))
    return TokenFile(path=path, vocab_size=model.vocab_size, max_positions=model.max_positions)


@contextmanager
def scorers(config: ScoreConfig) -> Iterator[WorkerProcesses]:
    """Processes for ranks, on Ray."""
    places = Places(readable={"model.path": str(Path(config.model.path).absolute())})
    with reserved_slots(config.sized_placement, places, what="score", name="a scorer") as pool:
        yield rank_processes(pool, "scorer")


def score_file(
    config: ScoreConfig,
    processes: Processes,
    tokens: TokenFile,
    out: TextIO,
    tell: Callable[[Scored], None],
    *,
    share: Callable[[Sequences | None], object] = lambda sequences: None,
) -> None:
    """Write a line of scores for every line of `tokens`, in order; `tell` hears of each chunk that is written.

    Args:
        share: lets ranks that `score_with_first` know what to score: nothing at first, each chunk, None at the end.

    Raises:
        MegarlError: a rank failed, a line is bad, or `out` cannot be written.
    """
    share([])
    group = _started(config, processes)
    per_replica = MICRO_BATCHES_PER_CHUNK * config.trainer.max_tokens_per_micro_batch

    def chunks() -> Iterator[tuple[Sequence[TokenLine], Sequences]]:
        for lines in tokens.chunks(max_tokens=group.grid.dp * per_replica, max_lines=LINES_PER_CHUNK):
            sequences = [line.token_ids for line in lines]
            share(sequences)
            yield lines, sequences
        share(None)

    started = time.perf_counter()
    num_lines = num_tokens = 0
    for lines, scores in _scored(group, chunks()):
        _write(out, (line.with_scores(scores[i].logprobs, scores[i].entropy) for i, line in enumerate(lines)))
        num_lines += len(lines)
        num_tokens += sum(len(line.token_ids) for line in lines)
        tell(Scored(num_lines=num_lines, num_tokens=num_tokens, seconds=time.perf_counter() - started))


def score_with_first(config: ScoreConfig, ranks: SpmdWorld) -> None:
    """Score, on a rank that is not the first, what the first one reads and writes in `score_file`."""
    ranks.from_first(None)  # everything has been checked: from here on it is not another rank's mistake
    group = _started(config, ranks)

    def chunks() -> Iterator[tuple[None, Sequences]]:
        while (sequences := ranks.from_first(None)) is not None:
            yield None, sequences

    deque(_scored(group, chunks()), maxlen=0)


def _started(config: ScoreConfig, processes: Processes) -> ScoreGroup:
    """Ranks with the model."""
    group = ScoreGroup(config, processes)
    group.start_workers().result(config.placement.start_timeout_seconds)
    return group


def _scored(group: ScoreGroup, chunks: Iterable[tuple[L, Sequences]]) -> Iterator[tuple[L, Scores]]:
    """Every chunk's lines with its scores, in order."""
    under_way: deque[tuple[L, Pending[Scores]]] = deque()
    for lines, sequences in chunks:
        under_way.append((lines, group.begin_score(sequences)))
        if len(under_way) == CHUNKS_AHEAD:
            oldest, pending = under_way.popleft()
            yield oldest, pending.result()
    for oldest, pending in under_way:
        yield oldest, pending.result()


def _write(out: TextIO, lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        out.write(text)
        out.flush()
    except OSError as e:
        raise MegarlError(f"{out.name}: cannot be written: {e.strerror}") from e
