"""Load the tokenizer of a model folder and its stop tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import DataError
from megarl.model_files.json_object import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
"""A folder with any of these files has a tokenizer."""

TOKENIZER_CLASSES = {
    **{(family, "Qwen2Tokenizer"): "Qwen2Tokenizer" for family in ("qwen2", "qwen3", "qwen3_moe")},
    **{
        (family, name): "TokenizersBackend"
        for family in ("llama", "qwen3", "qwen3_moe")
        for name in ("PreTrainedTokenizer", "TokenizersBackend")
    },
}
"""(model_type of config.json, tokenizer_class of tokenizer_config.json without `Fast`) -> the class in transformers
that AutoTokenizer chooses. AutoTokenizer itself imports torch and most of transformers, which takes seconds."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in folder `path`; nothing is downloaded and no code from the folder runs.

    A tokenizer of `TOKENIZER_CLASSES` is loaded without torch and without the checks of config.json in transformers.

    Raises:
        DataError: the folder does not exist or has no tokenizer, a file cannot be read, or the tokenizer has no
            end-of-sequence token.
    """
    import transformers  # here, because the controller requests the processes of a run before it needs tokenizers
    from huggingface_hub.errors import StrictDataclassError

    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path}: needs a model folder in Hugging Face format, there is no such folder")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"{path}: the model folder holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    # Read first, because the libraries' errors do not name the file.
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        _read_object(path / name)
    chosen = _tokenizer_class(path) or "AutoTokenizer"
    load: Callable[..., PreTrainedTokenizerBase] = getattr(transformers, chosen).from_pretrained
    try:
        tokenizer = load(str(path), local_files_only=True)
    except Exception as e:
        # The Rust parser raises Exception itself, not a subclass. Any other kind is a bug and propagates.
        if (
            not isinstance(e, OSError | ValueError | KeyError | TypeError | StrictDataclassError)
            and type(e) is not Exception
        ):
            raise
        raise DataError(f"{path}: the tokenizer cannot be loaded: {type(e).__name__}: {e}") from e
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{path}: the tokenizer needs an end-of-sequence token, got none; set eos_token in "
            f"{path / 'tokenizer_config.json'}"
        )
    return tokenizer


def _tokenizer_class(path: Path) -> str | None:
    """Return the name of the tokenizer's class in transformers; None if only AutoTokenizer knows it."""
    config = _read_object(path / "tokenizer_config.json")
    family, written = _read_object(path / "config.json").get("model_type"), config.get("tokenizer_class")
    if "auto_map" in config or not (path / "tokenizer.json").is_file():
        return None
    return TOKENIZER_CLASSES.get((str(family), str(written).removesuffix("Fast")))


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all tokens that end a completion: eos of the tokenizer, of config.json and of generation_config.json.

    Chat models often have several (`<|im_end|>` and `<|endoftext|>`), spread over these files.

    Raises:
        DataError: a file is not a JSON object, or an `eos_token_id` is neither an integer nor a list of integers.
    """
    ids: list[Any] = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        file = Path(path) / name
        eos = _read_object(file).get("eos_token_id")
        some = [] if eos is None else eos if isinstance(eos, list) else [eos]
        for value in some:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DataError(f"{file}: eos_token_id needs a token id or a list of them, got {eos!r}")
        ids += some
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; empty if the file does not exist."""
    return read_json_object(file) if file.is_file() else {}
