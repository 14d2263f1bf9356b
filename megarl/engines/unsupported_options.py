"""Options of a config.json that SGLang's models ignore or cannot run. Imports neither SGLang nor torch.

Most of these mismatches would go unnoticed: the engine starts, but samples from a different model than the trainer
trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.errors import ConfigError
from megarl.model_files.block_fp8 import CONFIG_KEY
from megarl.model_files.json_object import JsonMapping

_GEMMA2_LAYERS = ("sliding_attention", "full_attention")
_KEYS_WITHOUT_DEFAULT: Mapping[str, Mapping[str, object]] = {
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "DeepseekV3ForCausalLM": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Keys that SGLang reads without a default, with the value it needs; transformers need not write them."""


def find_engine_problems(config: JsonMapping, device: str, *, origin: str) -> list[str]:
    """Return one message, beginning with a YAML key, for each model option that the engines would not respect.

    Args:
        config: the content of a config.json.
        device: device of the engines, `cpu` or `cuda`.
        origin: path of the config.json, for the messages.
    """
    architecture = (config.get("architectures") or [None])[0]
    match architecture:
        case "Gemma2ForCausalLM":
            problems = _gemma2(config, device, origin)
        case "MixtralForCausalLM":
            problems = _mixtral(config, origin)
        case "Qwen3MoeForCausalLM":
            served = {"mlp_only_layers": [], "decoder_sparse_step": 1, "tie_word_embeddings": False}
            problems = _unread(config, served, origin)
        case "DeepseekV3ForCausalLM":
            problems = _deepseek_v3(config, device, origin)
        case "GptOssForCausalLM":
            problems = _gpt_oss(config, device, origin)
        case _:
            problems = iter(())
    return [*_quantized(config, device, origin), *problems]


def find_build_problems(config: JsonMapping, device: str, *, origin: str) -> list[str]:
    """Return one message, beginning with `origin`, for each missing key without which SGLang cannot build the model.

    Args:
        config: the content of a config.json.
        device: device on which the model is built, `cpu` or `cuda`.
        origin: path of the config.json.
    """
    architecture = (config.get("architectures") or [None])[0]
    needed = _KEYS_WITHOUT_DEFAULT.get(architecture, {})
    problems = [
        f"{origin}: {key} is missing; SGLang needs {value}" for key, value in needed.items() if key not in config
    ]
    if architecture == "DeepseekV3ForCausalLM" and device == "cpu" and _rope_type(config) == "default":
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


def _quantized(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    stated = config.get(CONFIG_KEY)
    if not isinstance(stated, Mapping):
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
    alternating = [_GEMMA2_LAYERS[i % 2] for i in range(config["num_hidden_layers"])]
    yield from _unread(config, {"layer_types": alternating, "tie_word_embeddings": True}, origin)
    yield from _plain_rope(config, origin)
    yield from _required(config, dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"), origin)


def _mixtral(config: JsonMapping, origin: str) -> Iterator[str]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    yield from _unread(config, {"head_dim": head_dim, "tie_word_embeddings": False}, origin)
    yield from _plain_rope(config, origin)


def _deepseek_v3(config: JsonMapping, device: str, origin: str) -> Iterator[str]:
    yield from _required(config, _KEYS_WITHOUT_DEFAULT["DeepseekV3ForCausalLM"], origin)
    yield from _unread(config, {"tie_word_embeddings": False}, origin)
    kind = _rope_type(config)
    if device == "cpu" and kind != "yarn":
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
