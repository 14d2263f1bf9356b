"""A model folder whose code, wherever it is run, leaves a file beside the folder."""

import json
import pickle
from pathlib import Path
from typing import Any

CODE = """
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel, TokenizersBackend

Path({mark!r}).write_text("ran")


class Tokenizer(TokenizersBackend):
    pass


class Config(PreTrainedConfig):
    model_type = "hostile"


class Model(PreTrainedModel):
    pass
"""

CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Model",
    "AutoModelForCausalLM": "Model",
    "AutoModelForSequenceClassification": "Model",
}


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self._path, "unpickled")


def mark_of(folder: Path) -> Path:
    """Return the file that exists once code of the folder has run."""
    return folder.parent / f"{folder.name}-ran"


def add_code(folder: Path, *, tokenizer: str = "hostile.Tokenizer", **config: Any) -> None:
    """Add code to a model folder: by `auto_map`, for generation, and in pickles; `config`: keys of config.json."""
    mark = mark_of(folder)
    (folder / "hostile.py").write_text(CODE.format(mark=str(mark)))
    for name in ("setup.py", "conftest.py", "sitecustomize.py", "__init__.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(_Writer(mark)))
    auto_map = {key: f"hostile.{name}" for key, name in CLASSES.items()}
    _edit(folder / "config.json", **{"auto_map": auto_map, **config})
    _edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [tokenizer, None]}, tokenizer_class="Tokenizer")


def _edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))
