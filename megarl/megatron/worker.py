"""What the controller may call on a trainer rank. Imports nothing heavy: the controller names these methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.megatron.work import PushOrder, TrainerSpec, TrainStats, TrainWork

if TYPE_CHECKING:
    from megarl.megatron.trainer import MegatronTrainer
    from megarl.reshard.strategy import Strategy, SyncStats


class TrainerWorker:
    """One rank. Every method runs on all ranks together."""

    def __init__(self, spec: TrainerSpec) -> None:
        from megarl.megatron import platform

        platform.prepare()
        from megarl.megatron.trainer import MegatronTrainer

        self._spec = spec
        self._trainer: MegatronTrainer = MegatronTrainer(spec)
        self._strategy: Strategy | None = None

    def train_step(self, work: TrainWork) -> TrainStats:
        """Train on the work; metrics are complete on each replica's answering rank (`RankGrid.output_rank`)."""
        return self._trainer.train_step(work)

    def push_weights(self, order: PushOrder) -> SyncStats:
        """Deliver the current weights to the order's sinks.

        Returns:
            What all ranks together moved.
        """
        from megarl.megatron import push

        if self._strategy is None:
            assert self._spec.weight_sync is not None
            self._strategy = push.make(self._spec.weight_sync, self._trainer, senders=sorted(order.sinks))
        return push.run(self._strategy, self._trainer, order)

    def save_hf(self, folder: str) -> None:
        """Write the model in Hugging Face format into `folder`, with the tokenizer of the model it started from."""
        from megarl.megatron import export

        export.save(self._trainer, self._spec.model_path, folder)
