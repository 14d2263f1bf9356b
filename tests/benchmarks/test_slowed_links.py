"""The twin with rates: what occupies links, in which order, for how long; and the commands that use it.

No test looks at the time that a sync took: it depends on the machine. The time for which links are occupied does not.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.reshard import __main__ as benchmark
from benchmarks.reshard import clock, published, twin
from benchmarks.reshard.slowed_links import SlowedLinks, SlowedTransport
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.cli.tools.reshard_explain import make_scenario
from megarl.megatron.families.load_architecture import load_architecture
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.transfer.transport import Deadline, wait_for
from tests.benchmarks.test_reshard import run_module
from tests.megatron.ranks import run_ranks
from tests.time_limits import UNREACHED_SECONDS

RATES = LinkRates(network=50e6, nvlink=400e6, group_seconds=0)
TWO_MACHINES = Topology((0, 0, 1, 1))


@pytest.fixture
def links(tmp_path):
    """Return the links of each of four ranks on two machines."""
    (tmp_path / "links").touch()
    made = [SlowedLinks(tmp_path / "links", TWO_MACHINES, RATES) for _ in TWO_MACHINES.nodes]
    yield made
    for each in made:
        each.close()


def occupied(links, kind):
    """Return {(rank, "sends" or "receives"): seconds} of links that were occupied, one of the kind for each rank."""
    seconds = links.seconds(kind)
    return {(int(i), ("sends", "receives")[d]): seconds[d, i] for d, i in zip(*np.nonzero(seconds), strict=True)}


def test_message_moves_when_both_ends_have_started_it_and_occupies_both_links(links):
    (sent,) = links[0].start(0, [(2, 1_000_000)], [])
    assert occupied(links[3], "nic") == {}
    (received,) = links[2].start(2, [], [(0, 1_000_000)])
    assert sent == received
    assert links[0].end([sent]) == links[2].end([received])
    assert occupied(links[1], "nic") == pytest.approx({(0, "sends"): 0.02, (2, "receives"): 0.02})
    assert occupied(links[1], "nvlink") == {}
    links[2].start(2, [(3, 1_000_000)], [])
    links[3].start(3, [], [(2, 1_000_000)])
    assert occupied(links[1], "nvlink") == pytest.approx({(2, "sends"): 0.0025, (3, "receives"): 0.0025})


def test_links_work_off_messages_one_after_another_in_the_order_in_which_they_can_move(links):
    first, second = links[0].start(0, [(2, 1_000_000), (3, 500_000)], [])
    links[3].start(3, [], [(0, 500_000)])  # the second can move before the first
    links[2].start(2, [], [(0, 1_000_000)])
    assert links[0].end([first]) - links[0].end([second]) >= 0.02 - 1e-6
    assert links[0].end([first, second]) == links[0].end([first])
    # the other direction of the same links is free: it ends before what the first two occupy
    (back,) = links[2].start(2, [(0, 100_000)], [])
    links[0].start(0, [], [(2, 100_000)])
    assert occupied(links[0], "nic")[0, "receives"] == pytest.approx(0.002)
    assert back[:2] == (2, 0)


def test_ring_of_an_all_gather_moves_once_all_ranks_have_started_it(links):
    for rank in range(3):
        links[rank].start_ring((0, 1, 2, 3), 1000)
        assert occupied(links[0], "nic") == occupied(links[0], "nvlink") == {}
    links[3].start_ring((0, 1, 2, 3), 1000)
    nic, nvlink = 3000 / 50e6, 3000 / 400e6
    expected = {(1, "sends"): nic, (2, "receives"): nic, (3, "sends"): nic, (0, "receives"): nic}
    assert occupied(links[0], "nic") == pytest.approx(expected)
    expected = {(0, "sends"): nvlink, (1, "receives"): nvlink, (2, "sends"): nvlink, (3, "receives"): nvlink}
    assert occupied(links[0], "nvlink") == pytest.approx(expected)


def test_ranks_share_the_nics_of_their_machine(tmp_path):
    (tmp_path / "links").touch()
    one_nic = SlowedLinks(tmp_path / "links", TWO_MACHINES, LinkRates(network=50e6, nvlink=1e9, nics_per_machine=1))
    for source, to in ((0, 2), (1, 3)):
        one_nic.start(source, [(to, 1_000_000)], [])
        one_nic.start(to, [], [(source, 1_000_000)])
    assert one_nic.seconds("nic") == pytest.approx(np.array([[0.04, 0], [0, 0.04]]))
    one_nic.close()


def test_different_sizes_at_both_ends_are_an_error(links):
    links[0].start(0, [(2, 8)], [])
    with pytest.raises(AssertionError, match="rank 0 sends 2 another number of bytes: 4, 8"):
        links[2].start(2, [], [(0, 4)])


def test_groups_end_in_the_order_of_a_stream_and_bytes_arrive(links):
    """Rank 2's second message waits for its first group, which needs rank 3."""
    store, never = dist.HashStore(), timedelta(seconds=UNREACHED_SECONDS)
    with ThreadPoolExecutor(4) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 4, never), range(4)))
        made = [SlowedTransport(links[rank], group, UNREACHED_SECONDS) for rank, group in enumerate(groups)]
        list(pool.map(lambda transport: transport.connect(), made))
    data = torch.arange(1000, dtype=torch.uint8)
    arrived = [torch.zeros(1000, dtype=torch.uint8) for _ in range(2)]
    received, _ = made[2].start([], [(arrived[0], 3)])
    more, _ = made[2].start([], [(arrived[1], 0)])
    made[0].start([(data, 2)], [])
    assert not more[0].work.is_completed()
    assert occupied(links[0], "nic") == {}
    made[3].start([(data + 1, 2)], [])
    wait_for([*received, *more], Deadline(UNREACHED_SECONDS))
    assert torch.equal(arrived[0], data + 1)
    assert torch.equal(arrived[1], data)
    assert occupied(links[0], "nic") == pytest.approx({(0, "sends"): 2e-5, (2, "receives"): 2e-5})
    assert occupied(links[0], "nvlink") == pytest.approx({(3, "sends"): 2.5e-6, (2, "receives"): 2.5e-6})
    for transport in made:
        transport.close()


