"""Groups of otherwise unrelated processes, which exchange tensors over gloo or NCCL."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from megarl.errors import WeightSyncError
from megarl.reshard.transfer import process_groups
from megarl.reshard.transfer.process_groups import NCCL_ORDER, TransferGroup, connect_group
from megarl.reshard.transfer.sync_store import open_store
from megarl.reshard.transfer.transport import Deadline, wait_for
from tests.megatron.ranks import run_ranks
from tests.time_limits import HANG_SECONDS, wait_until


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


@pytest.mark.parametrize("backend", ["gloo", NCCL_ORDER])
def test_no_rank_is_connected_before_all_are(backend):
    store = open_store("127.0.0.1")
    group = TransferGroup("127.0.0.1", store.port, "threads", 3, HANG_SECONDS, backend)
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(connect_group, group, rank, "plan") for rank in (0, 2)]
        assert wait_until(partial(PrefixStore(group.name, store).check, ["rank 0", "rank 2"]))
        assert not any(future.done() for future in connecting)
        connecting.append(pool.submit(connect_group, group, 1, "plan"))
    for future in connecting:
        future.result().close()


@pytest.mark.parametrize("backend", ["gloo", NCCL_ORDER])
def test_error_names_the_ranks_that_did_not_connect(backend, monkeypatch):
    store = open_store("127.0.0.1")
    # only the wait for the other ranks ends at the timeout
    monkeypatch.setattr(process_groups, "TCPStore", lambda host, port, timeout: dist.TCPStore(host, port))
    for rank, missing in enumerate(["1, 2, 3", "2, 3"]):
        with pytest.raises(WeightSyncError) as error:
            connect_group(TransferGroup("127.0.0.1", store.port, "alone", 4, 0.2, backend), rank, "plan")
        said = str(error.value)
        assert said.startswith(f"rank {rank} of 4 could not connect to the other ranks at 127.0.0.1:")
        assert said.endswith(f"within 0.2 s: nothing from ranks {missing}")


def test_environment_is_restored_after_the_creation_of_a_group(monkeypatch):
    for before in ("3", None):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        with process_groups._errors_handled_by_transport():
            assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
