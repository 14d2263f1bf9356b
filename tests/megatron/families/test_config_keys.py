"""Every key of transformers' configurations, changed one by one: megarl must not ignore what changes the logits.

For each family, each key that its configuration class has, and keys of derived families, get other values in a tiny
model's config.json. If transformers then computes other logits from the same weights, or needs other weights, megarl
has to refuse the file or to read another architecture.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from tests.megatron.fidelity.models import CONFIGS

PARTIAL = ("glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families that rotate a part of each head."""

WINDOWED = ("gemma2", "gemma3", "gpt_oss")
INDEXED = ("deepseek_v32", "glm_moe_dsa")
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama3", "mixtral", "deepseek_v3", *INDEXED, *WINDOWED, *PARTIAL)

OTHER_KEYS: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (0.5,),
    "rope_theta": (5e5,),
    "rope_scaling": ({"rope_type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 4.0}),
    "layer_types": (["sliding_attention"] * 2, ["full_attention"] * 2),
    "attention_multiplier": (0.1,),
    "residual_multiplier": (0.5,),
    "embedding_multiplier": (2.0,),
    "logits_scaling": (4.0,),
    "logit_scale": (0.5,),
    "use_qk_norm": (True, False),
    "qk_layernorm": (True,),
    "clip_qkv": (1.0,),
    "attention_sinks": (True,),
    "num_nextn_predict_layers": (2,),
    "moe_layer_freq": (2,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "indexer_types": (["full", "shared"], ["full", "full"]),
    "index_topk_pattern": ("FS", "FF"),
    "index_topk_freq": (2,),
    "mlp_layer_types": (["sparse", "dense"], ["sparse", "sparse"]),
}
"""Values of keys that not every configuration class has, some of which other families or engines read."""

TOGETHER: tuple[dict[str, Any], ...] = (
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3, "use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
)
"""Keys that have an effect only together."""

WITHOUT_EFFECT = ("architectures", "transformers_version", "model_type", "_name_or_path", "id2label", "label2id")
"""Keys that do not describe what a model computes; `model_type` would choose another class."""

REFUSED: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
    (
        tuple(name for name in FAMILIES if name not in (*PARTIAL, "gemma3")),
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor 0.5 is not supported; supported is 1",
    ),
    (
        tuple(name for name in FAMILIES if name not in (*INDEXED, *WINDOWED) and not name.startswith("qwen3_")),
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types sliding_attention is not supported; supported is full_attention",
    ),
    (
        ("gemma2",),
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types chunked_attention is not supported; supported is sliding_attention or full_attention",
    ),
    (
        ("deepseek_v3",),
        {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16},
        "index_topk 16 is not supported: layers of this architecture have no selected keys",
    ),
    (("deepseek_v3",), {"topk_method": "greedy"}, "topk_method greedy is not supported; supported is noaux_tc"),
    (
        ("glm_moe_dsa",),
        {"index_topk_pattern": "FS"},
        "index_topk_pattern FS is not supported: each layer needs its own indexer",
    ),
    (
        ("glm_moe_dsa",),
        {"indexer_types": ["full", "shared"]},
        "indexer_types.1 shared is not supported; supported is full",
    ),
    (
        INDEXED,
        {"index_head_dim": 4},
        "index_head_dim needs to be at least qk_rope_head_dim, got 4 < 8",
    ),
    (
        ("glm4_moe", "qwen3_5"),
        {"partial_rotary_factor": 0.75, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.75 and rope_parameters.partial_rotary_factor 0.5 differ; remove one",
    ),
    (
        ("llama3", "qwen3"),
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling and rope_parameters differ; remove one of them",
    ),
)
"""Families, keys that engines read or that transformers reads in some versions, and the sentence about them."""

FEATURES: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (0.75,),
    "rope_parameters": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, {"rope_type": "x"}),
    "layer_types": (["sliding_attention"] * 2, ["chunked_attention"] * 2),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "index_topk": (7,),
    "attn_logit_softcapping": (3.0,),
    "final_logit_softcapping": (3.0,),
    "use_qk_norm": (True,),
    "qk_layernorm": (True,),
    "clip_qkv": (1.0,),
    "logit_scale": (0.5,),
    "logits_scaling": (4.0,),
    "embedding_multiplier": (2.0,),
    "attention_multiplier": (0.1,),
    "residual_multiplier": (0.5,),
    "scale_emb": (12,),
    "scale_depth": (1.4,),
    "query_pre_attn_scalar": (7.0,),
    "no_rope_layers": ([1, 0], [0, 0]),
    "no_rope_layer_interval": (4,),
    "attention_chunk_size": (8192,),
    "num_kv_shared_layers": (1,),
    "swiglu_limit": (3.0,),
    "hidden_act_alpha": (1.0,),
    "rope_is_neox_style": (False,),
    "use_bidirectional_attention": (True,),
    "is_causal": (False,),
    "mla_nope": (True,),
    "llama_4_scaling": ({"beta": 0.1},),
    "num_hash_layers": (3,),
    "attn_type_list": ([0, 1],),
}
"""Values of keys that change what some published model computes, in transformers or in SGLang."""

INHERENT = (("minimax_m2", "use_qk_norm", True),)
"""(family, key, value) of what a family has without its configuration class having the key."""

TOKENS = torch.arange(2, 22)[None]


def other_values(value: Any) -> tuple[Any, ...]:
    """Return values unlike `value`, of its type where it has one."""
    match value:
        case bool():
            return (not value,)
        case int():
            return (2 * value, value + 1)
        case float():
            return (1.5 * value, value + 0.5)
        case str():
            return ("gelu", "relu")
        case list():
            return ([0], [1])
        case None:
            return (3, 2.0, True)
        case dict():
            return tuple(value | {name: other} for name, of in value.items() for other in other_values(of))
    return ()


