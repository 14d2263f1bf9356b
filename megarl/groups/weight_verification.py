"""Compares samples of the weights that engines have received with the trainer's, before the engines serve them.

sample_boxes      engines    the boxes of this policy version
digest_samples    trainer    digests of the parts that each rank holds
verify_weights    engines    comparison with their own parameters
"""

from __future__ import annotations

from megarl.errors import WeightSyncError
from megarl.groups.engine_group import EngineHandles
from megarl.groups.trainer_group import TrainerGroup
from megarl.reshard.transfer.sample_digests import merge_digests


def verify_weights(trainer: TrainerGroup, engines: EngineHandles, policy_version: int, sample: int) -> None:
    """Compare `sample` boxes in every engine, within an update that has not ended.

    Raises:
        WeightSyncError: a box differs; names tensor, box, engine and TP rank. The engine serves no requests until an
            update succeeds.
    """
    samples, *others = engines.call("sample_boxes", policy_version, sample)
    for engine, of_engine in zip(engines.engines[1:], others, strict=True):
        if of_engine != samples:
            raise WeightSyncError(f"{engine.name} has another weight layout than {engines.engines[0].name}")
    expected = merge_digests(samples, trainer.digest_samples(samples))
    found = engines.call("verify_weights", expected)
    problems = [f"{engine.name}: {p}" for engine, p in zip(engines.engines, found, strict=True) if p is not None]
    if problems:
        raise WeightSyncError(f"version {policy_version}: {'; '.join(problems)}")
