"""Load a `ModelArchitecture` from config.json: select the family's reader and the output head."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import RmConfig, StageConfig
from megarl.errors import ConfigError, DataError
from megarl.megatron.families import (
    deepseek_v3,
    gemma,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from megarl.megatron.families.architecture import (
    LM_SUFFIX,
    VALUE_NAMES,
    VALUE_SUFFIX,
    FamilyReader,
    Head,
    Layer,
    ModelArchitecture,
    hf_tensors_of,
    load_family,
)
from megarl.megatron.families.config_json import effective_features
from megarl.megatron.families.feed_forward import MixtureOfExperts
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import (
    UNTRAINED_TENSORS,
    config_file,
    describe_unread_file,
    find_corrections,
    find_false_copies,
    language_config,
    read_model_config,
)
from megarl.model_files.quantization import find_config_problem
from megarl.model_files.weight_index import (
    HEAD_TENSOR,
    derived_tensor_patterns,
    find_tensor_mismatches,
    read_headers,
    stored_shape,
)

FAMILY_READERS: Mapping[str, FamilyReader] = {
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "LlamaForCausalLM": llama.read,
    "Gemma2ForCausalLM": gemma.read_gemma2,
    "Gemma3ForCausalLM": gemma.read_gemma3,
    "MixtralForCausalLM": mixtral.read,
    "DeepseekV3ForCausalLM": deepseek_v3.read,
    "DeepseekV32ForCausalLM": deepseek_v3.read_v32,
    "Glm4MoeForCausalLM": glm4_moe.read,
    "Glm4MoeLiteForCausalLM": deepseek_v3.read_glm_flash,
    "GlmMoeDsaForCausalLM": deepseek_v3.read_glm5,
    "GptOssForCausalLM": gpt_oss.read,
    "MiMoForCausalLM": qwen2.read_mimo,
    "MiniMaxM2ForCausalLM": minimax_m2.read,
    "Qwen3NextForCausalLM": qwen3_next.read_next,
    "Qwen3_5ForCausalLM": qwen3_next.read_dense,
    "Qwen3_5MoeForCausalLM": qwen3_next.read_moe,
}
"""Reader by architecture name in config.json; value models use the reader of the language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """The language model of a folder that holds other models too, with its keys under `text_config`."""

    read: FamilyReader
    renames: tuple[tuple[str, str], ...]
    """As `ModelArchitecture.hf_renames`."""

    def architecture(self, config: JsonMapping, *, name: str, origin: str) -> ModelArchitecture:
        """Return the architecture of the language model in a folder of architecture `name`."""
        model = self.read(language_config(config), origin=origin)
        return replace(model, name=name, hf_renames=self.renames)


_QWEN3_5 = (("model.", "model.language_model."),)
TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart(
        read=gemma.read_gemma3,
        renames=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ),
    "KimiK25ForConditionalGeneration": TextPart(
        read=deepseek_v3.read,
        renames=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ),
    "Qwen3_5ForConditionalGeneration": TextPart(read=qwen3_next.read_dense, renames=_QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": TextPart(read=qwen3_next.read_moe, renames=_QWEN3_5),
}
"""Language model by architecture name of folders that hold other models too."""


def read_config(path: str) -> tuple[JsonObject, Path]:
    """Return `read_model_config(path)` and the path of the file; `path` is the file or its folder."""
    return read_model_config(path), config_file(path)


STACKED_EXPERTS = "stacked_experts"
"""Key of a config.json without weights, as a Megatron checkpoint has it: whether an export is to stack the experts."""


