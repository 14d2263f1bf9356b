import dataclasses
import socket

import pytest
import torch

from megarl.errors import ConfigError, WeightSyncError, WorkerError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.bucket import digest
from megarl.rollout.sglang.engine_host import check_port
from megarl.rollout.sglang.weight_layout.offline_trace import trace_layouts
from tests.rollout import reference
from tests.rollout.conftest import tiny_qwen3
from tests.rollout.remote import (
    RemoteEngine,
    Senders,
    boxes_of,
    fork_traces,
    requests,
    send_bucket,
    send_rounds,
    sync,
    sync_boxes,
)
from tests.rollout.sglang.test_in_flight import Versions, check_spans, generate_during_pushes, prompts
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS, assert_engine_holds


@pytest.fixture(scope="module")
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def uneven_dir(tmp_path_factory):
    """Model with one key-value head for both ranks and a vocabulary that needs padding: rank 1 attends to nothing."""
    folder = tmp_path_factory.mktemp("models") / "uneven"
    tiny_qwen3(folder, num_key_value_heads=1, vocab_size=252)
    return str(folder)


@pytest.fixture(scope="module")
def engine(spec, port, uneven_dir):
    engine = RemoteEngine(dataclasses.replace(spec, model_path=uneven_dir, tp=2, port=port, round_timeout_seconds=1.0))
    engine.call("start")
    yield engine
    engine.close()


def test_each_rank_holds_its_shard(engine, uneven_dir, tmp_path):
    for version in (1, 2):
        weights = reference.changed(uneven_dir, seed=version)
        engine.call("randomize_weights")
        sync(engine, weights, version)
        assert_engine_holds(engine, weights, tmp_path, tp=2)
        generations = engine.generate(PROMPTS)
        assert reference.worst_difference(reference.load(uneven_dir, weights), PROMPTS, generations) <= 1e-4
        assert {v for g in generations for v in g.policy_versions} == {version}


def test_tokens_name_the_version_that_sampled_them(engine, uneven_dir):
    versions, batch = Versions(uneven_dir, 4), prompts(12)
    generations = generate_during_pushes(engine, versions, batch, max_new_tokens=400)
    boundaries, noticed = check_spans(versions, batch, generations)
    assert boundaries >= 12
    assert noticed >= 0.9 * boundaries


def test_each_rank_rejects_an_invalid_bucket(engine):
    engine.call("begin_weights")
    with pytest.raises(WeightSyncError, match=r"TP rank 0: nonsense is no .*; TP rank 1: nonsense is no "):
        send_bucket(engine, {"nonsense": torch.zeros(3)})
    assert len(engine.generate(PROMPTS)) == len(PROMPTS)


@pytest.fixture(scope="module")
def layouts(engine):
    return engine.call("layouts")


@pytest.fixture
def served(engine, layouts, uneven_dir):
    """Sync new weights as version 5 and return them."""
    weights = reference.changed(uneven_dir, seed=5)
    sync_boxes(engine, layouts, weights, 5)
    return weights


def assert_serves(engine, uneven_dir, weights, version, folder):
    assert_engine_holds(engine, weights, folder, tp=2)
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(uneven_dir, weights), PROMPTS, generations) <= 1e-4
    assert {v for g in generations for v in g.policy_versions} == {version}


def test_boxes_arrive_bit_for_bit_in_each_rank(engine, layouts, uneven_dir, tmp_path):
    for version in (1, 2, 3):
        weights = reference.changed(uneven_dir, seed=version)
        engine.call("randomize_weights")
        sync_boxes(engine, layouts, weights, version, num_rounds=2 * version)
        assert_serves(engine, uneven_dir, weights, version, tmp_path)


def test_layouts_match_the_offline_trace(layouts, uneven_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)
    assert layouts == trace_layouts(uneven_dir, tp=2)


def test_each_rank_hashes_its_pieces(engine, layouts, served):
    for layout, hashes in zip(layouts, engine.call("piece_hashes"), strict=True):
        assert hashes == {(p.tensor, p.box): digest(served[p.tensor][slices(p.box)]) for p in layout.pieces}


