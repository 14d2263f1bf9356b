"""Updates of a model whose engine computes values from its weights: Gemma 2 keeps 1 + w for every norm."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.disaggregated import TransferSpec
from megarl.reshard.transfer.process_groups import TransferGroup
from megarl.reshard.transfer.sync_store import open_store
from megarl.rollout.sglang.weight_layout.offline_trace import trace_engine
from megarl.rollout.sglang.weight_update.update_session import full_tensors
from tests.reshard.rank_process import RankProcess, TransferMember, call
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, Senders, fork_traces, send_bucket, send_rounds
from tests.rollout.sglang.weight_update.test_network_receive import Versions, trainer_layouts
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS

TP = 2
NUM_NORMS = 9
NORM = "model.norm.weight"


def tiny_gemma2(folder):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="gelu_pytorch_tanh",  # as published folders have it; SGLang reads it
        query_pre_attn_scalar=32,
        sliding_window=256,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=250,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)


def changed(folder, seed):
    """Return the model of the folder with randomly changed weights."""
    generator = torch.Generator().manual_seed(seed)
    model = reference.load(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.3 * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "gemma2"
    tiny_gemma2(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gemma_spec(spec, gemma_dir):
    return dataclasses.replace(spec, model_path=gemma_dir, tp=TP)


@pytest.fixture(scope="module")
def engine(gemma_spec):
    engine = RemoteEngine(gemma_spec)
    engine.call("start")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def full_names(engine):
    return engine.call("full_tensors")


def rank_boxes(engine, weights, without):
    return [
        [(p.local, p.local_box, weights[p.tensor][slices(p.box)]) for p in layout.pieces if p.tensor not in without]
        for layout in engine.call("layouts")
    ]


def update(engine, model, full_names, version):
    """Send derived tensors in full, and everything else as boxes in two rounds."""
    weights = dict(model.named_parameters())
    boxes = rank_boxes(engine, weights, full_names)
    engine.call("begin_weights")
    send_bucket(engine, {name: weights[name].detach() for name in full_names})
    send_rounds(engine, [[boxes_of_rank[part::2] for boxes_of_rank in boxes] for part in range(2)])
    engine.call("end_weights", version)


def held(engine, folder):
    """Return the parameters and buffers of each rank."""
    folder.mkdir(exist_ok=True)
    engine.call("read_weights", str(folder))
    return [torch.load(folder / f"rank{rank}.pt") | torch.load(folder / f"rank{rank}.buffers.pt") for rank in range(TP)]


def assert_recomputed(tensors):
    computed = {name for name in tensors if name.endswith(".gemma_weight")}
    assert len(computed) == NUM_NORMS
    for name in computed:
        assert torch.equal(tensors[name], 1 + tensors[name.replace("gemma_weight", "weight")]), name


def test_full_tensors_are_the_same_with_an_engine_and_offline(full_names, gemma_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork_traces(monkeypatch)
    assert len(full_names) == NUM_NORMS
    assert all("norm" in name for name in full_names)
    assert full_tensors(trace_engine(gemma_dir, tp=TP)) == full_names


def test_successive_updates_recompute_derived_values(engine, full_names, gemma_spec, tmp_path):
    for version in (1, 2, 3):
        model = changed(gemma_spec.model_path, seed=version)
        engine.call("randomize_weights")
        update(engine, model, full_names, version)
        now = held(engine, tmp_path / "held")
        for tensors in now:
            assert_recomputed(tensors)
        generations = engine.generate(PROMPTS, temperature=0.0)
        assert reference.worst_difference(model, PROMPTS, generations) <= 1e-4
        assert {v for g in generations for v in g.policy_versions} == {version}
    model.save_pretrained(tmp_path / "model")
    fresh = RemoteEngine(dataclasses.replace(gemma_spec, model_path=str(tmp_path / "model")))
    try:
        fresh.call("start")
        for here, there in zip(now, held(fresh, tmp_path / "fresh"), strict=True):
            assert here.keys() == there.keys()
            different = {name for name in here if not torch.equal(here[name], there[name])}
            assert different <= {"model.normalizer"}  # a constant that is never read; `randomize_weights` overwrote it
        for here, there in zip(generations, fresh.generate(PROMPTS, temperature=0.0), strict=True):
            assert here.token_ids.tolist() == there.token_ids.tolist()
            assert here.logprobs.tolist() == there.logprobs.tolist()
    finally:
        fresh.close()


def test_engine_receives_derived_tensors_in_full_over_the_network(engine, full_names, gemma_dir, tmp_path):
    """Each TP rank receives the boxes of its parameters, and derived tensors in full."""
    layouts, store = engine.call("layouts"), open_store("127.0.0.1")
    transfer_spec = TransferSpec(
        sources=trainer_layouts(layouts[0].tensors),
        needs=layouts,
        num_engines=1,
        nodes=(0, 0, 1, 1),
        bucket_bytes=1 << 14,
        full_tensors=full_names,
    )
    models = {version: changed(gemma_dir, seed=version) for version in (2, 3)}
    for version, model in models.items():
        save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / f"{version}.safetensors")
    trainers = [RankProcess(TransferMember, rank, transfer_spec, Versions(str(tmp_path))) for rank in range(2)]
    try:
        for trainer in trainers:
            trainer.wait_started()
        transfer_group = TransferGroup("127.0.0.1", store.port, "gemma", transfer_spec.size, 30.0)
        connecting = engine.submit("join_trainer", transfer_spec, 0, transfer_group)
        call(trainers, "connect", transfer_group)
        connecting.result(30)
        for version, model in models.items():
            engine.call("randomize_weights")
            engine.call("begin_weights")
            receiving = engine.submit("receive_weights")
            sent = [books for books, _ in call(trainers, "sync", version)]
            received = receiving.result(30)
            engine.call("end_weights", version)
            assert sum(b.bytes_sent for b in (*sent, *received)) == sum(b.bytes_received for b in received)
            # boxes that both TP ranks need are sent to their node once
            assert sum(b.bytes_sent for b in sent) == sum(p.nbytes for p in model.parameters())
            for tensors in held(engine, tmp_path / "held"):
                assert_recomputed(tensors)
            generations = engine.generate(PROMPTS, temperature=0.0)
            assert reference.worst_difference(model, PROMPTS, generations) <= 1e-4
            assert {v for g in generations for v in g.policy_versions} == {version}
    finally:
        for trainer in trainers:
            trainer.close()


def test_boxes_of_derived_tensors_are_rejected(engine, full_names, gemma_dir):
    """The engine does not recompute the values for boxes."""
    weights = {name: p.detach() for name, p in changed(gemma_dir, seed=9).named_parameters()}
    with Senders(engine, [rank_boxes(engine, weights, set(full_names) - {NORM})]) as senders:
        message = rf"{NORM}, which needs load_weights only, got also box \[0:64\]"
        with pytest.raises(WeightSyncError, match=message):
            senders.prepare()


def test_boxes_wait_for_the_tensors_that_come_in_full(engine, full_names, gemma_dir):
    model = changed(gemma_dir, seed=9)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    engine.call("begin_weights")
    with Senders(engine, [rank_boxes(engine, weights, full_names)]) as senders:
        senders.prepare()
        receiving = engine.submit("receive_weights")
        senders.begin()
        send_bucket(engine, {name: weights[name] for name in full_names if name != NORM})
        assert not receiving.done()
        with pytest.raises(WeightSyncError, match=rf"computes values from 1 tensors, .*: {NORM}|did not arrive"):
            engine.call("end_weights", 9)
        with pytest.raises(WeightSyncError, match="receive_weights needs begin_weights first"):
            receiving.result(30)
    with pytest.raises(WeightSyncError, match="parts of version 3"):
        engine.generate(PROMPTS)
    update(engine, model, full_names, 3)
    assert reference.worst_difference(model, PROMPTS, engine.generate(PROMPTS)) <= 1e-4
