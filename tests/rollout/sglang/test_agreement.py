"""Engines of every family against transformers, in float32 on the CPU: log-probabilities of what they sampled.

What SGLang does otherwise on the CPU is pinned as it is, so that a version that does better is noticed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from megarl.errors import WorkerError
from megarl.rollout.engine import GenerationRequest, Sampling
from megarl.rollout.engine_spec import EngineSpec, stop_token_ids
from tests.megatron.fidelity.models import CONFIGS, save_model
from tests.megatron.fidelity.reference import SHORT, draw, score
from tests.rollout.remote import RemoteEngine

PROMPT_LENGTHS = (1, *SHORT, 300)
NEW_TOKENS = 40
TOLERANCE = 1e-4
RUN = ["llama3", "mixtral", "deepseek_v3"]
RUN_TOO = ["qwen2", "qwen3", "qwen3_moe all sparse", "qwen2 linear", "qwen3 yarn"]
OVER_TWO_RANKS = ["mixtral", "qwen3_moe all sparse", "deepseek_v3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "models"


@contextmanager
def started(folder: str, *, deterministic: bool = True, tp: int = 1) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(
        EngineSpec(
            model_path=folder,
            tp=tp,
            max_total_tokens=16_384,
            max_running_requests=32,
            mem_fraction=0.3,
            deterministic=deterministic,
            stop_token_ids=stop_token_ids(folder),
        )
    )
    try:
        engine.call("start")
        yield engine
    finally:
        engine.close()


def sample(engine, vocab_size):
    """Whole sequences, and by sequence the engine's log-probabilities of the tokens after the prompt."""
    prompts = draw(PROMPT_LENGTHS, vocab_size)
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=0)
    requests = [GenerationRequest(request_id=str(i), token_ids=p, sampling=sampling) for i, p in enumerate(prompts)]
    generations = engine.call("generate_many", requests)
    sequences = tuple(p + tuple(g.token_ids.tolist()) for p, g in zip(prompts, generations, strict=True))
    return sequences, [g.logprobs for g in generations]


def worst_difference(folder, sequences, logprobs):
    """Over all sampled tokens, from transformers."""
    pairs = zip(score(folder, sequences), logprobs, strict=True)
    return np.max([np.abs(want.numpy()[-len(got) :] - got).max() for want, got in pairs])


@pytest.mark.parametrize("name", [*RUN, *(pytest.param(name, marks=pytest.mark.slow) for name in RUN_TOO)])
def test_log_probabilities_are_those_of_transformers(name, models):
    folder = save_model(name, models)
    with started(folder) as engine:
        require_agreement(engine, folder, CONFIGS[name]["vocab_size"])


@pytest.mark.slow
@pytest.mark.parametrize("name", OVER_TWO_RANKS)
def test_two_ranks_share_the_experts(name, models):
    folder = save_model(name, models)
    with started(folder, tp=2) as engine:
        require_agreement(engine, folder, CONFIGS[name]["vocab_size"])


@pytest.mark.slow
def test_deepseek_v3_may_also_depend_on_the_batch(models):
    """Where prompts may be cut and share a cache: those sampled again find a prefix in it."""
    folder = save_model("deepseek_v3", models)
    with started(folder, deterministic=False) as engine:
        for _ in range(2):
            require_agreement(engine, folder, CONFIGS["deepseek_v3"]["vocab_size"])


def require_agreement(engine, folder, vocab_size):
    sequences, logprobs = sample(engine, vocab_size)
    assert sum(map(len, logprobs)) > 10 * NEW_TOKENS
    assert worst_difference(folder, sequences, logprobs) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe sparse step"])
def test_qwen3_moe_runs_as_if_all_layers_were_sparse(name, models):
    """SGLang's model of it reads neither mlp_only_layers, nor decoder_sparse_step, nor tie_word_embeddings."""
    folder = save_model(name, models)
    with started(folder) as engine:
        sequences, logprobs = sample(engine, CONFIGS[name]["vocab_size"])
    # NaN at times: nothing loads the experts of the dense layers, which hold what the memory held
    assert not worst_difference(folder, sequences, logprobs) <= TOLERANCE


def test_gemma2_runs_without_the_softcap_of_its_attention(models, tmp_path):
    """SGLang's torch_native attention is given the cap and leaves it out; window and final cap are right."""
    folder = save_model("gemma2", models)
    shutil.copytree(folder, tmp_path / "uncapped")
    file = tmp_path / "uncapped" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_logit_softcapping": None}))
    with started(folder) as engine:
        sequences, logprobs = sample(engine, CONFIGS["gemma2"]["vocab_size"])
    assert worst_difference(str(file.parent), sequences, logprobs) <= TOLERANCE
    assert worst_difference(folder, sequences, logprobs) > 100 * TOLERANCE


@pytest.mark.slow
def test_deepseek_v3_needs_yarn(models):
    with (
        pytest.raises(WorkerError, match=r"(?s)get_rope_cpu.*assert rope_scaling is not None"),
        started(save_model("deepseek_v3 without query latent", models), deterministic=False),
    ):
        pass