def test_rank_without_boxes_sends_none(engine, layouts, uneven_dir, tmp_path):
    weights = reference.changed(uneven_dir, seed=11)
    first, second = (boxes_of(layout, weights) for layout in layouts)
    engine.call("begin_weights")
    send_rounds(engine, [[first, None], [None, second]])
    engine.call("end_weights", 11)
    assert_serves(engine, uneven_dir, weights, 11, tmp_path)


def test_rank_whose_boxes_are_missing_is_named(engine, layouts, uneven_dir, served, tmp_path):
    engine.call("begin_weights")
    with Senders(engine, [[boxes_of(layout, served) for layout in layouts]]) as senders:
        senders.prepare()
        receiving = engine.submit("receive_weights")
        senders.begin()
        first, _ = senders.ranks
        first.load_boxes(0, senders.buckets[0][0])()
        with pytest.raises(
            WeightSyncError,
            match=r"^TP rank 1: .*round 0 of the weights did not come from trainer rank 1 in 1 s$",
        ):
            receiving.result(30)
    with pytest.raises(WeightSyncError, match="parts of version 5"):
        engine.generate(PROMPTS)
    sync_boxes(engine, layouts, served, 5)
    assert_serves(engine, uneven_dir, served, 5, tmp_path)


BAD_BOX = {
    "a parameter that is none": (("nonsense", ((0, 1),), torch.zeros(1)), "nonsense is no parameter of the engine"),
    "a box twice": (("model.norm.weight", ((0, 8),), torch.zeros(8)), r"\[0:8\] is also written as part of"),
}


@pytest.mark.parametrize("case", BAD_BOX)
def test_box_that_one_rank_rejects_ends_the_preparation(engine, layouts, uneven_dir, served, tmp_path, case):
    bad, message = BAD_BOX[case]
    weights = reference.changed(uneven_dir, seed=13)
    first, second = (boxes_of(layout, weights) for layout in layouts)
    with Senders(engine, [[first, [*second, bad]]]) as senders:
        with pytest.raises(WeightSyncError, match=rf"^TP rank 1: [^;]*{message}[^;]*$"):
            senders.prepare()
        engine.call("begin_weights")
        with pytest.raises(WeightSyncError, match=r"^TP rank 1: .* does not know which boxes it receives"):
            engine.call("receive_weights")
    assert_serves(engine, uneven_dir, served, 5, tmp_path)
    sync_boxes(engine, layouts, weights, 13)
    assert_serves(engine, uneven_dir, weights, 13, tmp_path)


@pytest.mark.usefixtures("served")
def test_unwritten_region_of_one_rank_is_named(engine, layouts, uneven_dir, tmp_path):
    weights = reference.changed(uneven_dir, seed=14)
    first, second = (boxes_of(layout, weights) for layout in layouts)
    short = [box for box in second if box[0] != "model.layers.1.mlp.down_proj.weight"]
    engine.call("begin_weights")
    send_rounds(engine, [[first, short]])
    unwritten = r"TP rank 1: .*model\.layers\.1\.mlp\.down_proj\.weight was not written at \[0:64, 0:64\]"
    with pytest.raises(WeightSyncError, match=unwritten):
        engine.call("end_weights", 14)
    with pytest.raises(WeightSyncError, match="parts of version 5"):
        engine.generate(PROMPTS)
    sync_boxes(engine, layouts, weights, 14)
    assert_serves(engine, uneven_dir, weights, 14, tmp_path)


@pytest.mark.usefixtures("engine")
def test_engine_uses_the_configured_port(port):
    with pytest.raises(ConfigError, match=f"port {port} is in use"):
        check_port(port)


def test_shutdown_fails_the_requests_in_flight(engine):
    """Must be the last test of this module, because it shuts the engine down."""
    schedulers = engine.scheduler_processes()
    pending = engine.submit("generate_many", requests(PROMPTS, max_new_tokens=480))
    engine.call("shutdown")
    with pytest.raises(WorkerError, match="the engine was shut down"):
        pending.result(5)
    assert not any(p.is_running() for p in schedulers)
    with pytest.raises(WorkerError, match="shut down"):
        engine.generate(PROMPTS)
