import pytest

from tests.megatron.fidelity.models import CONFIGS, build, save_value_model
from tests.megatron.fidelity.models import save_model as save_named_model


def save_model(path, name="qwen3", *, values=False, **changes):
    """Save a smaller variant of a model of `tests/megatron/fidelity/models.py`, with untied embeddings."""
    config = CONFIGS[name] | {"num_hidden_layers": 2, "tie_word_embeddings": False} | changes
    build(config, values=values).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def qwen3_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Function from a model name of `tests/megatron/fidelity/models.py` to its folder: `model_folder("qwen3")`."""
    root = tmp_path_factory.getbasetemp() / "models"
    return lambda name: save_named_model(name, root)


@pytest.fixture(scope="session")
def path(model_folder):
    """Folder of the model `qwen3`."""
    return model_folder("qwen3")


@pytest.fixture(scope="session")
def value_folder(tmp_path_factory):
    """As `model_folder`, for value models."""
    root = tmp_path_factory.getbasetemp() / "models"
    return lambda name: save_value_model(name, root)