def load_architecture(
    config: JsonMapping, *, origin: str, head: Head | None = "lm", family: str | None = None
) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is the file's name in errors.

    Args:
        family: import path of a `ModelFamily` outside the package, which reads the models of its architecture name;
            all others are read by the families of the package.
        head: required output head; None: the head of the config's architecture. With "value", a language model becomes
            a value model whose head starts from zeros. A value model cannot become a language model.

    Raises:
        ConfigError: the architecture or one of its options is not supported, a key is missing, the model has a value
            head while `head` is "lm", or `family` cannot be imported.
    """
    keys = language_config(config)
    problem = find_config_problem(keys) or _find_unlisted_layers(keys)
    if problem is not None:
        raise ConfigError(f"{origin}: {problem}")
    architecture = _architecture_name(config, origin)
    is_value, language_model = architecture.endswith(VALUE_SUFFIX), _language_model(architecture)
    outside = load_family(family) if family is not None else None
    if architecture in TEXT_PARTS and head == "value":
        raise ConfigError(f"{origin}: a value model starts from a folder of a language model, got {architecture}")
    if outside is not None and outside.architecture == language_model:
        model = outside.read(keys, origin=origin)
    elif architecture in TEXT_PARTS:
        model = TEXT_PARTS[architecture].architecture(config, name=architecture, origin=origin)
    elif language_model in FAMILY_READERS:
        model = FAMILY_READERS[language_model](keys, origin=origin)
    else:
        raise ConfigError(_describe_unknown(architecture, config, origin=origin))
    model = _with_untrained(model)
    if config.get(STACKED_EXPERTS):
        model = stack_experts(model)
    if is_value:
        _require_value_head(config, architecture, head, origin=origin)
    return model.with_value_head(from_lm=not is_value) if is_value or head == "value" else model


def _find_unlisted_layers(config: JsonMapping) -> str | None:
    """Return a message if a key that lists the kind of each layer does not list all layers; None if it does."""
    layers = config.get("num_hidden_layers")
    for key in ("layer_types", "mlp_layer_types"):
        kinds = config.get(key)
        if isinstance(kinds, list) and len(kinds) != layers:
            return f"{key} needs num_hidden_layers = {layers} entries, got {len(kinds)}"
    return None


def _with_untrained(model: ModelArchitecture) -> ModelArchitecture:
    return replace(model, passed_patterns=(*model.passed_patterns, *UNTRAINED_TENSORS.get(model.name, ())))


def require_family(path: str, family: str | None, *, key: str = "model.family") -> None:
    """Return if `family` is None, or the family that reads the config.json in folder `path` or at `path`.

    Args:
        key: YAML key or option that names the family, for error messages.

    Raises:
        ConfigError: it cannot be imported, or reads the models of another architecture name.
    """
    if family is None:
        return
    expected = load_family(family, key=key).architecture
    try:
        config, file = read_config(path)
        architecture = _architecture_name(config, str(file))
    except DataError:
        return  # reported by those who read the model
    if _language_model(architecture) != expected:
        raise ConfigError(f"{key}: {family} reads {expected} models, got {architecture} in {file}")


MISSING_FEATURES: Mapping[str, str] = {
    "mamba_num_heads": "Mamba-2 layers",
    "mamba_n_heads": "Mamba-2 layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "moe_latent_size": "experts of a projected hidden state",
    "mlp_hidden_act": "MLPs without a gate",
    "conv_L_cache": "convolution layers",
    "linear_attn_config": "Kimi delta attention",
    "linear_num_heads": "Kimi delta attention",
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
    "compress_ratios": "attention to compressed keys",
    "compress_rates": "attention to compressed keys",
    "o_lora_rank": "low-rank output projections",
    "index_topk_blocks": "selected blocks of keys",
    "attention_value_scale": "scaled values",
    "attention_k_eq_v": "keys that are values too",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "zero_expert_num": "experts without weights",
    "parallel_attn": "attention and MLP side by side",
    "use_parallel_residual": "attention and MLP side by side",
    "encoder_layers": "an encoder",
    "alibi": "position biases",
    "rotary_pct": "rotary embeddings named by rotary_pct",
    "layer_norm_eps": "layer norms with a mean",
    "vision_config": "a vision tower of another kind than those of Gemma 3, Kimi-K2.5 and Qwen3.5",
    "audio_config": "an audio tower",
}
"""Key of config.json -> the feature that it states and that no model of megarl has."""

_LAYER_NORM = "layer_norm_epsilon"
"""Key of norms with a mean, as in GPT-2, and of norms without in models of state-space layers, as in Nemotron-H."""

FEATURES_OF_FAMILIES = (
    *("attn_logit_softcapping", "attn_output_gate", "final_logit_softcapping", "index_topk", "qk_layernorm"),
    *("query_pre_attn_scalar", "swiglu_limit", "use_qk_norm"),
)
"""Keys of `OTHER_FEATURES` whose features some families have."""

MAX_VALUE = 40
"""Maximum number of characters of a key's value in the message for an architecture without a reader."""


