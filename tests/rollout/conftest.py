"""Session fixtures: a tiny random Qwen3 model and one engine that serves it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.rollout.engine_spec import EngineSpec, read_stop_token_ids
from tests.rollout.remote import RemoteEngine

EOS = 250


def tiny_qwen3(folder, seed=0, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(Qwen3Config(**(settings | changes)), dtype=torch.float32)
    # random q/k norms and layer norms, so that tests notice if one is ignored
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    tiny_qwen3(folder)
    return str(folder)


@pytest.fixture(scope="session")
def spec(model_dir):
    return EngineSpec(
        model_path=model_dir,
        max_total_tokens=16_384,
        max_running_requests=64,
        deterministic=True,
        stop_token_ids=read_stop_token_ids(model_dir),
    )


@pytest.fixture(scope="session")
def engine(spec):
    engine = RemoteEngine(spec)
    engine.call("start")
    yield engine
    engine.close()
