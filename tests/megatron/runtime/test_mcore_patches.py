"""The faults of megatron-core that megarl works around; a test fails where megatron-core no longer has its fault."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.errors import expect_error
from tests.megatron.ranks import run_ranks

IMPORT_WITHOUT_TRITON = """
import sys
from megarl.megatron.runtime import platform
sys.modules.pop("megatron.core.transformer.moe.ops.paged_stash", None)
sys.modules["triton"] = None
platform.prepare()
"""


def test_import_needs_triton():
    done = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert "moe/ops/paged_stash.py" in done.stderr
    assert "ModuleNotFoundError: import of triton halted" in done.stderr


def check_recomputation():
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    assert CheckpointWithoutOutput(fp8=False).fp8  # no fp8 is taken for fp8
    assert not CheckpointWithoutOutput().fp8


def check_routing_padding():
    from megatron.core.transformer.moe.token_dispatcher import pad_routing_map

    routing_map = torch.tensor([[True, False], [True, False], [False, True], [True, False]])
    padded = torch.tensor([[True, True], [True, True], [True, True], [True, True]])
    given = routing_map.clone()
    assert torch.equal(pad_routing_map(given, 4), padded)
    assert torch.equal(given, routing_map)
    pad_routing_map.__wrapped__(given, 4)
    assert torch.equal(given, padded)


def check_packed_rope():
    from megatron.core.models.common.embeddings import rope_utils

    bounds, table = torch.tensor([0, 4, 12]), torch.rand(12, 1, 1, 6)
    pack = torch.rand(12, 2, 6)
    expected = torch.cat(
        [rope_utils._apply_rotary_pos_emb_bshd(part[:, None], table[: len(part)])[:, 0] for part in pack.split([4, 8])]
    )
    rotate = rope_utils._apply_rotary_pos_emb_thd
    for size, rank, tokens in ((1, 0, [*range(12)]), (2, 0, [0, 3, 4, 5, 10, 11]), (2, 1, [1, 2, 6, 7, 8, 9])):
        of_rank = SimpleNamespace(size=lambda size=size: size, rank=lambda rank=rank: rank)
        assert torch.equal(rotate(pack[tokens], bounds, table, cp_group=of_rank), expected[tokens])
        # the table is as long as the pack, and taken for the angles of its tokens
        assert not torch.equal(rotate.__wrapped__(pack[tokens], bounds, table, cp_group=of_rank), expected[tokens])
    alone, longer = SimpleNamespace(size=lambda: 1, rank=lambda: 0), torch.cat([table, table])
    rotate_one = rope_utils._apply_rotary_pos_emb_bshd
    for function, num_rotations in ((rotate, 1), (rotate.__wrapped__, 2)):
        with patch.object(rope_utils, "_apply_rotary_pos_emb_bshd", wraps=rotate_one) as rotations:
            assert torch.equal(function(pack, bounds, longer, cp_group=alone), expected)
        assert rotations.call_count == num_rotations


def check_token_counts():
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    counts = torch.tensor([3, 1])
    assert torch.is_tensor(maybe_move_tensor_to_cpu.__wrapped__(counts, as_numpy=True))
    assert not torch.is_tensor(maybe_move_tensor_to_cpu(counts, as_numpy=True))


def check_uneven_gather():
    from megatron.core.tensor_parallel import mappings

    dist.init_process_group("gloo")
    rank, gather = dist.get_rank(), mappings._gather_along_first_dim
    mine = torch.full((rank + 1, 2), float(rank))
    with expect_error(RuntimeError, "invalid", "tensor"):
        gather.__wrapped__(mine, dist.group.WORLD, [1, 2])
    assert gather(mine, dist.group.WORLD, [1, 2])[:, 0].tolist() == [0, 1, 1]


def check_optimizer_on_host():
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    groups = [{"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]}]
    optimizer = SimpleNamespace(param_groups=groups, param_update_in_fp32=True)
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    copies = [dict(function(optimizer, 1.0)[2]) for function in (divide.__wrapped__, divide)]
    assert [list(found) for found in copies] == [[], groups[0]["params"]]


def run_check(check):
    from megarl.megatron.runtime import platform

    platform.prepare()
    check()


@pytest.mark.parametrize(
    ("check", "ranks"),
    [
        (check_recomputation, 1),
        (check_routing_padding, 1),
        (check_packed_rope, 1),
        (check_token_counts, 1),
        (check_uneven_gather, 2),
        (check_optimizer_on_host, 1),
    ],
)
def test_megatron_core_has_the_fault_and_the_patch_mends_it(check, ranks, tmp_path):
    run_ranks(run_check, ranks, tmp_path, check)