def _describe_unknown(architecture: str, config: JsonMapping, *, origin: str) -> str:
    """Return the message for an architecture without a reader: what megarl lacks for it, as far as its keys tell."""
    keys = language_config(config)
    stated = [(key, keys[key], feature) for key, feature in MISSING_FEATURES.items() if keys.get(key)]
    stated += [each for each in effective_features(keys) if each[0] not in FEATURES_OF_FAMILIES]
    if not stated and keys.get(_LAYER_NORM):
        stated = [(_LAYER_NORM, keys[_LAYER_NORM], MISSING_FEATURES["layer_norm_eps"])]
    lacks = [_describe_feature(*each) for each in stated]
    if lacks:
        return f"{origin}: architecture {architecture} is not supported, it needs {' and '.join(lacks)}"
    return (
        f"{origin}: architecture {architecture} is not supported, though no key names a missing feature; model.family "
        f"names a family outside the package, which describes each layer"
    )


def _describe_feature(key: str, value: object, feature: str) -> str:
    if isinstance(value, Mapping):
        return f"{key} ({feature})"
    text = str(value)
    return f"{key} {text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + '...'} ({feature})"


def _architecture_name(config: JsonMapping, origin: str) -> str:
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{origin}: architectures needs a list of names, got {names!r}")
    return names[0]


def _language_model(architecture: str) -> str:
    """Return the architecture name of the language model, also for that of a value model."""
    if not architecture.endswith(VALUE_SUFFIX):
        return architecture
    named = {value: language_model for language_model, value in VALUE_NAMES.items()}
    return named.get(architecture, architecture.removesuffix(VALUE_SUFFIX) + LM_SUFFIX)


def _require_value_head(config: JsonMapping, architecture: str, head: Head | None, *, origin: str) -> None:
    if head == "lm":
        raise ConfigError(
            f"{origin}: {architecture} has a value head and no logits; a language model is needed, "
            f"{_language_model(architecture)}"
        )
    labels = config.get("id2label")
    # transformers does not write id2label if there are two labels, its default
    num_labels = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if num_labels != 1:
        raise ConfigError(f"{origin}: {architecture} needs 1 label to be a value model, got {num_labels} (id2label)")


def fit_to_weights(model: ModelArchitecture, folder: Path) -> ModelArchitecture:
    """Return `model` as the tensors in `folder` have it, which config.json does not tell; unchanged if it has none.

    Without MTP layers, if the folder has none of them: transformers' save_pretrained drops them, but not their number
    in config.json. With stacked experts in the layers for which it has such tensors.
    """
    if model.num_mtp_layers == 0 and model.experts is None:
        return model
    try:
        stored = read_headers(folder)
    except DataError:
        return model  # a folder without weights; damaged ones are reported by those who read them
    mtp_tensors = hf_tensors_of(model.mtp_parameter_maps().values(), "float32")
    if not mtp_tensors.keys() & stored.keys():
        model = replace(model, mtp_layers=())
    return stack_experts(model, where=stored)


_FIRST_EXPERT = "mlp.experts.local_experts.0.linear_fc1.weight"


def stack_experts(model: ModelArchitecture, *, where: Container[str] | None = None) -> ModelArchitecture:
    """Return `model` with stacked experts.

    Args:
        where: names of tensors; layers whose stacks are not among them stay as they are. None: all layers.
    """

    def fit(number: int, layer: Layer) -> Layer:
        if not isinstance(layer.mlp, MixtureOfExperts):
            return layer
        mlp = replace(layer.mlp, is_stacked=True)
        mapping = mlp.map_parameter(f"model.layers.{number}.", _FIRST_EXPERT)
        assert mapping is not None
        is_stored = where is None or model.hf_name(mapping.parts[0][0].tensor) in where
        return replace(layer, mlp=mlp) if is_stored else layer

    layers = [fit(number, layer) for number, layer in enumerate((*model.layers, *model.mtp_layers))]
    return replace(model, layers=tuple(layers[: model.num_layers]), mtp_layers=tuple(layers[model.num_layers :]))


def load_architecture_and_dtype(
    path: str, *, head: Head | None = None, family: str | None = None
) -> tuple[ModelArchitecture, str]:
    """Return the architecture that a model folder or a config.json describes, and its dtype ("bfloat16" by default).

    A folder with weights determines what config.json leaves open (`fit_to_weights`).

    Args:
        head: required output head; see `load_architecture`.
        family: import path of a family outside the package; see `load_architecture`.

    Raises:
        DataError: the file does not exist, is not a JSON object or lacks a key.
        ConfigError: the architecture is not supported, or `family` cannot be imported.
    """
    config, file = read_config(path)
    try:
        model = load_architecture(config, origin=str(file), head=head, family=family)
    except KeyError as e:
        raise DataError(f"{file}: {e} is missing") from e
    model = fit_to_weights(model, Path(path))
    config = language_config(config)
    return model, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


