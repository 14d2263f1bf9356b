"""Options of a config.json that SGLang's models ignore or cannot run. Imports neither SGLang nor torch.

Most of these mismatches would go unnoticed: the engine starts, but samples from a different model than the trainer
trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.errors import ConfigError
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import alternating_layers, language_config
from megarl.model_files.quantization import CONFIG_KEY, quantized_format

_DELTA_NETS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
_LATENT = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
)
_ROUTING = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_KEYS_WITHOUT_DEFAULT: Mapping[str, Mapping[str, object]] = {
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "DeepseekV3ForCausalLM": _ROUTING,
    "KimiK25ForConditionalGeneration": _ROUTING,
    "DeepseekV32ForCausalLM": _ROUTING,
    "GlmMoeDsaForCausalLM": {**_ROUTING, "indexer_rope_interleave": True},
    "MiniMaxM2ForCausalLM": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    **{name: {"full_attention_interval": 4} for name in _DELTA_NETS},
}
"""Keys that SGLang reads without a default, or with another than transformers, with the value that it needs;
transformers need not write them."""


def find_engine_problems(config: JsonMapping, device: str, *, origin: str) -> list[str]:
    """Return one message, beginning with a YAML key, for each model option that the engines would not respect.

    Args:
        config: the content of a config.json.
        device: device of the engines, `cpu` or `cuda`.
        origin: path of the config.json, for the messages.
    """
    config = language_config(config)
    architecture = (config.get("architectures") or [None])[0]
    match architecture:
        case "MiniMaxM2ForCausalLM":
            problems = _minimax_m2(config, device, origin)
        case _ if architecture in _DELTA_NETS:
            problems = _delta_nets(config, device, origin)
        case "Gemma2ForCausalLM":
            problems = _gemma2(config, device, origin)
        case "MixtralForCausalLM":
            problems = _mixtral(config, origin)
        case "Qwen3MoeForCausalLM":
            served = {"mlp_only_layers": [], "decoder_sparse_step": 1, "tie_word_embeddings": False}
            problems = _unread(config, served, origin)
        case name if name in _LATENT:
            problems = _latent(config, architecture, device, origin)
        case "GptOssForCausalLM":
            problems = _gpt_oss(config, device, origin)
        case _:
            problems = iter(())
    packed = (f"model.path: {problem}" for problem in _packed(config, origin))
    return [*packed, *_fp8(config, device, origin), *problems]


def find_build_problems(config: JsonMapping, device: str, *, origin: str) -> list[str]:
    """Return one message, beginning with `origin`, for each reason why SGLang's model cannot be built and synced.

    That is each missing key that SGLang needs, and weights of 4 bits.

    Args:
        config: the content of a config.json.
        device: device on which the model is built, `cpu` or `cuda`.
        origin: path of the config.json.
    """
    config = language_config(config)
    architecture = (config.get("architectures") or [None])[0]
    needed = _KEYS_WITHOUT_DEFAULT.get(architecture, {})
    problems = [
        f"{origin}: {key} is missing; SGLang needs {value}" for key, value in needed.items() if key not in config
    ]
    problems += _packed(config, origin)
    if architecture in _LATENT and device == "cpu" and _rope_type(config) == "default":
        problems.append(
            f"{origin}: rope_scaling is missing; without a GPU, SGLang needs rope type yarn for latent attention"
        )
    return problems


def check_engine_support(config: JsonMapping, device: str, *, origin: str) -> None:
    """Check that engines on `device` run the model as its config.json describes it.

    Raises:
        ConfigError: with every problem that `find_engine_problems` finds, one per line.
    """
    problems = find_engine_problems(config, device, origin=origin)
    if problems:
        raise ConfigError("\n".join(problems))


def _packed(config: JsonMapping, origin: str) -> Iterator[str]:
    stored = quantized_format(config)
    if stored in ("MXFP4", "INT4"):
        yield (
            f"{origin}: engines would run in {stored}, which a weight sync cannot update; write a folder in bfloat16 "
            "first: megarl convert hf-to-megatron, and megarl convert megatron-to-hf from its output"
        )


def _fp8(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    stated = config.get(CONFIG_KEY)
    if not isinstance(stated, Mapping) or quantized_format(config) != "FP8":
        return
    if device == "cpu":
        yield f"placement.device: {origin}: weights in FP8 need engines on cuda, SGLang packs them on the CPU, got cpu"
    needs = {"activation_scheme": ("dynamic",), "scale_fmt": (None, "float")}
    for key, allowed in needs.items():
        if stated.get(key) not in allowed:
            yield (
                f"model.path: {origin}: a weight sync needs {CONFIG_KEY}.{key} {' or '.join(map(str, allowed))}, got "
                f"{stated.get(key)}"
            )


def _gemma2(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    cap = config.get("attn_logit_softcapping", 50.0)  # Hugging Face's default
    if cap and device == "cpu":
        yield (
            f"placement.device: {origin}: attn_logit_softcapping needs engines on cuda, the CPU engine leaves it out, "
            f"got {cap} on cpu"
        )
    alternating = alternating_layers(config["num_hidden_layers"], 2, "full_attention", "sliding_attention")
    yield from _unread(config, {"layer_types": alternating, "tie_word_embeddings": True}, origin)
    yield from _plain_rope(config, origin)
    yield from _required(config, dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"), origin)


def _minimax_m2(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    if device == "cpu":
        yield f"placement.device: {origin}: norms of the queries of all heads need engines on cuda, got cpu"
    yield from _required(config, _KEYS_WITHOUT_DEFAULT["MiniMaxM2ForCausalLM"], origin)
    parameters = config.get("rope_parameters") or {}
    fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1.0):
        yield from _required(config, {"rotary_dim": int(config["head_dim"] * fraction)}, origin)


def _delta_nets(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    if device == "cpu":
        yield f"placement.device: {origin}: gated delta nets need engines on cuda, got cpu"
    interval = config.get("full_attention_interval")
    if not isinstance(interval, int):
        yield f"model.path: {origin}: SGLang needs full_attention_interval, got {interval}"
        return
    kinds = alternating_layers(config["num_hidden_layers"], interval, "full_attention", "linear_attention")
    yield from _unread(config, {"layer_types": kinds}, origin)


def _mixtral(config: JsonMapping, origin: str) -> Iterator[str]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    yield from _unread(config, {"head_dim": head_dim, "tie_word_embeddings": False}, origin)
    yield from _plain_rope(config, origin)


def _latent(config: JsonMapping, architecture: str, device: str, origin: str) -> Iterator[str]:
    yield from _required(config, _KEYS_WITHOUT_DEFAULT[architecture], origin)
    yield from _unread(config, {"tie_word_embeddings": False}, origin)
    kind = _rope_type(config)
    if architecture in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM") and device == "cpu":
        yield f"placement.device: {origin}: the indexer of {architecture} needs engines on cuda, got cpu"
    elif device == "cpu" and kind != "yarn":
        yield (
            f"placement.device: {origin}: latent attention needs rope type yarn on the CPU engine, got {kind} on cpu"
        )
    elif kind not in ("default", "yarn"):
        yield f"model.path: {origin}: SGLang needs rope type default or yarn, it runs any other as yarn, got {kind}"


def _gpt_oss(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    if device == "cpu":
        yield f"placement.device: {origin}: attention sinks need engines on cuda, the CPU engine has none, got cpu"
    yield from _unread(config, {"tie_word_embeddings": False}, origin)


def _unread(config: JsonMapping, served: Mapping[str, object], origin: str) -> Iterator[str]:
    for key, value in served.items():
        got = config.get(key)
        if got is not None and got != value:
            yield f"model.path: {origin}: SGLang does not read {key}, it needs to be {value}, got {got}"


def _required(config: JsonMapping, needed: Mapping[str, object], origin: str) -> Iterator[str]:
    """Yield a message for each key that SGLang reads without a default and that lacks the needed value."""
    for key, value in needed.items():
        got = config.get(key)
        if got != value:
            yield f"model.path: {origin}: SGLang needs {key} {value}, got {got}"


def _plain_rope(config: JsonMapping, origin: str) -> Iterator[str]:
    kind = _rope_type(config)
    if kind != "default":
        yield f"model.path: {origin}: SGLang does not read how rope is scaled, its type needs to be default, got {kind}"


def _rope_type(config: JsonMapping) -> str:
    stated = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return stated.get("rope_type") or stated.get("type") or "default"
