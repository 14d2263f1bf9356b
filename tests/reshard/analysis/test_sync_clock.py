"""Simulated times of syncs: by hand, against the lower bound, and against the groups that ranks post."""

import subprocess
import sys
from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, settings

from megarl.reshard.analysis.forecast import forecast, time_sync
from megarl.reshard.analysis.nccl_progress import posted_groups
from megarl.reshard.analysis.scenario import STRATEGIES, arrange
from megarl.reshard.analysis.sync_clock import Exchange, Schedule, box_schedule, time_schedule
from megarl.reshard.layout.lower_bounds import seconds_bound
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.plan_cache import cached_index
from tests.reshard import simulate
from tests.reshard.planning.test_plan import groups_of, worlds
from tests.reshard.synthetic import MODEL_BYTES, scenario

RATES = LinkRates(network=1.0, nvlink=10.0, group_seconds=0.0)


def in_order(keys):
    """Each group waits for the one before."""
    return [[i - 1] if i else [] for i in range(len(keys))]


def send(step, source, to, num_bytes):
    return Exchange((step, 1), (source, to), ((source, to, num_bytes),), calls=1)


def timed(exchanges, nodes, rates=RATES):
    return time_schedule(Schedule(exchanges, in_order), Topology(nodes), rates)


def test_links_have_their_rates_in_each_direction():
    assert timed([send(0, 0, 1, 100)], (0, 0)).seconds_planned == 10
    assert timed([send(0, 0, 1, 100)], (0, 1)).seconds_planned == 100
    both_ways = [send(0, 0, 1, 100), send(0, 1, 0, 100)]
    found = timed(both_ways, (0, 1))
    assert (found.seconds_planned, found.busiest_nic_bytes, found.nic_share) == (100, 100, 1.0)
    assert (found.groups, found.p2p_calls) == (1, 2)
    to_two = [send(0, 0, 1, 100), send(0, 0, 2, 100)]
    assert timed(to_two, (0, 1, 2)).seconds_planned == 200
    assert timed([send(0, 0, 1, 100), send(0, 0, 2, 100)], (0, 0, 1)).seconds_planned == 100  # two links at once


def test_ranks_of_a_node_share_its_nics():
    pairs = [send(0, 0, 2, 100), send(0, 1, 3, 100)]
    times = {}
    for nics in (None, 1, 2, 4):
        rates = LinkRates(network=1.0, nvlink=10.0, nics_per_machine=nics, group_seconds=0.0)
        found = timed(pairs, (0, 0, 1, 1), rates)
        times[nics] = found.seconds_planned, found.busiest_nic_bytes, found.nic_share
    assert times == {None: (100, 100, 1.0), 1: (200, 200, 1.0), 2: (100, 100, 1.0), 4: (50, 100, 1.0)}


def test_groups_follow_each_other_and_wait_for_both_ends():
    """Rank 2 starts its second group when its first ends, at 10; only then can rank 1's message move."""
    exchanges = [send(0, 0, 2, 100), send(1, 1, 2, 50), send(2, 2, 0, 20)]
    assert timed(exchanges, (0, 0, 0)).seconds_planned == 10 + 5 + 2
    with_latency = LinkRates(network=1.0, nvlink=10.0, group_seconds=3.0)
    assert timed(exchanges, (0, 0, 0), with_latency).seconds_planned == 10 + 5 + 2 + 3 * 3
    independent = [send(0, 0, 2, 100), send(0, 1, 3, 30), send(1, 1, 3, 50)]
    assert timed(independent, (0, 0, 0, 0)).seconds_planned == 10


def test_an_all_gather_starts_when_all_ranks_have():
    late = send(0, 1, 0, 100)
    ring = Exchange((1, 0), (0, 1, 2), ((0, 1, 40), (1, 2, 40), (2, 0, 40)))
    assert timed([late, ring], (0, 0, 0)).seconds_planned == 10 + 4


def test_no_progress_is_an_error():
    stuck = Schedule([send(0, 0, 1, 1)], lambda keys: [[0] for _ in keys])
    with pytest.raises(AssertionError, match="2 groups never end"):
        time_schedule(stuck, Topology((0, 0)), RATES)


