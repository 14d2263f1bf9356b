"""SGLang on one CUDA device: log-probabilities, the mismatch with the trainer, weights in the memory of the device."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.config.limits import AUTO_LIMITS
from megarl.engines.engine_spec import EngineSpec
from megarl.model_files.model_config import read_stop_token_ids
from tests.engines import reference
from tests.engines.conftest import EOS
from tests.engines.remote import boxes_of, send_rounds, started, sync
from tests.megatron.fidelity.measure import measure
from tests.rollout.clock import ENGINE_LIMITS

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 3 * j) % 240 for j in range(5 + 4 * i)] for i in range(6)]
MEAN_TOLERANCE = 0.03
"""Of log-probabilities in bfloat16, against float32."""


@pytest.fixture(scope="module")
def engine(model_dir):
    pytest.importorskip("sgl_kernel", reason="needs SGLang's CUDA kernels: make setup-gpu")
    pytest.importorskip("torch_memory_saver", reason="needs SGLang's memory saver: make setup-gpu")
    spec = EngineSpec(
        model_path=model_dir,
        device="cuda",
        dtype="bfloat16",
        mem_fraction=0.3,
        releases_memory=True,
        stop_token_ids=read_stop_token_ids(model_dir),
        **ENGINE_LIMITS,
        extra_args={"attention_backend": "triton"},  # the default has no kernels for heads of this size
    )
    with started(spec) as engine:
        yield engine


def mean_difference(model, generations):
    """Return the mean |difference| of the engine's log-probabilities from those of transformers."""
    pairs = zip(PROMPTS, generations, strict=True)
    return np.concatenate([np.abs(reference.logprobs(model, p, g) - g.logprobs) for p, g in pairs]).mean()


def test_logprobs_match_transformers(engine, model_dir):
    generations = engine.generate(PROMPTS, temperature=1.0, max_new_tokens=24)
    assert mean_difference(reference.load(model_dir), generations) < MEAN_TOLERANCE
    for generation in generations:
        assert EOS not in generation.token_ids[:-1]


def test_mismatch_with_the_trainer_is_within_the_limits(engine, model_dir, tmp_path):
    """Log-probabilities of the trainer's ranks on the same GPU, also in bfloat16."""
    generations = engine.generate(PROMPTS, temperature=1.0, max_new_tokens=64)
    sequences = tuple((*p, *g.token_ids.tolist()) for p, g in zip(PROMPTS, generations, strict=True))
    scored = measure(model_dir, sequences, tmp_path, dtype="bfloat16", device="cuda").token_scores
    pairs = [(scored[i].numpy()[-len(g.logprobs) :], g.logprobs) for i, g in enumerate(generations)]
    difference = np.concatenate([trainer - engine for trainer, engine in pairs])
    limits = AUTO_LIMITS["bfloat16"]
    assert 0 < np.mean(np.exp(difference) - 1 - difference) < limits["logprob_kl"].limit
    assert np.quantile(np.abs(difference), 0.99) < limits["logprob_abs_p99"].limit


def test_boxes_in_device_memory_are_written_bitwise(engine, model_dir, tmp_path):
    """The bucket is opened by the engine's scheduler through CUDA IPC."""
    changed = reference.changed(model_dir, seed=1)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in changed.items()}
    (layout,) = engine.call("layouts")
    engine.call("begin_weights")
    send_rounds(engine, [[boxes_of(layout, weights)]], device="cuda")
    engine.call("end_weights", 1)
    generations = engine.generate(PROMPTS, temperature=1.0, max_new_tokens=24)
    assert {int(v) for g in generations for v in g.policy_versions} == {1}
    assert mean_difference(reference.load(model_dir, changed), generations) < MEAN_TOLERANCE
    assert mean_difference(reference.load(model_dir), generations) > 10 * MEAN_TOLERANCE
    before = load_file(f"{model_dir}/model.safetensors")
    assert not torch.equal(before["lm_head.weight"].to(torch.bfloat16), weights["lm_head.weight"])


def test_released_memory_is_free_on_the_device_until_it_is_resumed(engine, model_dir):
    """The KV cache takes most of `mem_fraction`; after a resume, a push of the weights restores the engine."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in reference.load(model_dir).state_dict().items()}
    sync(engine, weights, 2)
    before = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=8)
    used, total = free_bytes()
    engine.call("release", ("weights", "kv_cache"))
    released, _ = free_bytes()
    assert released - used > 0.1 * total
    engine.call("resume", ("weights",))
    assert free_bytes()[0] > used  # the KV cache is still free
    engine.call("resume", ("kv_cache",))
    sync(engine, weights, 3)
    after = engine.generate(PROMPTS, temperature=0.0, max_new_tokens=8)
    assert [g.token_ids.tolist() for g in after] == [g.token_ids.tolist() for g in before]
    assert free_bytes()[0] < used + 0.02 * total


def free_bytes():
    """Return the free and the total memory of the device, over all processes."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()
