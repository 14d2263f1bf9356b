from __future__ import annotations

import pytest
import torch

from tests.megatron.fidelity.models import save_model as save_named_model
from tests.megatron.fidelity.models import save_value_model


def save_model(path, *, family="qwen3", seed=0, **overrides):
    """Save a tiny random model in Hugging Face format; its sizes do not divide each other by accident."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 331,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    } | overrides
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        # transformers zeroes the padding token's row; a norm of zeros amplifies rounding a thousandfold
        model.get_input_embeddings().weight.normal_(std=0.2)
    model.float().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def qwen3_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def qwen2_tied_path(tmp_path_factory):
    return save_model(
        tmp_path_factory.mktemp("qwen2"),
        family="qwen2",
        tie_word_embeddings=True,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Function from a model name of `tests/megatron/fidelity/models.py` to its folder: `model_folder("qwen3")`."""
    root = tmp_path_factory.getbasetemp() / "models"
    return lambda name: save_named_model(name, root)


@pytest.fixture(scope="session")
def value_folder(tmp_path_factory):
    """As `model_folder`, for value models."""
    root = tmp_path_factory.getbasetemp() / "models"
    return lambda name: save_value_model(name, root)
