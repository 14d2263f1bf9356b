"""Groups of otherwise unrelated processes, which exchange tensors over gloo or NCCL."""

from __future__ import annotations

import os

import pytest
import torch

from megarl.reshard.transfer.process_groups import TransferGroup, connect_group, open_store
from megarl.reshard.transfer.transport import Deadline, wait_for
from tests.megatron.ranks import run_ranks


def exchange(port, backend):
    """Exchange two tensors with the other rank; return those received."""
    rank = int(os.environ["RANK"])
    device = "cuda" if backend == "nccl" else "cpu"
    transport = connect_group(TransferGroup("127.0.0.1", port, "exchange", 2, 30.0, backend), rank, "plan")
    mine = [torch.full((3,), 10.0 * rank + n, device=device) for n in range(2)]
    theirs = [torch.zeros(3, device=device) for _ in range(2)]
    other = 1 - rank
    received, sent = transport.start([(tensor, other) for tensor in mine], [(tensor, other) for tensor in theirs])
    wait_for([*received, *sent], Deadline(30.0))
    got = [tensor.tolist() for tensor in theirs]
    transport.close()
    return got


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_unrelated_processes_exchange_tensors(backend, tmp_path):
    store = open_store("127.0.0.1")
    device = "cuda" if backend == "nccl" else "cpu"
    assert run_ranks(exchange, 2, tmp_path, store.port, backend, device=device) == [[10.0] * 3, [11.0] * 3]