def changes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes of a config.json, each with the keys that it sets."""
    for key, value in config.items():
        if key not in WITHOUT_EFFECT and key not in OTHER_KEYS:
            yield from ({key: other} for other in other_values(value))
    for name, value in config["rope_parameters"].items():
        yield from ({"rope_parameters": config["rope_parameters"] | {name: other}} for other in other_values(value))
    yield {"rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 0.5}}
    yield from ({key: value} for key, values in OTHER_KEYS.items() for value in values)
    yield from TOGETHER


def tiny_config(name: str) -> dict[str, Any]:
    """Return a config.json with every key of its class, of a model with two layers."""
    small = CONFIGS[name] | {"num_hidden_layers": 2, "layer_types": None}
    small |= {"full_attention_interval": 2, "sliding_window_pattern": 2}  # of families with two kinds of layers
    config = AutoConfig.for_model(**deepcopy(small))
    return config.to_dict() | {"architectures": [config_class_name(config)]}


def config_class_name(config: Any) -> str:
    model = AutoModelForCausalLM._model_mapping[type(config)]
    return str(model.__name__)


class Reference:
    """transformers' model of a config.json, whose weights the models of changed ones take."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        model = build(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.weights, self.logits = model.state_dict(), logits_of(model)

    def is_changed(self, config: Mapping[str, Any]) -> bool | None:
        """Return whether `config` needs other weights or gives other logits; None if transformers cannot compute it."""
        try:
            model = build(config)
        except Exception:  # noqa: BLE001 -- each class has errors of its own
            return None
        weights = model.state_dict()
        if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in self.weights.items()}:
            return True
        model.load_state_dict(self.weights)
        try:
            return not torch.allclose(logits_of(model), self.logits, rtol=0, atol=1e-4)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            return None


def build(config: Mapping[str, Any]) -> Any:
    # transformers moves keys within the dictionaries that it is given
    parsed = AutoConfig.for_model(**deepcopy({name: of for name, of in config.items() if name != "architectures"}))
    return AutoModelForCausalLM.from_config(parsed, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(TOKENS, use_cache=False, return_dict=True).logits


def refusal_of(config: dict[str, Any]) -> str | None:
    """Return the sentence with which megarl refuses a config.json; None if it reads it."""
    try:
        load_architecture(config, origin="config.json")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FAMILIES)
def test_no_key_that_changes_the_logits_is_ignored(name: str) -> None:
    config, ignored, effective = tiny_config(name), [], set()
    architecture, reference = load_architecture(config, origin="config.json"), Reference(config)
    for change in changes(config):
        changed = config | change
        if not reference.is_changed(changed):
            continue
        effective |= set(change)
        sentence = refusal_of(changed)
        if sentence is None and load_architecture(changed, origin="config.json") == architecture:
            ignored.append(change)
        assert sentence is None or any(key in sentence for key in change), (change, sentence)
    assert ignored == []
    assert {"hidden_size", "rms_norm_eps", "num_attention_heads", "rope_parameters"} <= effective


@pytest.mark.parametrize("name", FAMILIES)
def test_features_of_other_families_are_refused_or_have_an_effect(name: str) -> None:
    config = tiny_config(name)
    rope_parameters = {key: of for key, of in config["rope_parameters"].items() if key != "partial_rotary_factor"}
    config |= {"rope_parameters": rope_parameters, "rotary_dim": None}
    architecture = load_architecture(config, origin="config.json")
    for key, values in FEATURES.items():
        for value in values:
            if value == config.get(key) or (name, key, value) in INHERENT:
                continue
            sentence = refusal_of(config | {key: value})
            if sentence is None:
                assert load_architecture(config | {key: value}, origin="config.json") != architecture, (key, value)
            else:
                assert sentence.startswith("config.json: "), sentence
                assert "\n" not in sentence, sentence
                assert key in sentence or key == "rope_parameters", sentence


def test_published_values_without_effect_are_accepted() -> None:
    neutral = {"clip_qkv": None, "attn_logit_softcapping": None, "logit_scale": 1.0, "no_rope_layers": [1, 1]}
    for name in FAMILIES:
        config = tiny_config(name)
        changed = {**neutral, **{key: config[key] for key in neutral if key in config}}
        assert load_architecture(config | changed, origin="") == load_architecture(config, origin="")


@pytest.mark.parametrize(("families", "change", "sentence"), REFUSED, ids=[" ".join(case[1]) for case in REFUSED])
def test_keys_that_engines_read_are_refused_in_one_sentence(
    families: tuple[str, ...], change: dict[str, Any], sentence: str
) -> None:
    for name in families:
        with pytest.raises(ConfigError) as error:
            load_architecture(tiny_config(name) | change, origin="config.json")
        assert str(error.value) == f"config.json: {sentence}"


def test_keys_without_effect_are_accepted() -> None:
    harmless = {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 2, "output_router_logits": True}
    for name in FAMILIES:
        config = tiny_config(name) | {"layer_types": ["full_attention"] * 2}
        if name in (*PARTIAL, "gemma3"):
            continue
        got, want = (load_architecture(c, origin="config.json") for c in (config | harmless, config))
        assert got.layers[0].attention.rope == want.layers[0].attention.rope
    scaling = tiny_config("llama3")["rope_parameters"]
    both = tiny_config("llama3") | {"rope_scaling": {**scaling, "type": scaling["rope_type"]}}
    assert load_architecture(both, origin="") == load_architecture(tiny_config("llama3"), origin="")
