"""What config.json and the stored tensors of a model folder say together, read as transformers reads them.

    config.json                           stored                             the model has
    tie_word_embeddings: true             lm_head.weight, other values       a head of its own
    no architectures, model_type: qwen2                                      architectures: [Qwen2ForCausalLM]

Trainer, engines and exports all read the corrected config. torch is not imported.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megarl.errors import DataError
from megarl.model_files.header import StoredTensor
from megarl.model_files.json_object import JsonMapping, JsonObject, read_json_object, read_optional_json_object
from megarl.model_files.quantization import PackedTensor
from megarl.model_files.weight_index import EMBEDDING_TENSOR, HEAD_TENSOR, INDEX, copied_tensor_patterns, read_headers

SWITCH = "model.trust_remote_code: true"

CONFIG_FILES = ("config.json", "tokenizer_config.json")
"""Files with an `auto_map`: class of transformers -> the class in the folder's code that replaces it."""


def tokenizer_code(folder: Path) -> str | None:
    """Return the class that `auto_map.AutoTokenizer` of tokenizer_config.json names, `MODULE.CLASS`; None: none."""
    place = ("tokenizer_config.json", "auto_map.AutoTokenizer")
    return next((name for *where, name in _named_classes(folder) if tuple(where) == place), None)


def require_own_code(folder: Path) -> None:
    """Return if all code that the folder names is in the folder.

    Raises:
        DataError: a class is `REPOSITORY--MODULE.CLASS`: transformers would download the newest code from there.
    """
    for file, key, name in _named_classes(folder):
        if "--" in name:
            raise DataError(
                f"{folder / file}: {key} names {name}, code of another repository, of which no commit is pinned; with "
                f"{SWITCH}, copy it into {folder} and name it without the repository"
            )


def _named_classes(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (file, key, class) for each class that an `auto_map` names."""
    for file in CONFIG_FILES:
        auto_map = read_optional_json_object(folder / file).get("auto_map")
        entries = auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map}  # a list: an older form
        for key, named in entries.items():
            for name in named if isinstance(named, list) else [named]:
                if isinstance(name, str):
                    yield file, f"auto_map.{key}", name


TOKENIZER_PATTERNS = (
    *("tokenizer*.json", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tekken.json"),
    *("*.model", "*.model.v*", "*.tiktoken", "*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""Files that tokenizers and their chat templates are read from."""

COMPANION_PATTERNS = (*TOKENIZER_PATTERNS, "*.json", "*.txt", "*.py")
"""The same with config.json, generation_config.json, and the code that `auto_map` of these files names."""


def find_companions(folder: Path, patterns: tuple[str, ...] = COMPANION_PATTERNS) -> Iterator[Path]:
    """Yield the files that accompany the weights in `folder`, without indexes of weight files, once each."""
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    yield from sorted(file for file in files if not file.name.endswith(".index.json"))


def copy_companions(source: Path, target: Path) -> None:
    """Copy all companions except config.json into the existing folder `target`; a no-op for those already there.

    Raises:
        OSError: a file cannot be copied.
    """
    for file in find_companions(source):
        copy = target / file.relative_to(source)
        if file.name != "config.json" and file.resolve() != copy.resolve():
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)


