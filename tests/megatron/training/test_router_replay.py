"""Router replay: forced routes against transformers, and the routes of a step's passes against its first pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megarl.batch.trajectory import ROUTES
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config.megatron import MoeConfig
from megarl.config.trainer import RecomputeConfig
from megarl.megatron.requests import ForwardRequest
from megarl.megatron.trainer_worker import TrainerWorker
from tests.megatron.fidelity.measure import assert_same_gradients, nll_request
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.reference import _gradients_on_disk, _load, _logprobs, draw
from tests.megatron.rank_models import (
    gather,
    gather_full,
    make_trainer,
    model_spec,
    own_part,
    record_gradients,
    train_step,
    trainer_spec,
)
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.training.test_trainer import HALVES, make_request

LENGTHS = (3, 120, 17, 64, 9, 41)
LAYOUTS = {
    "one": (1, {}, {}),
    "recomputed": (1, {}, {"granularity": "full"}),
    "recomputed experts": (1, {}, {"granularity": "selective", "modules": ("moe",)}),
    "tp2": (2, {"tp": 2}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "ep2": (2, {"ep": 2}, {}),
    "tp2 ep2 etp1 recomputed experts": (
        2,
        {"tp": 2, "ep": 2, "etp": 1},
        {"granularity": "selective", "modules": ("moe",)},
    ),
    "dp2 recomputed": (2, {}, {"granularity": "full"}),
    "pp2": (2, {"pp": 2}, {}),
    "pp2 vpp2 recomputed": (2, {"pp": 2, "vpp": 2}, {"granularity": "full"}),
    "pp2 vpp2 ep2 cp2": (4, {"pp": 2, "vpp": 2, "ep": 2, "cp": 2}, {}),
    "tp2 pp2 recomputed experts": (4, {"tp": 2, "pp": 2}, {"granularity": "selective", "modules": ("moe",)}),
    "tp2 cp2 dp2 ep2": (8, {"tp": 2, "cp": 2, "ep": 2}, {}),
}
"""Ranks, parallel sizes and recomputation."""


def replay_spec(path, layout="one", replay="R2"):
    _, parallel, recompute = LAYOUTS[layout]
    return model_spec(path, parallel, moe=MoeConfig(router_replay=replay), recompute=RecomputeConfig(**recompute))


def routed_layers(model):
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def draw_routes(name, sequences):
    """Return random routes of sequences, uint8 [n, L, k]; every fourth token has none."""
    config, rng = CONFIGS[name], np.random.default_rng(3)
    num_experts = config.get("num_experts", config.get("n_routed_experts"))
    dense = len(config.get("mlp_only_layers", ())) + config.get("first_k_dense_replace", 0)
    num_layers, top_k = config["num_hidden_layers"] - dense, config["num_experts_per_tok"]
    drawn = []
    for tokens in sequences:
        routes = rng.permuted(np.tile(np.arange(num_experts), (len(tokens), num_layers, 1)), axis=2)[..., :top_k]
        routes[::4] = 0
        drawn.append(routes.astype(np.uint8))
    return drawn


def force(gate, config, routes_tk):
    """Make a gate of transformers choose these experts, for tokens that have a route."""
    forward = gate.forward

    def choose(hidden):
        logits, _, own_tk = forward(hidden)
        given_tk = torch.from_numpy(routes_tk[: len(own_tk)].astype(np.int64))
        index_tk = torch.where(given_tk.sum(1, keepdim=True) > 0, given_tk, own_tk)
        is_sigmoid = config["model_type"] == "deepseek_v3"
        scores = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight).float()
        scores = scores.sigmoid() if is_sigmoid else scores.softmax(1)
        weights = scores.gather(1, index_tk)
        if config.get("norm_topk_prob", True):
            weights = weights / weights.sum(1, keepdim=True)
        return logits, weights * config.get("routed_scaling_factor", 1.0), index_tk

    gate.forward = choose
    return forward


def forced_gradients(path, name, sequences, routes):
    """Return the gradients of transformers' model with forced routes, by name on disk."""
    model, config = _load(path), CONFIGS[name]
    gates = [mlp.gate for mlp in routed_layers(model)]
    num_tokens = sum(len(sequence) - 1 for sequence in sequences)
    for sequence, routes_nLk in zip(sequences, routes, strict=True):
        forwards = [force(gate, config, routes_nLk[:, layer]) for layer, gate in enumerate(gates)]
        (-_logprobs(model, sequence).sum() / num_tokens).backward()
        for gate, forward in zip(gates, forwards, strict=True):
            gate.forward = forward
    return _gradients_on_disk(model)


