"""What can be found wrong with the models beside the policy before a worker starts: sentences as in `preflight`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.auxiliary_roles import Role
from megarl.config.run import RunConfig
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.layout_checks import parallel_problems, recompute_problems
from megarl.megatron.families.model_folder import read_decoder, weight_problems


def role_problems(config: RunConfig) -> Iterator[str]:
    """Folders, layouts and vocabularies; what is wrong with the policy's own folder is said of `model.path`."""
    for role in config.roles:
        same = role.path == config.model.path
        key = "model.path" if same else f"{role.key}.path"
        try:
            model = read_decoder(Path(role.path), head=None if role.is_scorer else role.head)
        except (ConfigError, DataError) as e:
            yield f"{key}: {e}"
            continue
        if role.is_scorer and model.head != "value":
            yield (
                f"{role.key}.path: needs a reward model, one for sequence classification with 1 label, got "
                f"{model.architecture}"
            )
            continue
        yield from (f"{key}: {problem}" for problem in weight_problems(Path(role.path), model))
        yield from _layout(config, role, model, same=same)
        yield from _batches(config, role)
        if not same:
            yield from (f"{key}: {problem}" for problem in _vocabulary(config, role, model))


def _layout(config: RunConfig, role: Role, model: Decoder, *, same: bool) -> Iterator[str]:
    slots = config.placement.all_pools[role.pool].slots
    for problem in parallel_problems(model, role.parallel, slots):
        if role.parallel_key == "trainer.parallel":
            yield problem if same else f"{role.key}: {problem}"
        else:
            yield problem.replace("trainer.parallel", role.parallel_key)
    for problem in recompute_problems(model, role.parallel, config.trainer.recompute):
        yield problem if same else f"{role.key}: {problem}"


def _batches(config: RunConfig, role: Role) -> Iterator[str]:
    a, slots = config.algorithm, config.placement.all_pools[role.pool].slots
    dp = slots // role.parallel.model_size
    trajectories = a.prompts_per_step * a.group_size // a.mini_batches
    # where the policy has as many, it has said so
    if role.optimizer is not None and trajectories < dp and dp > config.dp:
        yield (
            f"algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank of "
            f"{role.key}, got prompts_per_step * group_size / mini_batches = {a.prompts_per_step} * {a.group_size} / "
            f"{a.mini_batches} = {trajectories} < slots / (tp * pp * cp) = {slots} / {role.parallel.model_size} = {dp}"
        )


def _vocabulary(config: RunConfig, role: Role, model: Decoder) -> Iterator[str]:
    """Token ids are passed as they are: both need the same tokenizer. Rows of padding may differ."""
    from megarl.data.tokenizer import load_tokenizer  # imports torch, which most checks do without

    try:
        ours: Mapping[str, int] = load_tokenizer(config.model.path).get_vocab()
    except DataError:
        return  # a problem of model.path
    try:
        theirs: Mapping[str, int] = load_tokenizer(role.path).get_vocab()
    except DataError as e:
        yield str(e)
        return
    if model.vocab_size <= max(ours.values()):
        yield (
            f"needs a row for each token of the policy, got vocab_size = {model.vocab_size}, whose last token is "
            f"{max(ours.values())}"
        )
    differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differ:
        yield (
            f"needs the tokenizer of model.path, as token ids are passed as they are; {len(differ)} tokens differ, "
            f"first {differ[0]!r}: {theirs.get(differ[0])} here, {ours.get(differ[0])} there"
        )
