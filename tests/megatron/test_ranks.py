"""Tests of `run_ranks`: results, failures and hangs."""

import sys
import time

import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from tests.errors import expect_error
from tests.megatron.rank_models import gather
from tests.megatron.ranks import run_ranks

process_state: list[int] = []


def set_process_state():
    imported = "megatron.core" in sys.modules
    dist.init_process_group("gloo")
    process_state.append(dist.get_rank())
    return gather((imported, process_state))  # without destroying the process group


def fail_on_rank_1():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    dist.barrier()


def hang():
    time.sleep(6000)


def test_each_call_runs_in_fresh_preloaded_processes(tmp_path):
    for world in (2, 3, 2):
        assert run_ranks(set_process_state, world, tmp_path) == [(True, [rank]) for rank in range(world)]


def test_traceback_of_the_failing_rank_is_raised(tmp_path):
    with expect_error(ProcessRaisedException, "Process 1", "fail_on_rank_1", "ValueError", "1"):
        run_ranks(fail_on_rank_1, 2, tmp_path)


def test_hung_ranks_report_their_stacks(tmp_path):
    with expect_error(TimeoutError, "1", "0", "hang", "rank"):
        run_ranks(hang, 2, tmp_path, timeout=1)
