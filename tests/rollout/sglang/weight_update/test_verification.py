"""Comparison of sampled boxes with the weights that were sent, in a real engine with two TP ranks."""

import dataclasses

import pytest

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.transfer.bucket import digest
from megarl.reshard.transfer.sample_digests import ExpectedBox
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, boxes_of, send_bucket, send_rounds, sync
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS

NUM_SAMPLES = 16


@pytest.fixture(scope="module")
def engine(spec):
    engine = RemoteEngine(dataclasses.replace(spec, tp=2))
    engine.call("start")
    yield engine
    engine.close()


def expected_boxes(samples, weights):
    return [
        ExpectedBox(sample.tp_rank, sample.tensor, sample.box, digest(weights[sample.tensor][slices(sample.box)]))
        for sample in samples
    ]


def send(engine, way, weights):
    if way == "boxes":
        send_rounds(engine, [[boxes_of(layout, weights) for layout in engine.call("layouts")]])
    else:
        send_bucket(engine, weights)


@pytest.mark.parametrize("way", ["boxes", "full tensors"])
def test_update_passes_if_the_weights_have_arrived(engine, model_dir, way):
    weights = reference.changed(model_dir, seed=1)
    samples = engine.call("sample_boxes", 1, NUM_SAMPLES)
    assert len(samples) == NUM_SAMPLES
    assert {sample.tp_rank for sample in samples} == {0, 1}
    assert samples == engine.call("sample_boxes", 1, NUM_SAMPLES)
    assert samples != engine.call("sample_boxes", 2, NUM_SAMPLES)
    engine.call("begin_weights")
    send(engine, way, weights)
    assert engine.call("verify_weights", expected_boxes(samples, weights)) is None
    engine.call("end_weights", 1)
    generations = engine.generate(PROMPTS)
    assert {int(v) for g in generations for v in g.policy_versions} == {1}


@pytest.mark.parametrize("way", ["boxes", "full tensors"])
def test_one_changed_element_is_found_and_the_engine_does_not_serve(engine, model_dir, way):
    weights = reference.changed(model_dir, seed=2)
    samples = engine.call("sample_boxes", 3, NUM_SAMPLES)
    wrong = samples[NUM_SAMPLES // 2]
    sent = {name: tensor.clone() for name, tensor in weights.items()}
    last = sent[wrong.tensor][slices(wrong.box)].view(-1) if len(wrong.box) == 1 else None
    if last is None:
        last = sent[wrong.tensor][slices(wrong.box)][-1]
    last[-1] *= 1 + 2**-22
    engine.call("begin_weights")
    send(engine, way, sent)
    problem = engine.call("verify_weights", expected_boxes(samples, weights))
    assert problem.startswith(f"TP rank {wrong.tp_rank} does not hold the values of {wrong.tensor} [")
    with pytest.raises(
        WeightSyncError, match="end_weights needs begin_weights first; the last update was closed: TP rank"
    ):
        engine.call("end_weights", 3)
    with pytest.raises(WeightSyncError, match="an update that failed"):
        engine.generate(PROMPTS)
    sync(engine, weights, 4)
    generations = engine.generate(PROMPTS)
    assert reference.worst_difference(reference.load(model_dir, weights), PROMPTS, generations) <= 1e-4


def test_boxes_are_compared_within_an_update_only(engine):
    with pytest.raises(WeightSyncError, match="verify_weights needs begin_weights first"):
        engine.call("verify_weights", [])
