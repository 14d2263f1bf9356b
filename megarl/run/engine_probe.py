"""Compares engines and trainer on a short completion of each engine, where a batch has no token of the last version."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megarl.batch.sample_table import SampleKey
from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.requests import MISMATCH_METRICS
from megarl.run.rollout_batch import RolloutBatch

PROBE_TOKENS = 16
"""Largest number of tokens that an engine samples."""


def compare_engines(config: RunConfig, trainer: TrainerGroup, probe: RolloutBatch) -> dict[str, float]:
    """Return the metrics of the mismatch over the sampled tokens of `probe`, which are of the trainer's weights."""
    if not probe.groups:  # an environment has failed in all of them
        return {}
    column = trainer.logprobs(probe.forward_request(config)).fetch()
    logprobs: Mapping[SampleKey, np.ndarray] = {key: values for part in column for key, values in part.items()}
    differences = [
        (logprobs[key] - trajectory.logprobs)[trajectory.loss_mask] for key, trajectory in _trajectories(probe).items()
    ]
    difference = np.concatenate(differences).astype(np.float64)
    if not len(difference):
        return {}
    # k3 estimate of KL(rollout || trainer), as over the tokens of a batch
    values = {
        "logprob_abs_max": np.abs(difference).max(),
        "logprob_abs_p99": np.quantile(np.abs(difference), 0.99),
        "logprob_kl": (np.exp(difference) - 1 - difference).mean(),
    }
    return {MISMATCH_METRICS[key]: float(value) for key, value in values.items()}


def _trajectories(probe: RolloutBatch) -> dict[SampleKey, Trajectory]:
    groups = [group.payload.fetch() for group in probe.groups]
    return {key: groups[key[0]][key[1]] for keys in probe.segment_keys for key in keys}