REQUIRED_SIZES = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
"""Keys of config.json that every supported model requires."""


def read_hf_config(folder: Path) -> JsonObject:
    """Return config.json of a folder, with the keys of its language model; each of `REQUIRED_SIZES` is positive.

    Raises:
        DataError: the folder or file does not exist, the file is not a JSON object, or a size is missing, as in those
            of many unsupported architectures.
    """
    if not folder.is_dir():
        raise DataError(f"needs a folder in Hugging Face format, there is no folder {folder}")
    tree = language_config(read_model_config(folder))
    wrong = [key for key in REQUIRED_SIZES if not _is_positive_number(tree.get(key))]
    if wrong:
        raise DataError(_describe_missing_sizes(tree, wrong, origin=str(folder / "config.json")))
    return tree


def _describe_missing_sizes(config: JsonMapping, missing: list[str], *, origin: str) -> str:
    """Return the message for a config.json without some of `REQUIRED_SIZES`: most are of unsupported architectures."""
    name, needs = _architecture_name(config, origin), f"needs a positive number under {', '.join(missing)}"
    if name in TEXT_PARTS or _language_model(name) in FAMILY_READERS:
        return f"{origin} {needs}"
    return f"{_describe_unknown(name, config, origin=origin)}; config.json {needs}"


def load_architecture_from_folder(
    folder: Path, *, head: Head | None = "lm", family: str | None = None
) -> ModelArchitecture:
    """Return the architecture that `folder`/config.json describes, with output head `head`.

    A folder with weights determines what config.json leaves open (`fit_to_weights`).

    Args:
        family: import path of a family outside the package; see `load_architecture`.

    Raises:
        DataError: config.json is missing or invalid (`read_hf_config`).
        ConfigError: the architecture is not supported (`load_architecture`).
    """
    return fit_to_weights(_load_configured(folder, head, family), folder)


def find_folder_notices(folder: Path, *, head: Head | None = "lm", family: str | None = None) -> list[str]:
    """Return one message for each way in which the model that is loaded differs from what the folder seems to hold.

    Raises:
        DataError, ConfigError: as in `load_architecture_from_folder`.
    """
    model, notices = _load_configured(folder, head, family), []
    number = model.num_mtp_layers
    if number != fit_to_weights(model, folder).num_mtp_layers:
        names, ignored = ("1 MTP layer", "it") if number == 1 else (f"{number} MTP layers", "them")
        notices.append(f"{folder}: config.json names {names}, the folder has none: ignoring {ignored}")
    if model.head == "lm" and "tie_word_embeddings" in find_corrections(folder):
        notices.append(
            f"{folder}: config.json ties the output head to the embedding, the folder stores an {HEAD_TENSOR} with "
            "other values: using that head, as transformers does; tie_word_embeddings: false says so"
        )
    unread = describe_unread_file(folder)
    return notices if unread is None else [*notices, unread]


def model_head(config: StageConfig) -> Head:
    """Return the output head of the model that the stage trains."""
    return "value" if isinstance(config, RmConfig) else "lm"


def find_weight_problems(folder: Path, model: ModelArchitecture) -> list[str]:
    """Return one message for each way in which the safetensors of `folder` do not match `model`.

    Tensors that are ignored as copies of others are compared with these, the only ones whose values are read.
    """
    needed = {name: stored_shape(name, spec.shape) for name, spec in model.tensors("float32").items()}
    derived = map(model.hf_name, derived_tensor_patterns(tied=model.tie_embeddings))
    ignored = (*derived, *model.ignored_patterns, *model.passed_patterns)
    problems = find_tensor_mismatches(
        folder, needed, model=model.name, ignored=ignored, optional=model.optional_tensors
    )
    if model.head == "lm":  # a value model reads neither the copies nor the head
        problems += find_false_copies(folder, tied=model.tie_embeddings, hf_name=model.hf_name)
    return problems


def _load_configured(folder: Path, head: Head | None, family: str | None) -> ModelArchitecture:
    return load_architecture(read_hf_config(folder), origin=str(folder / "config.json"), head=head, family=family)


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
