"""Groups of otherwise unrelated processes, which exchange tensors over gloo or NCCL."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.transfer.process_groups import NCCL_ORDER, TransferGroup, connect_group
from megarl.reshard.transfer.sync_store import open_store
from megarl.reshard.transfer.transport import Deadline, wait_for
from tests.megatron.ranks import run_ranks
from tests.time_limits import HANG_SECONDS


def exchange(port, backend):
    """Exchange two tensors with the other rank; return those received."""
    rank = int(os.environ["RANK"])
    device = "cuda" if backend == "nccl" else "cpu"
    transport = connect_group(TransferGroup("127.0.0.1", port, "exchange", 2, HANG_SECONDS, backend), rank, "plan")
    mine = [torch.full((3,), 10.0 * rank + n, device=device) for n in range(2)]
    theirs = [torch.zeros(3, device=device) for _ in range(2)]
    other = 1 - rank
    received, sent = transport.start([(tensor, other) for tensor in mine], [(tensor, other) for tensor in theirs])
    wait_for([*received, *sent], Deadline(HANG_SECONDS))
    got = [tensor.tolist() for tensor in theirs]
    transport.close()
    return got


@pytest.mark.parametrize("backend", ["gloo", NCCL_ORDER, pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_unrelated_processes_exchange_tensors(backend, tmp_path):
    store = open_store("127.0.0.1")
    device = "cuda" if backend == "nccl" else "cpu"
    assert run_ranks(exchange, 2, tmp_path, store.port, backend, device=device) == [[10.0] * 3, [11.0] * 3]


def connect_in_threads(size, delays, timeout_seconds, backend="gloo"):
    """Connect some ranks of a group of `size`, each after its delay; return seconds or the error by rank."""
    store, started = open_store("127.0.0.1"), time.monotonic()

    def connect(rank):
        time.sleep(delays[rank])
        transfer_group = TransferGroup("127.0.0.1", store.port, "threads", size, timeout_seconds, backend)
        try:
            transport = connect_group(transfer_group, rank, "plan")
        except WeightSyncError as error:
            return str(error)
        return time.monotonic() - started, transport

    with ThreadPoolExecutor(len(delays)) as pool:
        outcomes = list(pool.map(connect, range(len(delays))))
    for outcome in outcomes:
        if isinstance(outcome, tuple):
            outcome[1].close()
    return [outcome if isinstance(outcome, str) else outcome[0] for outcome in outcomes]


@pytest.mark.parametrize("backend", ["gloo", NCCL_ORDER])
def test_no_rank_is_connected_before_all_are(backend):
    assert all(seconds >= 0.5 for seconds in connect_in_threads(3, [0.0, 0.5, 0.0], HANG_SECONDS, backend))


@pytest.mark.parametrize("backend", ["gloo", NCCL_ORDER])
def test_error_names_the_ranks_that_did_not_connect(backend):
    outcomes = connect_in_threads(4, [0.0, 0.0], 0.5, backend)
    for rank, outcome in enumerate(outcomes):
        assert outcome.startswith(f"rank {rank} of 4 could not connect to the other ranks at 127.0.0.1:")
        assert outcome.endswith("within 0.5 s: nothing from ranks 2, 3")


def test_environment_is_restored_after_the_creation_of_a_group(monkeypatch):
    from megarl.reshard.transfer import process_groups

    for before in ("3", None):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        with process_groups._errors_handled_by_transport():
            assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
