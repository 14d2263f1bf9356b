"""Log-probabilities of sampled tokens, of engines of every model family against transformers, in float32 on the CPU.

Known deviations of SGLang on the CPU are asserted as they are, so that a version that fixes them is noticed.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import save_file

from megarl.engines.engine_spec import EngineSpec
from megarl.errors import WorkerError
from megarl.model_files.model_config import read_stop_token_ids
from tests.engines.reference import changed
from tests.engines.remote import started, sync
from tests.engines.sglang.test_cpu_determinism import assert_batch_independent
from tests.errors import expect_error
from tests.megatron.fidelity.models import CONFIGS, OWN_HEAD, save_model
from tests.megatron.fidelity.reference import SHORT, draw, score
from tests.rollout.clock import ENGINE_LIMITS

PROMPT_LENGTHS = (1, *SHORT, 300)
NEW_TOKENS = 40
TOLERANCE = 1e-4
FAST_MODELS = ["llama3", "mixtral", "deepseek_v3", OWN_HEAD]
SLOW_MODELS = ["qwen2", "qwen3", "qwen3_moe all sparse", "qwen2 linear", "qwen3 yarn", "gemma3", "glm4_moe"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "models"


def started_engine(folder, **changes):
    settings = {"max_total_tokens": 16_384, "max_running_requests": 64, "mem_fraction": 0.3, "deterministic": True}
    stop = read_stop_token_ids(folder)
    return started(EngineSpec(model_path=folder), stop_token_ids=stop, **settings | ENGINE_LIMITS | changes)


def sample(engine, vocab_size):
    """Return full sequences, and for each the engine's log-probabilities of the tokens after the prompt."""
    prompts = draw(PROMPT_LENGTHS, vocab_size)
    generations = engine.generate(prompts, seeds=[0] * len(prompts), max_new_tokens=NEW_TOKENS)
    sequences = tuple(p + tuple(g.token_ids.tolist()) for p, g in zip(prompts, generations, strict=True))
    return sequences, [g.logprobs for g in generations]


def worst_difference(folder, sequences, logprobs):
    """Return the largest difference from transformers' log-probabilities over all sampled tokens."""
    pairs = zip(score(folder, sequences), logprobs, strict=True)
    return np.max([np.abs(want.numpy()[-len(got) :] - got).max() for want, got in pairs])


@pytest.fixture(
    scope="module", params=[*FAST_MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)]
)
def served(request, models):
    """Name and folder of a model, and an engine that serves it."""
    folder = save_model(request.param, models)
    with started_engine(folder) as engine:
        yield request.param, folder, engine


def test_logprobs_match_transformers(served):
    name, folder, engine = served
    assert_agreement(engine, folder, CONFIGS[name]["vocab_size"])


def test_completion_does_not_depend_on_the_batch(served):
    _, _, engine = served
    assert_batch_independent(engine)


@pytest.mark.last
@pytest.mark.parametrize("served", [OWN_HEAD], indirect=True)
def test_a_weight_sync_carries_a_head_of_its_own(served, tmp_path):
    name, folder, engine = served
    weights = changed(folder, seed=1)
    assert "lm_head.weight" in weights
    sync(engine, weights, 1)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert_agreement(engine, str(tmp_path), CONFIGS[name]["vocab_size"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe all sparse", "deepseek_v3"])
def test_logprobs_match_transformers_with_tp2(name, models):
    folder = save_model(name, models)
    with started_engine(folder, tp=2) as engine:
        assert_agreement(engine, folder, CONFIGS[name]["vocab_size"])


@pytest.mark.slow
def test_logprobs_match_transformers_with_chunked_prefill_and_radix_cache(models):
    """Without deterministic inference, prompts are chunked and share a cache; the second pass finds its prefixes."""
    folder = save_model("deepseek_v3", models)
    with started_engine(folder, deterministic=False) as engine:
        for _ in range(2):
            assert_agreement(engine, folder, CONFIGS["deepseek_v3"]["vocab_size"])


def assert_agreement(engine, folder, vocab_size):
    sequences, logprobs = sample(engine, vocab_size)
    assert sum(map(len, logprobs)) > 10 * NEW_TOKENS
    assert worst_difference(folder, sequences, logprobs) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe sparse step"])
def test_qwen3_moe_treats_all_layers_as_sparse(name, models):
    """SGLang's Qwen3-MoE model ignores mlp_only_layers, decoder_sparse_step and tie_word_embeddings."""
    folder = save_model(name, models)
    with started_engine(folder) as engine:
        sequences, logprobs = sample(engine, CONFIGS[name]["vocab_size"])
    # may be NaN: the experts of the dense layers are never loaded and hold uninitialized memory
    assert not worst_difference(folder, sequences, logprobs) <= TOLERANCE


def test_gemma2_ignores_attention_softcapping(models, tmp_path):
    """SGLang's torch_native attention ignores the cap that it is passed; window and final cap are correct."""
    folder = save_model("gemma2", models)
    shutil.copytree(folder, tmp_path / "uncapped")
    file = tmp_path / "uncapped" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_logit_softcapping": None}))
    with started_engine(folder) as engine:
        sequences, logprobs = sample(engine, CONFIGS["gemma2"]["vocab_size"])
    assert worst_difference(str(file.parent), sequences, logprobs) <= TOLERANCE
    assert worst_difference(folder, sequences, logprobs) > 100 * TOLERANCE


@pytest.mark.slow
def test_deepseek_v3_without_yarn_does_not_start(models):
    with (
        expect_error(WorkerError, "get_rope_cpu", "rope_scaling", "None"),
        started_engine(save_model("deepseek_v3 without query latent", models), deterministic=False),
    ):
        pass
