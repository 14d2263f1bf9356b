"""Load the tokenizer of a model folder and its stop tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.errors import DataError
from megarl.model_files.json_object import read_json_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
"""A folder with any of these files has a tokenizer."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in folder `path`; nothing is downloaded and no code from the folder runs.

    Raises:
        DataError: the folder does not exist or has no tokenizer, a file cannot be read, or the tokenizer has no
            end-of-sequence token.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path}: needs a model folder in Hugging Face format, there is no such folder")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"{path}: the model folder holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    # Read first, because the libraries' errors do not name the file.
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        _read_object(path / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
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
