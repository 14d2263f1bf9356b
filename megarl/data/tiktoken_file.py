"""Load the tokenizers of Kimi-K2 and Moonlight from `tiktoken.model`, without the code in their folders."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import DataError
from megarl.model_files.json_object import JsonMapping

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
