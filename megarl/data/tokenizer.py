"""Load the tokenizer of a model folder, and find tokens that the model does not have."""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import DataError
from megarl.model_files.json_object import JsonMapping, read_json_object, read_optional_json_object, refuse_lfs_pointer
from megarl.model_files.model_config import (
    SWITCH,
    TOKENIZER_PATTERNS,
    find_companions,
    language_config,
    require_own_code,
    tokenizer_code,
)
from megarl.text import text_of
from megarl.user_code import outcome_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


VOCABULARY_FILE = "tiktoken.model"
"""Lines `TOKEN RANK`: the bytes of a token in base64, and its id, by which tiktoken also orders merges."""

CLASSES = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
"""Classes in the code of the published folders, named as in `auto_map.AutoTokenizer`, that split texts by `PATTERN`."""

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Pieces of a text that are encoded separately: runs of Han, words, up to three digits, punctuation, white space."""

NUM_SPECIAL_TOKENS = 256
"""Number of ids after the vocabulary; those that tokenizer_config.json does not name are `<|reserved_token_ID|>`."""


def is_known_tokenizer(config: JsonMapping) -> bool:
    """Whether `load_tiktoken` reads the tokenizer with this tokenizer_config.json."""
    auto_map = config.get("auto_map")
    if not auto_map:
        return config.get("tokenizer_class") == "TikTokenTokenizer"
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    slow = named[0] if isinstance(named, list) and named else named
    return slow in CLASSES


def load_tiktoken(path: Path, config: JsonMapping) -> PreTrainedTokenizerBase:
    """Load the tokenizer in folder `path`; it gives the tokens that tiktoken gives.

    Args:
        config: content of tokenizer_config.json.

    Raises:
        DataError: `tiktoken.model` or the special tokens are invalid.
    """
    from transformers import TokenizersBackend

    tokenizer = _make_tokenizer(read_ranks(path / VOCABULARY_FILE), config, path / "tokenizer_config.json")
    # without a vocab_file transformers would convert tiktoken.model itself, for the pattern of another model
    found: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(
        str(path), local_files_only=True, trust_remote_code=False, tokenizer_object=tokenizer, vocab_file=""
    )
    return found


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ids of all tokens of a `tiktoken.model`, which are 0 to their number - 1.

    Raises:
        DataError: a line is invalid (the message names it), ids or single bytes are missing.
    """
    ranks: dict[bytes, int] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as e:
        raise DataError(f"{file}: cannot be read: {e.strerror}") from e
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as e:
            raise DataError(f"{file}:{number}: needs a token in base64 and its rank, got {line[:80]!r}") from e
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{file}: needs tokens of the ranks 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"{file}: needs a token for each byte, {len(missing)} are missing, first 0x{missing[0]:02x}")
    return ranks


def _make_tokenizer(ranks: dict[bytes, int], config: JsonMapping, config_file: Path) -> Tokenizer:
    """Return the tokenizer with its special tokens; `config_file`: for messages."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()  # BPE of `tokenizers` is over letters, one for each byte

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # tiktoken merges the pair whose union has the lowest rank; pairs of equal union are ordered by their own ranks
    merges = sorted(
        (rank, ranks[token[:i]], ranks[token[i:]], spell(token[:i]), spell(token[i:]))
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    )
    tokenizer = Tokenizer(
        models.BPE(
            {spell(token): rank for token, rank in ranks.items()},
            [(left, right) for *_, left, right in merges],
            ignore_merges=True,  # a piece that is a token is that token
        )
    )
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = _special_tokens(config, len(ranks), config_file)
    last = max(len(ranks) + NUM_SPECIAL_TOKENS - 1, *named)
    tokenizer.add_tokens(
        [
            named.get(i) or AddedToken(f"<|reserved_token_{i}|>", normalized=False, special=True)
            for i in range(len(ranks), last + 1)
        ]
    )
    return tokenizer


def _special_tokens(config: JsonMapping, num_tokens: int, file: Path) -> dict[int, Any]:
    """Return id -> token of `added_tokens_decoder`; all ids follow the `num_tokens` of the vocabulary."""
    from tokenizers import AddedToken

    found: dict[int, Any] = {}
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if not key.isdecimal() or int(key) < num_tokens or not isinstance(content, str):
            raise DataError(
                f"{file}: added_tokens_decoder needs {{content, ...}} by ids of at least {num_tokens}, the number of "
                f"tokens in {VOCABULARY_FILE}, got {key!r}: {token!r}"
            )
        found[int(key)] = AddedToken(content, normalized=False, special=bool(token.get("special")))
    if not found:
        raise DataError(f"{file}: needs added_tokens_decoder, the special tokens by id, got none")
    return found


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

    Examples:
            tokenizer = rl.load_tokenizer("models/Qwen3-0.6B")
            text = tokenizer.decode(trajectory.token_ids[trajectory.loss_mask])

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
    return _vocab_size_in(
        getattr(tokenizer, "name_or_path", "")
    )  # one that is not from a folder may lack the attribute


@lru_cache(maxsize=16)  # each trajectory is compared with it
def _vocab_size_in(folder: str) -> int | None:
    file = Path(folder) / "config.json"
    size = language_config(read_json_object(file)).get("vocab_size") if folder and file.is_file() else None
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
