"""Tokenizers from tiktoken.model, compared with tiktoken's algorithm, and with tiktoken where it is installed."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megarl.data.tokenizer import PATTERN, load_tokenizer, read_ranks
from megarl.engines.engine_spec import read_stop_token_ids
from megarl.errors import DataError
from megarl.rollout.environments.conversation import ChatRenderer
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import DAY

UPPER, LOWER = (rf"[[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}]--\p{{Han}}]" for kind in (r"Lu}\p{Lt", "Ll"))
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = regex.compile(
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{END}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)
"""The published pattern in the syntax of the package `regex`."""

SPECIALS = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 17: "<|im_middle|>"}
SPECIALS |= {11: "<|tool_call_begin|>", 254: "[UNK]", 255: "[PAD]"}
"""Offset from the vocabulary's end -> special token, laid out as in Kimi-K2; tool calls are no special tokens there."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

PARTS = [
    *"aBéßǅ中文一〇々ー한😀\u0301\u200d\u00a0ⅷ½１!-_ \t\n",
    "'s",
    "'LL",
    "don't",
    "123",
    "4567",
    "  ",
    "\r\n",
    "//",
    "\n\n\n",
]
TEXTS = [
    "",
    "   ",
    "Hello WORLD's it's 12345 I'LL DON'T",
    "中文分词abc中文，数字123456和标点。",
    "カタカナ ひらがな 한국어 русский العربية",
    "def f(x):\n\treturn x  # ok\r\n\r\n\n  y",
    "e\u0301a naïve ½ ⅷ ０１２３",
    "👩‍👩‍👧 ok \ufeff\u2028\u3000x",
    "x" * 2000,
    "中" * 500,
    "<|im_end",
]


def make_tokens(texts: list[str], size: int) -> list[bytes]:
    """Train a byte-level BPE; return its tokens by rank, single bytes first."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranked = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    return sorted((bytes(byte_of[letter] for letter in token) for token, _ in ranked), key=lambda t: len(t) > 1)


def write_folder(
    folder: Path, tokens: list[bytes], code: str = "tokenization_kimi.TikTokenTokenizer", **changes: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("".join(lines))
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {
        str(len(tokens) + offset): {"content": name, "special": "tool" not in name, **flags}
        for offset, name in SPECIALS.items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"],
        "auto_map": {"AutoTokenizer": [code, None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**6,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (folder / "tokenization_kimi.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    return folder


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    docs = [path.read_text() for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))]
    return make_tokens([*docs, *[text * 5 for text in TEXTS[2:8]]], 3000)


@pytest.fixture(scope="module")
def folder(tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("kimi") / "model", tokens)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(0)
    return [*TEXTS, *("".join(rng.choices(PARTS, k=rng.randint(1, 14))) for _ in range(2000))]


def encode_piece(ranks: dict[bytes, int], piece: bytes) -> list[int]:
    """Merge the adjacent pair whose union has the lowest rank, the first of equals, until no union is a token."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        unions = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [(ranks[union], i) for i, union in enumerate(unions) if union in ranks]
        if not known:
            return [ranks[part] for part in parts]
        _, i = min(known)
        parts[i : i + 2] = [unions[i]]


def encode_plainly(ranks: dict[bytes, int], text: str) -> list[int]:
    pieces = [match.group() for match in PIECES.finditer(text)]
    assert "".join(pieces) == text
    return [token for piece in pieces for token in encode_piece(ranks, piece.encode())]


def test_texts_have_the_tokens_of_tiktoken(
    tokenizer: PreTrainedTokenizerBase, tokens: list[bytes], texts: list[str]
) -> None:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == encode_plainly(ranks, text), text
        assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    assert tokenizer(texts)["input_ids"] == [encode_plainly(ranks, text) for text in texts]


def test_texts_have_the_tokens_of_the_installed_tiktoken(
    tokenizer: PreTrainedTokenizerBase, folder: Path, tokens: list[bytes], texts: list[str]
) -> None:
    ranks, specials = read_ranks(folder / "tiktoken.model"), {name: len(tokens) + i for i, name in SPECIALS.items()}
    reference = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    for text in [*texts, f"{CHAT_TEMPLATE}[EOS]"]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, allowed_special="all"), text


