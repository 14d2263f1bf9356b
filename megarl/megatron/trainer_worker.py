"""What the controller may call on the rank of a model. Imports nothing heavy: the controller names these methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.batch.pack import PerToken
from megarl.config.trainer import OffloadConfig
from megarl.megatron.requests import (
    EvaluationWork,
    Invitation,
    Key,
    LoadReport,
    ModelSpec,
    SavedPart,
    SaveOrder,
    SaveStats,
    SyncSetup,
    TrainerSpec,
    TrainStats,
    TrainWork,
)
from megarl.process.startup_trace import importing

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.megatron.hf_weights.weight_push import WeightPusher
    from megarl.megatron.modeling.megatron_model import LocalPack, ModelRank
    from megarl.megatron.runtime.offload import OffloadedTensors, OffloadStats
    from megarl.megatron.training.trainer import MegatronTrainer
    from megarl.reshard.planning.strategy import SyncStats
    from megarl.reshard.transfer.process_groups import Meeting


class Evaluator(ABC):
    """One rank of a model that can be evaluated. Every method runs on all ranks together.

    Answers are on the answering rank of each replica (`RankGrid.output_rank`), and empty on others. Token by token they
    have an entry for each token of the trajectory, which is about that token, given those before it; the first is 0.
    """

    _rank: ModelRank

    @abstractmethod
    def _require_weights(self) -> None:
        """Have them on the device."""

    @abstractmethod
    def _rest(self) -> None:
        """Leave the device to others, where the model swaps."""

    def logprobs(self, work: EvaluationWork) -> Mapping[Key, PerToken]:
        """The tokens' log-probabilities."""
        from megarl.megatron.modeling.logprobs import token_logprobs

        def of(logits_tv: Tensor, packed: LocalPack) -> Tensor:
            return token_logprobs(logits_tv, packed.batch.target_ids_T)[None]

        return {key: _of_next(found_1n[0]) for key, found_1n in self._evaluate(work, of)}

    def values(self, work: EvaluationWork) -> Mapping[Key, PerToken]:
        """Of a value model: what it expects before each token."""
        return {key: _of_next(found_1n[0]) for key, found_1n in self._evaluate(work, _value)}

    def scores(self, work: EvaluationWork) -> Mapping[Key, float]:
        """Of a value model: what it says of each trajectory as a whole, at its last token."""
        return {key: float(found_1n[0, -1]) for key, found_1n in self._evaluate(work, _value)}

    def _evaluate(
        self, work: EvaluationWork, of: Callable[[Tensor, LocalPack], Tensor]
    ) -> Iterator[tuple[Key, Tensor]]:
        self._require_weights()
        payloads = [payload.fetch() for payload in work.payloads]
        refs = [[work.samples[i] for i in indices] for indices in work.micro_batches]
        found = self._rank.of_sequences([[payloads[r.payload][r.index] for r in batch] for batch in refs], of)
        groups = self._rank.groups
        if self._rank.is_last and groups.tp.rank() == groups.cp.rank() == 0:
            for batch, of_batch in zip(refs, found, strict=True):
                yield from zip((ref.key for ref in batch), of_batch, strict=True)
        self._rest()


class FrozenWorker(Evaluator):
    """One rank of a model that never changes."""

    def __init__(self, spec: ModelSpec) -> None:
        with importing():
            from megarl.megatron.runtime import platform

            platform.prepare()
            from megarl.megatron.modeling.megatron_model import ModelRank
            from megarl.megatron.runtime.offload import OffloadedTensors

        self._rank = ModelRank(spec)
        self._memory: OffloadedTensors = OffloadedTensors()
        self._rest()

    def _require_weights(self) -> None:
        self._memory.onload()

    def _rest(self) -> None:
        if self._rank.spec.swaps:
            self._memory.offload(self._rank.tensors().values())


class TrainerWorker(Evaluator):
    """One rank of a model that trains."""

    def __init__(self, spec: TrainerSpec) -> None:
        with importing():
            from megarl.megatron.runtime import platform

            platform.prepare()
            from megarl.megatron.training.trainer import MegatronTrainer

        self._spec = spec
        self._trainer: MegatronTrainer = MegatronTrainer(spec)
        self._rank = self._trainer.rank
        self._pusher: WeightPusher | None = None
        self._rest()

    def train_step(self, work: TrainWork) -> TrainStats:
        """Train on the work; metrics are complete on each replica's answering rank (`RankGrid.output_rank`)."""
        stats = self._trainer.train_step(work)
        self._rest()
        return stats

    def offload(self, kinds: OffloadConfig) -> OffloadStats:
        """Move what `kinds` names off the device; what this rank freed."""
        return self._trainer.memory.offload(kinds)

    def onload(self, _: None) -> OffloadStats:
        """Bring all of it back; what this rank took. The other methods bring back what they need by themselves."""
        return self._trainer.memory.onload()

    def prepare_sync(self, setup: SyncSetup) -> Invitation | None:
        """Plan how weights travel from now on; on rank 0, what engines need to know that receive them themselves."""
        from megarl.megatron.hf_weights.weight_push import WeightPusher

        if self._pusher is not None:
            self._pusher.close()
        self._pusher = WeightPusher(self._trainer.rank, setup)
        return self._pusher.invitation

    def join_engines(self, meeting: Meeting) -> None:
        """Connect with engines that receive the weights themselves, while they do the same."""
        assert self._pusher is not None, "join_engines needs prepare_sync first"
        self._pusher.join(meeting)

    def push_weights(self, _: None) -> SyncStats:
        """Deliver the current weights as `prepare_sync` has planned; what this rank counted."""
        assert self._pusher is not None, "push_weights needs prepare_sync first"
        self._require_weights()
        return self._pusher.push()

    def save_hf(self, folder: str) -> None:
        """Write the model in Hugging Face format into `folder`, with the tokenizer of the model it started from."""
        from megarl.megatron.hf_weights import export

        self._require_weights()
        export.save(self._trainer.rank, self._spec.model.model_path, folder)
        self._rest()

    def begin_save(self, order: SaveOrder) -> SaveStats:
        """Save the training state: what this rank counted; training may go on.

        What cannot be written is said by `finish_save`, which has to come before the next save.
        """
        stats = self._trainer.checkpoint.begin_save(order)
        self._rest()
        return stats

    def save_is_written(self, _: None) -> bool:
        """True once `finish_save` need not wait for this rank. Does not wait itself."""
        return self._trainer.checkpoint.is_written

    def finish_save(self, _: None) -> SavedPart:
        """Wait until all ranks have written; this rank's files.

        Raises:
            DataError: a rank could not write; names it, the file and the reason. The next save may be begun.
        """
        return self._trainer.checkpoint.finish_save()

    def load_training(self, folder: str) -> LoadReport:
        """Go on from the training state in `folder`; what this rank read.

        Raises:
            DataError: it is none of this model, and nothing has been changed; or a file is damaged, and some has.
        """
        report = self._trainer.checkpoint.load(Path(folder))
        self._rest()
        return report

    def _require_weights(self) -> None:
        self._trainer.memory.onload_weights()

    def _rest(self) -> None:
        if self._rank.spec.swaps:
            self._trainer.memory.offload(OffloadConfig(optimizer=True, gradients=True, weights=True))


def _value(values_t1: Tensor, _: LocalPack) -> Tensor:
    return values_t1.T


def _of_next(found_n: Tensor) -> PerToken:
    """What each position says of the token behind it, at that token."""
    out: PerToken = np.zeros(len(found_n), np.float32)
    out[1:] = found_n[:-1].numpy()
    return out
