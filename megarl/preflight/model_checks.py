"""Checks of the model folders: architecture, weights, parallel sizes and context length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config.data import Source
from megarl.config.preference import DpoConfig
from megarl.config.run import RunConfig, StageConfig
from megarl.data.prompt_budget import resolve_max_prompt_tokens
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.architecture import Head, ModelArchitecture
from megarl.megatron.families.family import load_family
from megarl.megatron.families.layout_checks import parallel_problems, recompute_problems
from megarl.megatron.families.load_architecture import drop_missing_mtp_layers, load_architecture, require_family
from megarl.megatron.families.model_folder import (
    find_folder_notices,
    find_weight_problems,
    load_architecture_from_folder,
    model_head,
)
from megarl.model_files.block_fp8 import CONFIG_KEY
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import read_stop_token_ids
from megarl.placement.gpu_types import GpuType
from megarl.preflight.megatron_checks import describe_megatron, find_attention_problems, find_megatron_problems
from megarl.preflight.tiny_model import will_write_model
from megarl.rollout.unsupported_options import find_engine_problems


def find_model_problems(
    config: StageConfig, hf_config: JsonObject, device: str | None, gpus: Sequence[GpuType] = ()
) -> Iterator[str]:
    """Find problems of the model in `model.path`: architecture, weights, parallel sizes, support by the engine.

    Args:
        hf_config: content of its config.json.
        device: device of the engines; None: unknown, support by the engine is not checked.
        gpus: types of the GPUs that the run will have, as far as they are known.
    """
    folder = Path(config.model.path)
    try:
        require_family(str(folder), config.model.family)
    except ConfigError as e:
        yield str(e)
        return
    try:
        model = load_architecture(
            hf_config, origin=str(folder / "config.json"), head=model_head(config), family=config.model.family
        )
    except ConfigError as e:
        yield f"model.path: {e}"
        return
    model = drop_missing_mtp_layers(model, folder)
    yield from (f"model.path: {problem}" for problem in find_weight_problems(folder, model))
    try:
        read_stop_token_ids(folder)
    except DataError as e:
        yield f"model.path: {e}"
    yield from parallel_problems(model, config.trainer.parallel, config.placement.slots)
    yield from recompute_problems(model, config.trainer.parallel, config.trainer.recompute)
    yield from find_megatron_problems(config, model, device)
    yield from find_attention_problems(config, model, gpus)
    if isinstance(config, RunConfig):
        yield from _find_engine_tp_problems(model, config.rollout.tp)
        if hf_config.get(CONFIG_KEY) and config.weight_sync.strategy == "gather_hf":
            yield (
                f"weight_sync.strategy: engines of {folder} need weights in FP8, which micro_dp and exact send, "
                "gather_hf does not"
            )
        if device is not None:
            yield from find_engine_problems(hf_config, device, origin=str(folder / "config.json"))


def find_family_problems(config: StageConfig) -> Iterator[str]:
    """Find out whether the family that `model.family` names cannot be imported."""
    if config.model.family is not None:
        try:
            load_family(config.model.family)
        except ConfigError as e:
            yield str(e)


def find_model_notices(config: StageConfig) -> list[str]:
    """Return the notices about the model folders, which need to have passed the checks."""
    if will_write_model(config):
        return []
    models: list[tuple[str, str, Head | None]] = [("model.path", config.model.path, model_head(config))]
    if isinstance(config, RunConfig):
        models += [(f"{m.key}.path", m.path, None if m.is_reward_model else m.head) for m in config.auxiliary_models]
    if isinstance(config, DpoConfig) and config.dpo.reference.path is not None:
        models.append(("dpo.reference.path", config.dpo.reference.path, "lm"))
    notices: dict[str, str] = {}
    for key, path, head in models:
        for message in find_folder_notices(Path(path), head=head, family=config.model.family):
            notices.setdefault(message, f"{key}: {message}")  # models in the same folder share one notice
    return list(notices.values())


def describe_trainer(config: StageConfig, device: str | None) -> list[str]:
    """Return lines that describe what megatron-core is given for the policy, whose folder needs to have passed."""
    if will_write_model(config):
        return []
    model = load_architecture_from_folder(Path(config.model.path), head=model_head(config), family=config.model.family)
    return describe_megatron(config, model, device)


def require_attention(config: StageConfig, gpu: GpuType) -> None:
    """Return if the policy, whose folder needs to have passed, has attention kernels on GPUs of type `gpu`.

    Raises:
        ConfigError: it has none; names the remedies.
    """
    model = load_architecture_from_folder(Path(config.model.path), head=model_head(config), family=config.model.family)
    for problem in find_attention_problems(config, model, [gpu]):
        raise ConfigError(problem)


def find_reference_problems(config: DpoConfig) -> Iterator[str]:
    """Find problems of DPO's reference model, if it is another one than the initial policy."""
    reference, key = config.dpo.reference, "dpo.reference.path"
    if reference.path is None:
        return
    try:
        model = load_architecture_from_folder(Path(reference.path), family=config.model.family)
        vocab_size = (
            load_architecture_from_folder(Path(config.model.path), family=config.model.family).vocab_size
            if Path(config.model.path).exists()
            else None
        )
    except (ConfigError, DataError) as e:
        yield f"{key}: {e}"
        return
    yield from (f"{key}: {problem}" for problem in find_weight_problems(Path(reference.path), model))
    parallel = reference.parallel or config.trainer.parallel
    for problem in parallel_problems(model, parallel, config.placement.slots):
        yield problem.replace("trainer.parallel", "dpo.reference.parallel")
    if vocab_size is not None and model.vocab_size != vocab_size:
        yield f"{key}: needs the vocabulary of model.path, got {model.vocab_size} tokens, model.path has {vocab_size}"


def _find_engine_tp_problems(model: ModelArchitecture, tp: int) -> Iterator[str]:
    for units in model.sharding_units():
        # SGLang replicates key-value heads if there are fewer than ranks, and distributes experts over the same ranks
        repeated = units.can_replicate and tp % units.total == 0
        if units.axis != "ep" and units.total % tp and not repeated:
            yield f"rollout.tp: {units.description} that do not divide, {units.total} % {tp} = {units.total % tp}"


def find_token_limit(config: StageConfig, hf_config: JsonMapping, source: Source) -> int:
    """Return the most tokens allowed in a prompt of a source; for stages without engines, in a prompt with answer."""
    return (
        resolve_max_prompt_tokens(config, hf_config, source)
        if isinstance(config, RunConfig)
        else hf_config["max_position_embeddings"]
    )