def test_vocabularies_of_any_order_have_the_tokens_of_tiktoken(tmp_path: Path) -> None:
    """Ranks need not follow lengths, and a token may be the union of several pairs."""
    rng = random.Random(1)
    for number in range(20):
        pool, known = [b"a", b"b", b"c"][: 2 + number % 2], set[bytes]()
        for _ in range(rng.randint(3, 40)):
            union = rng.choice(pool) + rng.choice(pool)
            if len(union) < 12 and union not in known:
                known.add(union)
                pool.append(union)
        tokens = [*(bytes([byte]) for byte in range(256)), *rng.sample(sorted(known), len(known))]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        tokenizer = load_tokenizer(write_folder(tmp_path / str(number), tokens))
        for _ in range(100):
            text = "".join(rng.choices("abc", k=rng.randint(1, 25)))
            assert tokenizer.encode(text, add_special_tokens=False) == encode_plainly(ranks, text)


def test_special_tokens_have_their_published_ids(tokenizer: PreTrainedTokenizerBase, tokens: list[bytes]) -> None:
    base = len(tokens)
    assert len(tokenizer) == base + 256
    for offset, name in SPECIALS.items():
        assert tokenizer.encode(f"a{name}b", add_special_tokens=False)[1:-1] == [base + offset]
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert named == (base, base + 1, base + 254, base + 255)
    assert tokenizer.convert_ids_to_tokens(base + 20) == f"<|reserved_token_{base + 20}|>"
    everything = list(range(base, base + 256))
    assert tokenizer.decode(everything, skip_special_tokens=True) == "<|tool_call_begin|>"
    split = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert split == encode_plainly({token: rank for rank, token in enumerate(tokens)}, "<|im_end|>")
    assert tokenizer("a")["input_ids"] == [tokens.index(b"a")]  # neither bos nor eos


def test_conversations_are_rendered(tokenizer: PreTrainedTokenizerBase, tokens: list[bytes]) -> None:
    ids = ChatRenderer(tokenizer, DAY).prompt([{"role": "user", "content": "中<|im_end|>"}])
    base, ranks = len(tokens), {token: rank for rank, token in enumerate(tokens)}
    expected = [base + 3, *encode_plainly(ranks, "user"), base + 17, *encode_plainly(ranks, "中")]
    expected += [*encode_plainly(ranks, "<|im_end|>"), base + 2]  # first as text, then as token
    assert ids == [*expected, base + 4, *encode_plainly(ranks, "assistant"), base + 17]


def test_no_code_of_the_folder_has_run(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.name_or_path == str(folder)
    assert not (folder / "ran").exists()


def test_engines_stop_at_the_token_of_the_configuration(folder: Path, tokens: list[bytes]) -> None:
    assert read_stop_token_ids(str(folder)) == (len(tokens) + 1,)


def test_moonlight_is_known_and_other_code_is_not(tokens: list[bytes], tmp_path: Path) -> None:
    load_tokenizer(write_folder(tmp_path / "a", tokens, "tokenization_moonshot.TikTokenTokenizer"))
    load_tokenizer(write_folder(tmp_path / "b", tokens, auto_map=None))
    with expect_error(DataError, "auto_map.AutoTokenizer", "tokenization_qwen.QWenTokenizer"):
        load_tokenizer(write_folder(tmp_path / "c", tokens, "tokenization_qwen.QWenTokenizer"))


def replace_line(number: int, line: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "tiktoken.model"
        lines = file.read_text().splitlines()
        lines[number - 1] = line
        file.write_text("\n".join(lines))

    return edit


def edit_specials(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": changes}))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda folder: (folder / "tiktoken.model").unlink(), "tiktoken.model: cannot be read: No such file"),
        (replace_line(7, "x"), "tiktoken.model:7: needs a token in base64 and its rank, got b'x'"),
        (replace_line(7, "@@@@ 6"), "tiktoken.model:7: needs a token in base64"),
        (replace_line(300, "enp6eno= 7"), "tiktoken.model: needs tokens of the ranks 0 to 2999, each once"),
        (replace_line(1, "enp6eno= 0"), "needs a token for each byte, 1 are missing, first 0x"),
        (edit_specials(), "tokenizer_config.json: needs added_tokens_decoder, the special tokens by id, got none"),
        (edit_specials(**{"5": {"content": "[EOS]"}}), "added_tokens_decoder needs .* of at least 3000, .* got '5'"),
        (edit_specials(**{"3001": "[EOS]"}), "added_tokens_decoder needs .*, got '3001': '\\[EOS\\]'"),
    ],
)
def test_invalid_files_are_named(
    edit: Callable[[Path], None], message: str, tokens: list[bytes], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", tokens)
    edit(folder)
    with pytest.raises(DataError, match=message):
        load_tokenizer(folder)
