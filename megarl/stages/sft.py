"""Supervised fine-tuning (SFT) on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import override

from megarl.batch.sample_table import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.config import SftConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.tokenizer import load_tokenizer
from megarl.functional import Denominators
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.families.model_folder import read_hf_config
from megarl.megatron.requests import MiniBatch, TrainRequest
from megarl.run.checkpointer import Checkpointer
from megarl.run.events import EventLog
from megarl.stages.supervised import SupervisedRun
from megarl.workers.payload import LocalPayload


class SftRun(SupervisedRun):
    """A supervised run on demonstrations, with one optimizer step per batch."""

    def __init__(
        self,
        config: SftConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """Arguments as for `SupervisedRun`."""
        context = int(read_hf_config(Path(config.model.path))["max_position_embeddings"])
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self._config = config
        self._rows = load_demonstrations(config.data, tokenizer, max_tokens=context)
        super().__init__(config, events, trainer, num_rows=len(self._rows), checkpoints=checkpoints, resume=resume)

    @override
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        return make_sft_request(self._config, [self._rows[i] for i in rows])


def make_sft_request(config: SftConfig, rows: Sequence[Trajectory]) -> TrainRequest:
    """Return the request for one optimizer step on `rows`."""
    samples = tuple(SampleRef(payload=0, index=i, num_tokens=row.num_tokens) for i, row in enumerate(rows))
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    return TrainRequest(
        mini_batches=(
            MiniBatch(samples=samples, denominators=Denominators(num_tokens=tokens, num_sequences=len(rows))),
        ),
        payloads=(LocalPayload(list(rows)),),
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
    )