def slowed_sync(sizes, file):
    """Return the bytes that links moved in a sync of a small model on 8 ranks, and those of its plan by source."""
    model, (train, gen) = synthetic_model(1), sizes
    make = partial(make_scenario, "small", model, "bfloat16", bucket_bytes=1 << 17)
    scenario = make(train=train, gen=gen, nodes=2, engine=partial(engine_layouts, model))
    arrangement, rates = arrange("exact", scenario), LinkRates(network=1e9, nvlink=8e9)
    arguments = scenario.sources, arrangement.needs, scenario.topology, scenario.bucket_bytes, rates
    measured = twin.Twin(*arguments, file)
    return measured.run(), SlowedLinks(file, scenario.topology, rates), forecast(arrangement, scenario), scenario


@pytest.mark.parametrize("sizes", [("pp=2,tp=2,dp=2", "tp=2"), ("tp=4,dp=2", "tp=2")])
def test_links_are_occupied_for_the_planned_bytes_over_their_rates(sizes, tmp_path):
    (tmp_path / "links").touch()
    measured, links, planned, scenario = slowed_sync(sizes, tmp_path / "links")
    assert measured.mismatched_bytes == 0
    nodes, rates = scenario.topology.nodes, {"nic": 1e9, "nvlink": 8e9}
    expected = {kind: np.zeros((2, 8)) for kind in rates}
    for (source, to), num_bytes in planned.bytes_between.items():
        kind = "nvlink" if nodes[source] == nodes[to] else "nic"
        expected[kind][0, source] += num_bytes
        expected[kind][1, to] += num_bytes
    for kind, rate in rates.items():
        assert links.bytes(kind).tolist() == expected[kind].tolist()
        assert links.seconds(kind) == pytest.approx(expected[kind] / rate)
    assert measured.busiest_link_seconds == pytest.approx(max((expected[k] / r).max() for k, r in rates.items()))
    links.close()


