"""Saves and restores a rank's RNG states: torch on CPU and device, megatron-core's tracker, numpy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
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