def train_forced(spec, request):
    """Train one step; return the gradients on disk."""
    trainer = make_trainer(trainer_spec(spec, lr=1e-3, distributed=False))
    recorded = record_gradients(trainer)
    train_step(trainer, request)
    return gather_full(trainer.model, recorded[0])


CASES = [(name, layout) for name in ("qwen3_moe", "deepseek_v3", "qwen3_5_moe") for layout in LAYOUTS]
DEFAULT = [
    ("qwen3_moe", "pp2 vpp2 ep2 cp2"),
    ("qwen3_moe", "dp2 recomputed"),
    ("deepseek_v3", "tp2 ep2 etp1 recomputed experts"),
    ("qwen3_5_moe", "one"),
]


@pytest.mark.parametrize(("name", "layout"), sample(CASES, DEFAULT))
def test_gradients_of_given_routes_are_those_of_forced_routing(name, layout, model_folder, tmp_path):
    path = model_folder(name)
    sequences = draw(LENGTHS, CONFIGS[name]["vocab_size"])
    routes = draw_routes(name, sequences)
    column = LocalPayload([{(0, i): of for i, of in enumerate(routes)}])
    request = replace(nll_request(sequences, 200), columns={ROUTES: column})
    got = run_ranks(train_forced, LAYOUTS[layout][0], tmp_path, replay_spec(path, layout), request)
    want = forced_gradients(path, name, sequences, routes)
    assert_same_gradients({key: got[key] for key in want}, want)


