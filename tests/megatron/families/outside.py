"""Model families as a user writes them, in a module outside the package, and folders of their models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from megarl.megatron.families.architecture import ModelArchitecture, ModelFamily
from megarl.megatron.families.config_json import HfConfig
from megarl.model_files.json_object import JsonMapping
from tests.megatron.fidelity.models import CONFIGS, build

RENAMES = (("model.layers.", "story.h."), ("self_attn.", "attn."), ("model.", "story."), ("lm_head.", "story.out."))


def read_story(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture of a "story" model: Llama under other tensor names."""
    architecture = HfConfig.read(config, origin=origin).to_architecture("StoryForCausalLM", origin=origin)
    return replace(architecture, hf_renames=RENAMES)


STORY = ModelFamily(architecture="StoryForCausalLM", read=read_story)
STORY_PATH = f"{__name__}:STORY"


def read_mistral(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture of a Mistral model without a sliding window: SGLang supports it, megarl does not."""
    assert config.get("sliding_window") is None, origin
    return HfConfig.read(config, origin=origin).to_architecture("MistralForCausalLM", origin=origin)


MISTRAL = ModelFamily(architecture="MistralForCausalLM", read=read_mistral)
MISTRAL_PATH = f"{__name__}:MISTRAL"


def save_mistral(root: Path) -> str:
    """Return the folder of a random Mistral model under `root`; the first call writes it."""
    config = CONFIGS["llama3"] | {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if not (root / "mistral/model.safetensors").exists():
        build(config).save_pretrained(root / "mistral")
    return str(root / "mistral")


def story_name(name: str) -> str:
    """Return the story model's name of a Llama tensor."""
    for part, replacement in RENAMES:
        name = name.replace(part, replacement)
    return name


def write_story(llama: Path, target: Path) -> Path:
    """Write the Llama in folder `llama` as a story model to `target`; return `target`."""
    shutil.copytree(llama, target)
    config = json.loads((llama / "config.json").read_text())
    renamed = config | {"architectures": ["StoryForCausalLM"], "model_type": "story"}
    (target / "config.json").write_text(json.dumps(renamed))
    tensors = {story_name(name): tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
