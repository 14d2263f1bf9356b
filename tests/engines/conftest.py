"""Session fixtures: tiny random Qwen3 models, an engine that serves one of them, and a tokenizer for chats."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.engines.engine_spec import EngineSpec
from megarl.model_files.model_config import read_stop_token_ids
from tests.engines.remote import started
from tests.model_files.hostile_code import add_code
from tests.rollout.clock import ENGINE_LIMITS
from tests.rollout.environments.chat_templates import APPEND, chat_tokenizer

EOS = 250
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


def save_tiny(folder, config, norms=(0.5, 1.5)):
    """Save a random model; its norms are random too, so that tests notice if one is ignored."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(*norms)
    model.save_pretrained(folder)


def tiny_qwen3(folder, **changes):
    save_tiny(folder, Qwen3Config(**SIZES | {"tie_word_embeddings": False} | changes))


@pytest.fixture(scope="session")
def tokenizer():
    return chat_tokenizer(APPEND)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Model whose folder also has code, which nothing may run."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    tiny_qwen3(folder)
    add_code(folder)
    return str(folder)


@pytest.fixture(scope="session")
def uneven_dir(tmp_path_factory):
    """Model with one key-value head for both ranks and a vocabulary that needs padding: rank 1 attends to nothing."""
    folder = tmp_path_factory.mktemp("models") / "uneven"
    tiny_qwen3(folder, num_key_value_heads=1, vocab_size=252)
    return str(folder)


@pytest.fixture(scope="session")
def spec(model_dir):
    return EngineSpec(
        model_path=model_dir,
        max_total_tokens=16_384,
        max_running_requests=64,
        deterministic=True,
        **ENGINE_LIMITS,
        stop_token_ids=read_stop_token_ids(model_dir),
    )


@pytest.fixture(scope="session")
def engine(spec):
    with started(spec) as engine:
        yield engine