@given(worlds())
@settings(max_examples=60)
def test_no_plan_is_faster_than_the_bound(case):
    sources, needs, topology = case
    index = cached_index(sources, needs, topology, 200)
    schedule = box_schedule([plan_rank(index, rank) for rank in range(len(sources))], 8)
    found = time_schedule(schedule, topology, RATES)
    assert found.seconds_planned >= seconds_bound(sources, needs, topology, RATES) * (1 - 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", [(1, 4, 2, 2), (2, 2, 2, 2), (2, 4, 2, 2)], ids=str)
def test_no_strategy_is_faster_than_the_bound_and_all_bytes_are_timed(strategy, layout):
    case = scenario(*layout, nodes=2, bucket_bytes=1 << 14)
    arrangement = arrange(strategy, case)
    found = time_sync(arrangement, case, RATES)
    assert found.seconds_planned >= seconds_bound(case.sources, arrangement.needs, case.topology, RATES) * (1 - 1e-9)
    between = forecast(arrangement, case).bytes_between
    crossing = sum(n for (a, b), n in between.items() if not case.topology.same_node(a, b))
    assert (found.busiest_nic_bytes > 0) == (crossing > 0) == (found.nic_share is not None)


@given(worlds())
@settings(max_examples=40)
def test_groups_and_calls_are_those_that_ranks_post(case):
    sources, needs, topology = case
    groups = [range(i, min(i + 2, len(sources))) for i in range(0, len(sources), 2)]
    with mock.patch("megarl.reshard.planning.rounds.LARGE_MESSAGE_BYTES", 8):
        rounds = simulate.plans(sources, needs, topology, 100, groups)
        index = cached_index(sources, needs, topology, 100, groups=groups)
    schedule = box_schedule([plan_rank(index, rank) for rank in range(len(sources))], index.large_bytes)
    found = time_schedule(schedule, topology, RATES)
    posted = [posted_groups(of_rank, groups_of(groups, rank)) for rank, of_rank in enumerate(rounds)]
    assert found.groups == max(map(len, posted))
    assert found.p2p_calls == max(sum(len(g.sends) + len(g.receives) for g in of_rank) for of_rank in posted)
    sent = Counter()
    for exchange in schedule.exchanges:
        for source, to, num_bytes in exchange.edges:
            sent[source, to] += num_bytes
    expected = Counter()
    for rank, of_rank in enumerate(rounds):
        for this in of_rank:
            for hop in this.hops:
                for message in hop.receives:
                    expected[message.source, rank] += message.num_bytes
            members = sorted(groups_of(groups, rank))
            for gather in this.gathers:  # a rank sends to the next in the ring all shares but that one's own
                expected[rank, members[(members.index(rank) + 1) % len(members)]] += gather.share * (len(members) - 1)
    assert sent == expected


def test_one_sync_on_one_node_takes_the_bytes_of_a_rank():
    """1-4-2 -> 1-2: each rank receives a quarter of the model from its partner, in one group."""
    case = scenario(1, 4, 2, 2)
    for strategy in ("micro_dp", "exact"):
        found = time_sync(arrange(strategy, case), case, RATES)
        assert (found.seconds_planned, found.groups) == (MODEL_BYTES / 4 / 10, 1)
        assert (found.busiest_nic_bytes, found.nic_share) == (0, None)


def test_gather_hf_gathers_each_stage_and_then_broadcasts_across_stages():
    """2-2-1 -> 1-2: half of a stage's half from the other rank, then the other stage's half over the network."""
    case = scenario(2, 2, 1, 2, nodes=2)
    found = time_sync(arrange("gather_hf", case), case, RATES)
    assert found.seconds_planned == MODEL_BYTES / 4 / 10 + MODEL_BYTES / 2
    assert (found.groups, found.p2p_calls, found.busiest_nic_bytes) == (2, 0, MODEL_BYTES / 2)


def test_clock_needs_no_torch():
    code = "import sys, megarl.reshard.analysis.sync_clock; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
