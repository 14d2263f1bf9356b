"""Checks of the auxiliary models: folders, parallel sizes, batch sizes and vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.auxiliary_model import AuxiliaryModel
from megarl.config.run import RunConfig
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.layout_checks import parallel_problems, recompute_problems
from megarl.megatron.families.model_folder import find_weight_problems, load_architecture_from_folder


def find_auxiliary_model_problems(config: RunConfig) -> Iterator[str]:
    """Find problems of the auxiliary models; those of a model in the policy's folder are reported for `model.path`."""
    for auxiliary in config.auxiliary_models:
        is_policy_folder = auxiliary.path == config.model.path
        key = "model.path" if is_policy_folder else f"{auxiliary.key}.path"
        try:
            model = load_architecture_from_folder(
                Path(auxiliary.path),
                head=None if auxiliary.is_reward_model else auxiliary.head,
                family=config.model.family,
            )
        except (ConfigError, DataError) as e:
            yield f"{key}: {e}"
            continue
        if auxiliary.is_reward_model and model.head != "value":
            yield (
                f"{auxiliary.key}.path: needs a reward model, one for sequence classification with 1 label, got "
                f"{model.name}"
            )
            continue
        yield from (f"{key}: {problem}" for problem in find_weight_problems(Path(auxiliary.path), model))
        yield from _find_layout_problems(config, auxiliary, model, is_policy_folder=is_policy_folder)
        yield from _find_batch_problems(config, auxiliary)
        if not is_policy_folder:
            yield from (f"{key}: {problem}" for problem in _find_vocabulary_problems(config, auxiliary, model))


def _find_layout_problems(
    config: RunConfig, auxiliary: AuxiliaryModel, model: ModelArchitecture, *, is_policy_folder: bool
) -> Iterator[str]:
    slots = config.placement.all_pools[auxiliary.pool].slots
    for problem in parallel_problems(model, auxiliary.parallel, slots):
        if auxiliary.parallel_key == "trainer.parallel":
            yield problem if is_policy_folder else f"{auxiliary.key}: {problem}"
        else:
            yield problem.replace("trainer.parallel", auxiliary.parallel_key)
    for problem in recompute_problems(model, auxiliary.parallel, config.trainer.recompute):
        yield problem if is_policy_folder else f"{auxiliary.key}: {problem}"


def _find_batch_problems(config: RunConfig, auxiliary: AuxiliaryModel) -> Iterator[str]:
    a, slots = config.algorithm, config.placement.all_pools[auxiliary.pool].slots
    dp = slots // auxiliary.parallel.model_size
    trajectories = a.prompts_per_step * a.group_size // a.num_mini_batches
    # with as many data-parallel ranks as the policy, the check of the policy has reported it
    if auxiliary.optimizer is not None and trajectories < dp and dp > config.dp:
        yield (
            f"algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank of "
            f"{auxiliary.key}, got prompts_per_step * group_size / num_mini_batches = {a.prompts_per_step} * "
            f"{a.group_size} / {a.num_mini_batches} = {trajectories} < slots / (tp * pp * cp) = {slots} / "
            f"{auxiliary.parallel.model_size} = {dp}"
        )


def _find_vocabulary_problems(config: RunConfig, auxiliary: AuxiliaryModel, model: ModelArchitecture) -> Iterator[str]:
    """Find differences of the vocabularies: token ids are passed unchanged; only padding rows may differ."""
    from megarl.data.tokenizer import load_tokenizer  # imports transformers, which most checks do without

    trust = config.model.trust_remote_code
    try:
        policy_vocab: Mapping[str, int] = load_tokenizer(config.model.path, trust_remote_code=trust).get_vocab()
    except DataError:
        return  # a problem of model.path
    try:
        vocab: Mapping[str, int] = load_tokenizer(auxiliary.path, trust_remote_code=trust).get_vocab()
    except DataError as e:
        yield str(e)
        return
    if model.vocab_size <= max(policy_vocab.values()):
        yield (
            f"needs a row for each token of the policy, got vocab_size = {model.vocab_size}, whose last token is "
            f"{max(policy_vocab.values())}"
        )
    mismatches = sorted(
        token for token in policy_vocab.keys() | vocab.keys() if policy_vocab.get(token) != vocab.get(token)
    )
    if mismatches:
        yield (
            f"needs the tokenizer of model.path, as token ids are passed as they are; {len(mismatches)} tokens differ, "
            f"first {mismatches[0]!r}: {vocab.get(mismatches[0])} here, {policy_vocab.get(mismatches[0])} there"
        )