SLOWED = "--model=synthetic:1 --train=pp=2,tp=2 --gen=tp=2 --machines=2 --bucket-mb=0.125 --transport=nccl-order --json"


def test_benchmark_prints_measured_planned_and_least_seconds(tmp_path):
    rates = ["--network-mb-per-second=100", "--nvlink-mb-per-second=800"]
    code, lines, errors = run_ranks(run_module, 4, tmp_path, benchmark.main, [*SLOWED.split(), *rates])
    assert code == 0, errors
    assert [line["strategy"] for line in lines] == ["exact_consecutive", "exact", "micro_dp"]
    for line in lines:
        assert line["mismatched_bytes"] == 0
        assert line["machines"] == 2
        assert 0 < line["seconds_bound"] <= line["seconds_planned"] * 1.001
        assert 0 < line["busiest_link_seconds"] <= line["seconds_planned"] * 1.001
        ratio = line["seconds_measured"] / line["seconds_planned"]
        assert line["measured_over_planned"] == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "--network-mb-per-second=0 --nvlink-mb-per-second=8",
            "--network-mb-per-second needs a positive number, got 0",
        ),
        (
            "--network-mb-per-second=1 --nvlink-mb-per-second=-8",
            "--nvlink-mb-per-second needs a positive number, got -8",
        ),
        (
            "--network-mb-per-second=nan --nvlink-mb-per-second=8",
            "--network-mb-per-second needs a positive number, got nan",
        ),
        ("--network-mb-per-second=1", "--network-mb-per-second and --nvlink-mb-per-second need each other"),
        ("--machines=5", "--machines needs at most one machine for each of 4 ranks, got 5"),
        ("--machines=0", "--machines needs to be at least 1, got 0"),
        (
            "--network-mb-per-second=1 --nvlink-mb-per-second=8 --strategies gather_hf",
            "--network-mb-per-second needs strategies of exact_consecutive, exact, micro_dp, got gather_hf",
        ),
        (
            "--network-mb-per-second=1 --nvlink-mb-per-second=8 --transport=default",
            "--network-mb-per-second needs --transport nccl-order, without --delta",
        ),
    ],
)
def test_bad_rates_and_machines_are_refused_with_one_sentence_before_ranks_start(options, sentence, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, lines, errors = run_module(benchmark.main, [*SLOWED.split(), *options.split()])
    assert (code != 0, lines, errors) == (True, [], f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--measure --network-mb-per-second 0", "--network-mb-per-second needs a positive number, got 0"),
        ("--network-gb-per-second -1", "--network-gb-per-second needs a positive number, got -1"),
        ("--cases 20", "--cases needs numbers from 0 to 19, got 20"),
        ("--measure --cases 4", "--cases needs numbers from 0 to 3, got 4"),
    ],
)
def test_clock_refuses_bad_options_with_one_sentence(options, sentence):
    code, lines, errors = run_module(partial(clock.main, options.split()), [])
    assert (code != 0, lines, errors) == (True, [], f"error: {sentence}\n")


def test_clock_measures_small_models(monkeypatch, tmp_path):
    monkeypatch.setattr(clock, "SMALL_MB", 1)
    monkeypatch.setattr(clock, "SMALL_BUCKET_BYTES", 1 << 16)
    options = ["--measure", "--json", "--network-mb-per-second=100", "--nvlink-mb-per-second=800", "--cases", "0", "3"]
    code, lines, _ = run_module(partial(clock.main, [*options, f"--write={tmp_path / 'page.md'}"]), [])
    assert code == 0
    assert [(line["ranks"], line["machines"], line["engines"]) for line in lines] == [(8, 2, None), (8, 2, 2)]
    for line in lines:
        assert line["mismatched_bytes"] == 0
        assert line["seconds_measured"] >= line["busiest_link_seconds"] > 0  # a sleep does not end early
    assert "| exact | synthetic-moe:48 |" in (tmp_path / "page.md").read_text()


