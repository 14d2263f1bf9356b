"""Routes that engines return, against transformers: of prompts, cached prefixes, continued and aborted requests."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.batch.trajectory import EngineRoutes, fit_routes, is_routed
from megarl.config.megatron import MoeConfig
from megarl.engines.engine_spec import EngineSpec
from tests.engines.remote import begin_requests, requests, started, sync
from tests.megatron.fidelity.measure import as_trajectory
from tests.megatron.fidelity.models import CONFIGS, save_model
from tests.megatron.fidelity.reference import _load, draw
from tests.megatron.rank_models import make_model, model_spec
from tests.megatron.ranks import run_ranks
from tests.rollout.clock import ENGINE_LIMITS
from tests.time_limits import HANG_SECONDS

MODELS = {"deepseek_v3": (False, True, True, True), "qwen3_moe all sparse": (True,) * 4}
"""Whether each layer has experts."""


def engine_routes(name):
    config = CONFIGS[name]
    num_experts = config.get("num_experts", config.get("n_routed_experts"))
    return EngineRoutes.of(MODELS[name], top_k=config["num_experts_per_tok"], num_experts=num_experts)


@pytest.fixture(scope="module", params=[("deepseek_v3", False), ("deepseek_v3", True), ("qwen3_moe all sparse", False)])
def served(request, tmp_path_factory):
    """Name and folder of a model, and an engine that returns its routes; a deterministic one caches no prefixes."""
    name, deterministic = request.param
    folder = save_model(name, tmp_path_factory.getbasetemp() / "models")
    routes = engine_routes(name)
    settings = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.3, "routes": routes}
    settings |= {"deterministic": deterministic}
    settings["pause_mode"] = "abort"  # requests in flight continue as new ones
    with started(EngineSpec(model_path=folder), **settings | ENGINE_LIMITS) as engine:
        yield name, folder, engine


def reference_sets(folder, tokens):
    """Return the experts of each token and layer by transformers, ascending, [n, L, k]."""
    model, found = _load(folder), []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
    with torch.no_grad():
        model(torch.tensor(tokens)[None], use_cache=False)
    return torch.stack(found, 1).sort(-1).values.numpy()


def assert_routes(folder, tokens, routes, start=0):
    assert routes.dtype == np.uint8
    assert is_routed(routes).all()
    assert np.array_equal(np.sort(routes, -1), reference_sets(folder, tokens)[start:-1])


def full_tokens(request, generation):
    return [*request.token_ids, *generation.token_ids.tolist()]


def test_routes_are_those_of_transformers(served):
    name, folder, engine = served
    sent = requests(draw((1, 2, 17, 40), CONFIGS[name]["vocab_size"]), max_new_tokens=24)
    for request, generation in zip(sent, engine.call("generate_many", sent), strict=True):
        assert_routes(folder, full_tokens(request, generation), generation.routes)


def test_samples_of_one_prompt_have_its_routes(served):
    """The CPU engine computes a prompt once that several requests of a pass share."""
    name, folder, engine = served
    sent = requests(
        [p for p in draw((33, 23, 40), CONFIGS[name]["vocab_size"], seed=3) for _ in range(4)], max_new_tokens=6
    )
    for request, generation in zip(sent, engine.call("generate_many", sent), strict=True):
        assert_routes(folder, full_tokens(request, generation), generation.routes)


def test_routes_of_a_cached_prefix_are_returned_or_left_out(served):
    name, folder, engine = served
    prompt = draw((60,), CONFIGS[name]["vocab_size"], seed=5)[0]
    (first,) = sent = requests([prompt], max_new_tokens=8)
    (generation,) = engine.call("generate_many", sent)
    tokens = full_tokens(first, generation)
    known = len(generation.routes)
    assert known == len(tokens) - 1
    again = replace(first, request_id="again", token_ids=(*tokens, 7, 8, 9))
    rest = replace(again, request_id="rest", num_routed=known)
    for request in (again, rest):
        (answer,) = engine.call("generate_many", [request])
        assert_routes(folder, full_tokens(request, answer), answer.routes, request.num_routed)


def test_a_request_that_is_interrupted_returns_the_routes_of_all_its_tokens(served):
    """The part before a pause keeps its routes; what follows has those that the engine computed for the rest."""
    name, folder, engine = served
    prompts = draw((30,) * 6, CONFIGS[name]["vocab_size"], seed=9)
    sent, pending = begin_requests(engine, prompts, max_new_tokens=300)
    sync(engine, load_file(f"{folder}/model.safetensors"), 1)
    generations = [each.result(HANG_SECONDS) for each in pending]
    # some may have sampled the end of the text before
    assert {0, 1} in [set(generation.policy_versions.tolist()) for generation in generations]
    for request, generation in zip(sent, generations, strict=True):
        assert_routes(folder, full_tokens(request, generation), generation.routes)


def score_in_bfloat16(folder, replay, trajectories):
    """Return the trainer's log-probabilities of each trajectory's tokens after the first."""
    model = make_model(model_spec(folder, dtype="bfloat16", moe=MoeConfig(router_replay=replay)))
    return [logprobs for logprobs, _ in chain(*model.score([trajectories]))]


def test_replay_brings_the_trainer_closer_to_the_engine(tmp_path_factory, tmp_path):
    """In bfloat16, rounding sends some tokens to other experts than in the engine, unless routes are replayed."""
    name = "deepseek_v3"
    folder = save_model(name, tmp_path_factory.getbasetemp() / "models")
    settings = {"max_total_tokens": 8192, "max_running_requests": 16, "mem_fraction": 0.3, "dtype": "bfloat16"}
    with started(EngineSpec(model_path=folder), routes=engine_routes(name), **settings | ENGINE_LIMITS) as engine:
        sent = requests(draw((30,) * 16, CONFIGS[name]["vocab_size"]), max_new_tokens=60)
        answers = engine.call("generate_many", sent)
    trajectories, differences = [], {}
    for request, answer in zip(sent, answers, strict=True):
        tokens = full_tokens(request, answer)
        mask = np.arange(len(tokens)) >= len(request.token_ids)
        trajectories.append(replace(as_trajectory(tokens, mask), routes=fit_routes(answer.routes, len(tokens))))
    for replay in ("none", "R3"):
        scored = run_ranks(score_in_bfloat16, 1, tmp_path, folder, replay, trajectories)
        pairs = zip(scored, answers, strict=True)
        of_all = np.concatenate([got.numpy()[-len(a.logprobs) :] - a.logprobs for got, a in pairs])
        differences[replay] = np.abs(of_all)
    assert differences["R3"].mean() < differences["none"].mean()
    assert np.quantile(differences["R3"], 0.99) < np.quantile(differences["none"], 0.99) / 3