def train_with_engine_routes(spec, request):
    """Train one step; return the gradients on disk and the share of tokens without routes."""
    trainer = make_trainer(trainer_spec(spec, lr=1e-3, distributed=False))
    recorded = record_gradients(trainer)
    metrics = train_step(trainer, request)
    return gather_full(trainer.model, recorded[0]), metrics["router_replay/missing_share"]


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["pp2", "dp2 recomputed"]))
def test_routes_of_engines_are_replayed_and_missing_ones_counted(layout, model_folder, tmp_path):
    """Every fourth token has none, one trajectory has none at all, and the last token of a trajectory needs none."""
    path = model_folder("qwen3_moe")
    sequences = draw(LENGTHS, CONFIGS["qwen3_moe"]["vocab_size"])
    routes = [None, *draw_routes("qwen3_moe", sequences)[1:]]
    request = nll_request(sequences, 200)
    (payload,) = request.payloads
    pairs = zip(payload.value, routes, strict=True)
    request = replace(request, payloads=(LocalPayload([replace(each, routes=of) for each, of in pairs]),))
    spec = replay_spec(path, layout, "R3")
    got, share = run_ranks(train_with_engine_routes, LAYOUTS[layout][0], tmp_path, spec, request)
    empty = np.zeros((LENGTHS[0], 3, 2), np.uint8)
    want = forced_gradients(path, "qwen3_moe", sequences, [empty, *routes[1:]])
    assert_same_gradients({key: got[key] for key in want}, want)
    needed = [n - 1 for n in LENGTHS]
    missing = needed[0] + sum(-(-n // 4) for n in needed[1:])
    assert share == pytest.approx(missing / sum(needed))


def record_passes(spec, request):
    """Return, for each rank and layer, the expert sets of the passes before the first update and of all later ones."""
    trainer = make_trainer(trainer_spec(spec, lr=0.05, distributed=False))
    from megarl.megatron.modeling.router import find_routers

    seen: dict[int, tuple[set[bytes], set[bytes]]] = {}
    updates = [0]

    def note(router, inputs, output):
        is_real = ~inputs[1][:, :1]
        if is_real.any():
            sets = seen.setdefault(router.layer_number, (set(), set()))
            sets[updates[0] > 0].add((output[1] & is_real).numpy().tobytes())

    for router in find_routers(chunk.module for chunk in trainer.model.chunks):
        router.register_forward_hook(note)
    step = trainer.optimizer.step_with_ready_grads

    def count() -> Any:
        updates[0] += 1
        return step()

    trainer.optimizer.step_with_ready_grads = count
    train_step(trainer, request)
    assert updates[0] == 2 * len(request.mini_batches)
    return gather(seen)


def same_sets(spec, world, tmp_path, request):
    ranks = run_ranks(record_passes, world, tmp_path, spec, request)
    return [first == later for seen in ranks for first, later in seen.values()]


@pytest.mark.parametrize(
    "layout", sample(LAYOUTS, ["recomputed experts", "pp2 vpp2 recomputed", "tp2 ep2 etp1 recomputed experts"])
)
def test_updates_of_a_step_take_the_experts_of_its_first_pass(layout, model_folder, tmp_path):
    path, request = model_folder("qwen3_moe"), replace(make_request(*HALVES), epochs=2)
    assert all(same_sets(replay_spec(path, layout), LAYOUTS[layout][0], tmp_path, request))


def test_without_replay_updates_choose_other_experts(model_folder, tmp_path):
    path, request = model_folder("qwen3_moe"), replace(make_request(*HALVES), epochs=2)
    assert not any(same_sets(replay_spec(path, replay="none"), 1, tmp_path, request))


def record_then_train(spec, forward, request):
    """Record routes in a forward pass; return them, and whether a step with them took the same experts."""
    worker = TrainerWorker(trainer_spec(spec, lr=0.05, distributed=False))
    worker.logprobs(own_part(worker.model, forward))
    routes = {key: of for part in gather(worker.take_routes(None)) for key, of in part.items()}
    assert worker.take_routes(None) == {}
    other = {key: (of + 1) % 8 for key, of in routes.items()}
    request = replace(request, columns={ROUTES: LocalPayload([other])})
    packs = []
    make_packs = worker.trainer.make_packs

    def keep(*arguments):
        packs.append((arguments, make_packs(*arguments)))
        return packs[-1][1]

    worker.trainer.make_packs = keep
    train_step(worker, request)
    taken = {}
    for (batch, _, samples), made in packs:
        refs = [[batch.samples[i] for i in indices] for indices in batch.micro_batches]
        found = worker.model.gather_routes(made, [[samples.trajectory(ref) for ref in of] for of in refs])
        taken |= {ref.key: of for own, ofs in zip(refs, found, strict=True) for ref, of in zip(own, ofs, strict=True)}
    merged = {key: of for part in gather(taken) for key, of in part.items()}
    return routes, {key: np.array_equal(merged[key], other[key]) for key in other}


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["pp2 vpp2 ep2 cp2", "tp2", "dp2 recomputed"]))
def test_routes_are_recorded_by_sample_and_travel_to_other_micro_batches(layout, model_folder, tmp_path):
    path, request = model_folder("qwen3_moe"), make_request(*HALVES)
    (payload,) = request.payloads
    samples = tuple(each for batch in request.mini_batches for each in batch.samples)
    forward = ForwardRequest(
        samples=samples, payloads=request.payloads, max_tokens_per_micro_batch=140, records_routes=True
    )
    spec = replay_spec(path, layout)
    recorded, taken = run_ranks(record_then_train, LAYOUTS[layout][0], tmp_path, spec, forward, request)
    model = _load(path)
    found = []
    for mlp in routed_layers(model):
        mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
    for index, trajectory in enumerate(payload.value):
        with torch.no_grad():
            model(torch.from_numpy(trajectory.token_ids.astype(np.int64))[None], use_cache=False)
        want = torch.stack(found, 1).sort(-1).values.numpy()
        found.clear()
        assert recorded[0, index].dtype == np.uint8
        assert np.array_equal(np.sort(recorded[0, index], -1), want)
    assert taken
    assert all(taken.values())