def test_smallest_published_row(tmp_path):
    options = ["--rows", "0", "--json", f"--write={tmp_path / 'page.md'}"]
    code, (report,), _ = run_module(partial(published.main, options), [])
    assert code == 0
    assert (report["ranks"], report["ranks_planned"], report["machines"]) == (16, 16, 2)
    # each of 8 ranks gets an eighth of the matrices and all norms of Qwen3-4B, whose head is its embedding
    matrices = 151936 * 2560 + 36 * 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728)
    norms = 2560 + 36 * (2 * 2560 + 2 * 128)
    assert report["bytes_per_engine_rank"] == 2 * (matrices // 8 + norms)
    assert report["seconds_planned"] >= report["seconds_bound"] >= 2 * (matrices + norms) / 8 / 50e9 - 1e-4
    assert report["published_seconds"] == [0.21, 0.34]
    assert "0.21..0.34" in (tmp_path / "page.md").read_text()


def test_experts_that_one_rank_holds_for_several_take_little_more_than_the_bound(monkeypatch):
    """A trainer rank holds 4 experts of a layer, an engine rank needs 2: it receives some of them in every round."""
    monkeypatch.setattr(published, "BUCKET_BYTES", 1 << 20)
    sizes = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 8}
    experts = {"num_hidden_layers": 16, "num_experts": 16, "moe_intermediate_size": 256, "vocab_size": 4096}
    row = replace(
        published.ROWS[4],
        hardware=published.Hardware("slow", 8, RATES, ""),
        config=published.QWEN3_30B_A3B | sizes | experts,
        train="pp=2,dp=4,ep=4",
        gen_tp=8,
        gen_ep=8,
        split=published.EVEN,
    )
    report = published.measure(row)
    assert report.rounds > 16
    assert 1 <= report.planned_over_bound <= 1.15


def test_published_rows_state_assumptions_and_fit_the_ranks():
    for row in published.ROWS:
        assert row.seconds[0] <= row.seconds[1]
        assert row.gen_ep in (1, row.gen_tp)
        assert row.hardware.assumption


@pytest.mark.parametrize("number", [2, 4])
def test_merged_experts_keep_the_bytes_of_each_engine_rank(number):
    config = published.QWEN3_30B_A3B | {"num_hidden_layers": 2, "num_experts": 16}
    model = load_architecture(config, origin="small")
    merged = published.merge_experts(model, number)
    for ep in (1, 4):
        sizes = [
            [sum(math.prod(b - a for a, b in piece.box) for piece in layout.pieces) for layout in layouts]
            for layouts in (
                published.engine_layouts(m.tensors("bfloat16"), 4, ep=ep, num_kv_heads=2) for m in (model, merged)
            )
        ]
        routers = 2 * 2048 * (16 - 16 // number)
        assert [a - b for a, b in zip(*sizes, strict=True)] == [routers] * 4


def test_engine_ranks_share_key_value_heads_and_leave_out_other_experts_and_mtp():
    config = published.DEEPSEEK_V3 | {"num_hidden_layers": 5, "n_routed_experts": 8, "vocab_size": 1024}
    names = load_architecture(config, origin="small").tensors("bfloat16")
    layouts = published.engine_layouts(names, 4, ep=4)
    assert not any(piece.tensor.startswith("model.layers.5.") for layout in layouts for piece in layout.pieces)
    held = [{p.tensor.split(".experts.")[1][0] for p in layout.pieces if ".experts." in p.tensor} for layout in layouts]
    assert held == [{"0", "1"}, {"2", "3"}, {"4", "5"}, {"6", "7"}]
    dense = load_architecture(published.QWEN3_8B, origin="small").tensors("bfloat16")
    rows = [
        next(p.box[0] for p in layout.pieces if p.tensor == "model.layers.0.self_attn.k_proj.weight")
        for layout in published.engine_layouts(dense, 16, num_kv_heads=8)
    ]
    assert rows == [(128 * (rank // 2), 128 * (rank // 2 + 1)) for rank in range(16)]
