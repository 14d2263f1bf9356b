"""A model whose engine computes values of its own from its weights: Gemma 2 keeps 1 + w for every norm."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.disaggregated import Handover
from megarl.reshard.transfer.process_groups import Meeting, open_store
from megarl.rollout.sglang.weight_layout.offline_trace import trace_engine
from megarl.rollout.sglang.weight_update.update_session import whole_tensors
from tests.reshard.rank_process import HandoverMember, RankProcess, call
from tests.rollout import reference
from tests.rollout.remote import RemoteEngine, send_bucket, send_round
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
    """Another model like that of the folder."""
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
def whole(engine):
    return engine.call("whole_tensors")


def rank_boxes(engine, weights, without):
    return [
        [(p.local, p.local_box, weights[p.tensor][slices(p.box)]) for p in layout.pieces if p.tensor not in without]
        for layout in engine.call("layouts")
    ]


def update(engine, model, whole, version):
    """What can come as boxes does, the rest whole, between two rounds."""
    weights = dict(model.named_parameters())
    boxes = rank_boxes(engine, weights, whole)
    engine.call("begin_weights")
    send_round(engine, 0, [of_rank[::2] for of_rank in boxes])
    send_bucket(engine, {name: weights[name].detach() for name in whole})
    send_round(engine, 1, [of_rank[1::2] for of_rank in boxes])
    engine.call("end_weights", version)


def held(engine, folder):
    """By rank: its parameters and buffers."""
    folder.mkdir(exist_ok=True)
    engine.call("read_weights", str(folder))
    return [torch.load(folder / f"rank{rank}.pt") | torch.load(folder / f"rank{rank}.buffers.pt") for rank in range(TP)]


def assert_computed_anew(tensors):
    computed = {name for name in tensors if name.endswith(".gemma_weight")}
    assert len(computed) == NUM_NORMS
    for name in computed:
        assert torch.equal(tensors[name], 1 + tensors[name.replace("gemma_weight", "weight")]), name


def test_what_must_come_whole_is_known_with_an_engine_and_without(whole, gemma_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(whole) == NUM_NORMS
    assert all("norm" in name for name in whole)
    assert whole_tensors(trace_engine(gemma_dir, tp=TP)) == whole


def test_successive_updates_reach_what_the_engine_computes(engine, whole, gemma_spec, tmp_path):
    for version in (1, 2, 3):
        model = changed(gemma_spec.model_path, seed=version)
        engine.call("randomize_weights")
        update(engine, model, whole, version)
        now = held(engine, tmp_path / "held")
        for tensors in now:
            assert_computed_anew(tensors)
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
            assert different <= {"model.normalizer"}  # a constant that nothing reads, and that this test overwrote
        for here, there in zip(generations, fresh.generate(PROMPTS, temperature=0.0), strict=True):
            assert here.token_ids.tolist() == there.token_ids.tolist()
            assert here.logprobs.tolist() == there.logprobs.tolist()
    finally:
        fresh.close()


def test_an_engine_that_receives_by_itself_loads_them_whole(engine, whole, gemma_dir, tmp_path):
    """Each TP rank has the boxes of its parameters, and all of what it computes values from, before version 3."""
    layouts, store = engine.call("layouts"), open_store("127.0.0.1")
    handover = Handover(
        sources=trainer_layouts(layouts[0].tensors),
        needs=layouts,
        num_engines=1,
        nodes=(0, 0, 1, 1),
        bucket_bytes=1 << 14,
        whole=whole,
    )
    models = {version: changed(gemma_dir, seed=version) for version in (2, 3)}
    for version, model in models.items():
        save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / f"{version}.safetensors")
    trainers = [RankProcess(HandoverMember, rank, handover, Versions(str(tmp_path))) for rank in range(2)]
    try:
        for trainer in trainers:
            trainer.wait_started()
        engine.call("prepare_receive", handover, 0)
        meeting = Meeting("127.0.0.1", store.port, "gemma", handover.size, 30.0)
        joining = engine.submit("join_trainer", meeting)
        call(trainers, "join", meeting)
        joining.result(30)
        for version, model in models.items():
            engine.call("randomize_weights")
            engine.call("begin_weights")
            receiving = engine.submit("receive_weights")
            sent = [books for books, _ in call(trainers, "sync", version)]
            received = receiving.result(30)
            engine.call("end_weights", version)
            assert sum(b.bytes_sent for b in (*sent, *received)) == sum(b.bytes_received for b in received)
            # what both TP ranks need enters their machine once
            assert sum(b.bytes_sent for b in sent) == sum(p.nbytes for p in model.parameters())
            for tensors in held(engine, tmp_path / "held"):
                assert_computed_anew(tensors)
            generations = engine.generate(PROMPTS, temperature=0.0)
            assert reference.worst_difference(model, PROMPTS, generations) <= 1e-4
            assert {v for g in generations for v in g.policy_versions} == {version}
    finally:
        for trainer in trainers:
            trainer.close()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("whole", rf"computes values of its own from 1 tensors, which need load_weights: {NORM}"),
        ("nothing", rf"{NORM}, which needs load_weights alone, got the box \[0:64\]"),
    ],
)
def test_boxes_of_what_must_come_whole_are_refused(engine, whole, gemma_dir, missing, message):
    """Even if it came whole as well: which came last, the engine does not know."""
    model = changed(gemma_dir, seed=9)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    engine.call("begin_weights")
    send_bucket(engine, {name: weights[name] for name in whole if missing == "nothing" or name != NORM})
    send_round(engine, 0, rank_boxes(engine, weights, set(whole) - {NORM}))
    with pytest.raises(WeightSyncError, match=message):
        engine.call("end_weights", 9)
    with pytest.raises(WeightSyncError, match="parts of version 3"):
        engine.generate(PROMPTS)
    update(engine, model, whole, 3)
    assert reference.worst_difference(model, PROMPTS, engine.generate(PROMPTS)) <= 1e-4
