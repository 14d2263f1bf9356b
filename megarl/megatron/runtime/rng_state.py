"""The random generators of a rank: torch's on host and device, megatron-core's, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from megarl.megatron.modeling.megatron_model import ModelRank


def read_generators(rank: ModelRank) -> dict[str, Any]:
    """Where they are, for a model of this process; `torch.load` reads it with `weights_only`."""
    rank.activate()
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


def write_generators(rank: ModelRank, states: dict[str, Any]) -> None:
    """Have them go on from where `read_generators` found them."""
    rank.activate()
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracked"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["host"])
    random.setstate(states["python"])
    numpy = states["numpy"]
    keys = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {"key": keys, "pos": numpy["state"]["pos"]}})