ARCHITECTURES: Mapping[str, str] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""`model_type` of config.json -> architecture of the language model, where config.json names none."""

MTP_KEY, OTHER_MTP_KEY = "num_nextn_predict_layers", "num_mtp_layers"
"""Key of config.json with the number of MTP layers, and another name of it that transformers accepts."""


def _defaults(
    hidden: int, ffn: int, layers: int, heads: int, vocabulary: int, positions: int, eps: float, **further: object
) -> JsonObject:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        **further,
    }


_DEEPSEEK_V3 = _defaults(7168, 18432, 61, 128, 129_280, 4096, 1e-6, **{MTP_KEY: 1})
_GEMMA3 = _defaults(2304, 9216, 26, 8, 262_208, 131_072, 1e-6, tie_word_embeddings=True)
_QWEN3_5 = _defaults(4096, 12288, 32, 16, 248_320, 32_768, 1e-6)
_QWEN3_5_MOE = _defaults(2048, 1, 40, 16, 248_320, 32_768, 1e-6)  # no layer has an MLP of `intermediate_size`

DEFAULTS: Mapping[str, JsonMapping] = {
    "DeepseekV3": _DEEPSEEK_V3,
    "DeepseekV32": _defaults(7168, 18432, 61, 128, 129_280, 163_840, 1e-6),
    "Gemma2": _defaults(2304, 9216, 26, 8, 256_000, 8192, 1e-6, tie_word_embeddings=True),
    "Gemma3": _GEMMA3,
    "Gemma3Text": _GEMMA3,
    "Glm4Moe": _defaults(4096, 10944, 46, 96, 151_552, 131_072, 1e-5, **{MTP_KEY: 1}),
    "Glm4MoeLite": _defaults(2048, 10240, 47, 20, 154_880, 202_752, 1e-5),
    "GlmMoeDsa": _defaults(6144, 12288, 78, 64, 154_880, 202_752, 1e-5),
    "GptOss": _defaults(2880, 2880, 36, 64, 201_088, 131_072, 1e-5),
    "KimiK25": _DEEPSEEK_V3 | {"tie_word_embeddings": True},
    "Llama": _defaults(4096, 11008, 32, 32, 32_000, 2048, 1e-6),
    "MiMo": _defaults(4096, 22016, 32, 32, 151_936, 32_768, 1e-6),
    "MiniMaxM2": _defaults(3072, 1536, 62, 48, 200_064, 196_608, 1e-6, head_dim=128),
    "Mixtral": _defaults(4096, 14336, 32, 32, 32_000, 131_072, 1e-5),
    "Qwen2": _defaults(4096, 22016, 32, 32, 151_936, 32_768, 1e-6),
    "Qwen3": _defaults(4096, 22016, 32, 32, 151_936, 32_768, 1e-6),
    "Qwen3Moe": _defaults(2048, 6144, 24, 32, 151_936, 32_768, 1e-6),
    "Qwen3Next": _defaults(2048, 5632, 48, 16, 151_936, 32_768, 1e-6),
    "Qwen3_5": _QWEN3_5,
    "Qwen3_5Text": _QWEN3_5,
    "Qwen3_5Moe": _QWEN3_5_MOE,
}
"""Architecture up to `For` -> keys of config.json that all readers share, with transformers' defaults."""

UNTRAINED_TENSORS: Mapping[str, tuple[str, ...]] = {
    "Gemma3ForConditionalGeneration": ("vision_tower.*", "multi_modal_projector.*"),
    "KimiK25ForConditionalGeneration": ("vision_tower.*", "mm_projector.*"),
    "MiMoForCausalLM": ("model.mtp_layers.*",),
    "Qwen3NextForCausalLM": ("mtp.*",),
    "Qwen3_5ForConditionalGeneration": ("model.visual.*", "mtp.*"),
    "Qwen3_5MoeForConditionalGeneration": ("model.visual.*", "mtp.*"),
}
"""Architecture -> name patterns of tensors that training does not change: vision towers, and undescribed prediction
layers. Exports copy them from the model folder, weight syncs leave them out."""

SINGLE_FILE = "model.safetensors"
"""File of a model with one file of weights."""

CHUNK_BYTES = 8 * 2**20
"""Bytes of a tensor that are compared at a time."""


def read_model_config(path: str | Path) -> JsonObject:
    """Return config.json of a model folder, or the config.json at `path`, with `find_corrections` applied.

    Raises:
        DataError: the file does not exist or is not a JSON object.
    """
    config = read_json_object(config_file(path))
    return config | _corrections(config, Path(path))


