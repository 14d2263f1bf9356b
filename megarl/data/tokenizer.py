"""Load the tokenizer of a model folder, and find tokens that the model does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.tiktoken_file import VOCABULARY_FILE, is_known_tokenizer, load_tiktoken
from megarl.errors import DataError
from megarl.model_files.companions import TOKENIZER_PATTERNS, find_companions
from megarl.model_files.json_object import read_json_object, read_optional_json_object
from megarl.model_files.lfs_pointer import refuse_lfs_pointer
from megarl.model_files.remote_code import SWITCH, require_own_code, tokenizer_code
from megarl.text import text_of
from megarl.user_code import outcome_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    VOCABULARY_FILE,
)
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


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer in folder `path`; nothing is downloaded.

    A tokenizer of `TOKENIZER_CLASSES` is loaded without torch and without the checks of config.json in transformers.

    Args:
        trust_remote_code: run the code in the folder that `auto_map` names. False: the tokenizer is that of
            tokenizer.json, or one that megarl or transformers can load without this code.

    Raises:
        DataError: the folder does not exist or has no tokenizer, a file cannot be read, the tokenizer needs code that
            must not run, or it has no end-of-sequence token.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path}: needs a model folder in Hugging Face format, there is no such folder")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(f"{path}: the model folder holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    # Read first, because the libraries' errors do not name the file.
    for file in find_companions(path, TOKENIZER_PATTERNS):
        refuse_lfs_pointer(file)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        read_optional_json_object(path / name)
    tokenizer, error = outcome_of(partial(_load, path, trust_remote_code=trust_remote_code))
    if isinstance(error, DataError):
        raise error
    if error is not None:  # transformers may raise anything for a bad file; the Rust parser raises Exception itself
        reason = " ".join(f"{type(error).__name__}: {text_of(error, str)}".split())
        raise DataError(f"{path}: the tokenizer cannot be loaded: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{path}: the tokenizer needs an end-of-sequence token, got none; set eos_token in "
            f"{path / 'tokenizer_config.json'}"
        )
    _vocab_size_in.cache_clear()  # the folder may be another than when a tokenizer was last loaded from it
    unknown = describe_unknown_token(tokenizer, [tokenizer.eos_token_id], read_vocab_size(tokenizer))
    if unknown is not None:
        raise DataError(f"{path}: the end-of-sequence token of the tokenizer: {unknown}")
    return tokenizer


def _load(path: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer without the folder's code where that is possible; raises what transformers raises."""
    import transformers  # here, because the controller requests the processes of a run before it needs tokenizers

    config, code = read_optional_json_object(path / "tokenizer_config.json"), tokenizer_code(path)
    is_serialized = (path / "tokenizer.json").is_file()
    if trust_remote_code:
        require_own_code(path)
    if is_known_tokenizer(config) and not is_serialized:
        return load_tiktoken(path, config)
    if code is not None and not trust_remote_code and not is_serialized:
        raise DataError(
            f"{path / 'tokenizer_config.json'}: auto_map.AutoTokenizer names {code}, code in the model folder, which "
            f"has no tokenizer.json; such code runs only with {SWITCH}"
        )
    if code is None:
        chosen = _tokenizer_class(path) or "AutoTokenizer"
    else:
        chosen = "AutoTokenizer" if trust_remote_code else "TokenizersBackend"
    load: Callable[..., PreTrainedTokenizerBase] = getattr(transformers, chosen).from_pretrained
    # None would ask on stdin
    return load(str(path), local_files_only=True, trust_remote_code=trust_remote_code and code is not None)


def read_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return `vocab_size` of the model in the folder that the tokenizer is from; None: there is no such model.

    A tokenizer may have tokens beyond it: some that were added without rows in the embedding.

    Raises:
        DataError: config.json cannot be read.
    """
    return _vocab_size_in(getattr(tokenizer, "name_or_path", ""))  # one that is not from a folder may lack the attribute


@lru_cache(maxsize=16)  # each trajectory is compared with it
def _vocab_size_in(folder: str) -> int | None:
    file = Path(folder) / "config.json"
    size = read_json_object(file).get("vocab_size") if folder and file.is_file() else None
    return size if isinstance(size, int) else None


def describe_unknown_token(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], vocab_size: int | None
) -> str | None:
    """Return a message about the first token that a model of `vocab_size` tokens does not have; None: it has them all.

    Args:
        vocab_size: None: unknown, only negative ids are wrong.
    """
    limit = sys.maxsize if vocab_size is None else vocab_size
    if not len(token_ids) or (min(token_ids) >= 0 and max(token_ids) < limit):
        return None
    token = next(token for token in token_ids if not 0 <= token < limit)
    text = "" if token < 0 else f" ({text_of(tokenizer.convert_ids_to_tokens(token))})"
    return (
        f"token {token}{text} is not in the model's vocabulary, whose size is {vocab_size} (vocab_size in config.json)"
    )


def _tokenizer_class(path: Path) -> str | None:
    """Return the name of the tokenizer's class in transformers; None if only AutoTokenizer knows it."""
    config = read_optional_json_object(path / "tokenizer_config.json")
    family, written = read_optional_json_object(path / "config.json").get("model_type"), config.get("tokenizer_class")
    if "auto_map" in config or not (path / "tokenizer.json").is_file():
        return None
    return TOKENIZER_CLASSES.get((str(family), str(written).removesuffix("Fast")))