def language_config(config: JsonMapping) -> JsonObject:
    """Return the keys of a config.json with those of its language model, which `text_config` holds in some folders.

    Keys of `DEFAULTS` that the file leaves out have their defaults. The folder's architecture stays: it names the model
    that holds the language model and, for instance, a vision tower. So does its `tie_word_embeddings`, which
    transformers takes for such a model.
    """
    names, text = config.get("architectures"), config.get("text_config")
    name = str(names[0]) if isinstance(names, list) and names else ""
    defaults = DEFAULTS.get(name.split("For", maxsplit=1)[0], {})
    stated = {**config, **(text if isinstance(text, Mapping) else {})}
    if OTHER_MTP_KEY in stated:
        defaults = {key: value for key, value in defaults.items() if key != MTP_KEY}
    if not isinstance(text, Mapping):
        return {**defaults, **stated}
    outer = {key: defaults[key] for key in ("tie_word_embeddings",) if key in defaults}
    outer |= {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    return {**defaults, **stated, **outer}


def alternating_layers(num_layers: int, interval: int, nth: str, others: str) -> list[str]:
    """Return the kind of each layer of a model in which layer `interval`, and each as many after it, has kind `nth`.

    Examples:
        >>> alternating_layers(5, 2, "full", "window")
        ['window', 'full', 'window', 'full', 'window']
    """
    return [others if number % interval else nth for number in range(1, num_layers + 1)]


def untrained_patterns(config: JsonMapping) -> tuple[str, ...]:
    """Return those of `UNTRAINED_TENSORS` of the architecture in a config.json."""
    return UNTRAINED_TENSORS.get(str((config.get("architectures") or [None])[0]), ())


def config_file(path: str | Path) -> Path:
    """Return the path of the config.json in folder `path`; `path` itself if that is no folder."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def find_corrections(folder: Path) -> JsonObject:
    """Return the keys of `folder`/config.json that need other values, with these; empty if there is no config.json.

    Raises:
        DataError: config.json is not a JSON object.
    """
    file = folder / "config.json"
    return _corrections(read_json_object(file), folder) if file.exists() else {}


def has_own_head(folder: Path) -> bool:
    """Return whether `folder` stores an `lm_head.weight` whose shape or values differ from those of the embedding."""
    try:
        stored = read_headers(folder)
    except DataError:
        return False  # a folder without weights; damaged ones are reported by those who read them
    head, embedding = stored.get(HEAD_TENSOR), stored.get(EMBEDDING_TENSOR)
    return head is not None and embedding is not None and not holds_same_values(head, embedding)


def holds_same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two stored tensors have the same shape and, whatever their dtypes, the same values.

    Weights of 4 bits are not decoded, and never the same.

    Raises:
        DataError: a file cannot be read.
    """
    total, elements = prod(first.shape), CHUNK_BYTES // max(first.itemsize, second.itemsize)
    if first.shape != second.shape or isinstance(first, PackedTensor) or isinstance(second, PackedTensor):
        return False
    try:
        with first.file.open("rb") as a, second.file.open("rb") as b:
            for start in range(0, total, elements):
                count = min(elements, total - start)
                of_first, of_second = _read(a, first, start, count), _read(b, second, start, count)
                is_same = first.dtype == second.dtype and of_first == of_second  # mostly so, and compared fast
                if not is_same and not np.array_equal(_decode(of_first, first), _decode(of_second, second)):
                    return False
    except OSError as e:
        raise DataError(f"{first.file} or {second.file} cannot be read: {e.strerror}") from e
    return True


def find_false_copies(folder: Path, *, tied: bool, hf_name: Callable[[str], str]) -> Iterator[str]:
    """Yield a message for each tensor in `folder` that is not read, as a copy of another, but differs from it.

    Args:
        tied: whether the output head shares the embedding weight.
        hf_name: function from a name in `copied_tensor_patterns` to the name that the model's folders have.
    """
    try:
        stored = read_headers(folder)
    except DataError:
        return  # reported by those who read the tensors
    for pattern, of in copied_tensor_patterns(tied=tied).items():
        original = stored.get(hf_name(of))
        for name, copy in stored.items():
            is_copy = original is not None and fnmatchcase(name, hf_name(pattern))
            if is_copy and original is not None and not holds_same_values(copy, original):
                yield (
                    f"{copy.file}: {name} differs from {hf_name(of)}, of which it needs to be a copy: a tensor of its "
                    "own in this place is not supported"
                )


def read_stop_token_ids(model_path: str | Path) -> tuple[int, ...]:
    """Return the sorted ids of all stop tokens in generation_config.json, config.json and the tokenizer's files.

    Reads all three sources because they disagree in many published models: a base model's config has the end-of-text
    token, its tokenizer the end-of-turn token.

    Raises:
        DataError: a file is not a JSON object, one has an id that is no token of the model, or none has a stop token.
    """
    folder = Path(model_path)
    model = read_optional_json_object(folder / "config.json")
    vocab_size, text = language_config(model).get("vocab_size"), model.get("text_config")
    sources = [("generation_config.json", read_optional_json_object(folder / "generation_config.json"))]
    sources += [("config.json", keys) for keys in (model, text) if isinstance(keys, dict)]
    ids: set[int] = set()
    for name, keys in sources:
        eos = keys.get("eos_token_id")
        values = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(_is_token_id(value, vocab_size) for value in values):
            raise DataError(f"{folder / name}: eos_token_id needs {_describe_ids(vocab_size)}, got {eos!r}")
        ids.update(values)
    config = read_optional_json_object(folder / "tokenizer_config.json")
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        of_tokenizer: list[Any] = _token_ids(read_optional_json_object(folder / "tokenizer.json"), config, token)
        if not all(_is_token_id(value, vocab_size) for value in of_tokenizer):
            raise DataError(
                f"{folder / 'tokenizer.json'}: the end-of-sequence token {token!r} needs {_describe_ids(vocab_size)}, "
                f"got {of_tokenizer}"
            )
        ids.update(of_tokenizer)
    if not ids:
        raise DataError(f"{folder}: needs an end-of-sequence token in config.json or tokenizer_config.json, got none")
    return tuple(sorted(ids))


def describe_unread_file(folder: Path) -> str | None:
    """Return a message if `folder` has a model.safetensors that its index does not list; None if not.

    transformers reads that file and not the index.
    """
    index = folder / INDEX
    if not index.exists() or not (folder / SINGLE_FILE).exists():
        return None
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or SINGLE_FILE in listed.values():
        return None
    return (
        f"{folder / SINGLE_FILE} is not read: {INDEX} lists other files. transformers reads {SINGLE_FILE} instead; "
        "delete the one that is not the model"
    )


def _corrections(config: JsonMapping, path: Path) -> JsonObject:
    found: JsonObject = {}
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if not config.get("architectures") and architecture is not None:
        found["architectures"] = [architecture]
    # a family may tie without the key; the folder is not read where the answer cannot matter
    if config.get("tie_word_embeddings", True) is True and path.is_dir() and has_own_head(path):
        found["tie_word_embeddings"] = False
    return found


def _read(file: BinaryIO, tensor: StoredTensor, start: int, count: int) -> bytes:
    """Return the bytes of `count` elements of a stored tensor, from element `start` on."""
    file.seek(tensor.offset + start * tensor.itemsize)
    return file.read(count * tensor.itemsize)


def _decode(raw: bytes, tensor: StoredTensor) -> NDArray[Any]:
    """Return elements of a stored tensor as floats; of a dtype that numpy lacks, their bytes."""
    match tensor.dtype:
        case "bfloat16":
            return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        case "float16" | "float32" | "float64":
            return np.frombuffer(raw, np.dtype(tensor.dtype).newbyteorder("<"))
        case _:
            return np.frombuffer(raw, np.uint8)


def _is_token_id(value: object, vocab_size: object) -> bool:
    limit = vocab_size if isinstance(vocab_size, int) else sys.maxsize
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _describe_ids(vocab_size: object) -> str:
    return f"a token id or a list of them, from 0 to below the model's vocab_size = {vocab_size}"


def _token_ids(tokenizer: JsonMapping, config: JsonMapping, token: str) -> list[Any]:
    """Return the ids of a token in tokenizer.json; in tokenizer_config.json, if it has no tokenizer.json."""
    if not tokenizer:
        decoder = config.get("added_tokens_decoder") or {}
        return [int(key) for key, entry in decoder.items() if key.isdecimal() and entry.get("content") == token]
    added = [entry.get("id") for entry in tokenizer.get("added_tokens") or () if entry.get("content") == token]
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    return added or ([vocabulary[token]] if isinstance(vocabulary, dict) and token in vocabulary else [])
