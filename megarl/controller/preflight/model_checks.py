"""Checks of the model folders: architecture, weights, parallel sizes and context length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from megarl.cluster.placement.hardware import GpuType, package_version
from megarl.config import StageConfig
from megarl.config.data import Source
from megarl.config.megatron import NEEDS_TE_LAYERS
from megarl.config.model import AuxiliaryModel
from megarl.config.rollout import RolloutConfig
from megarl.config.run import DpoConfig, RunConfig
from megarl.data.prompts import resolve_max_prompt_tokens
from megarl.engines.unsupported_options import find_engine_problems
from megarl.errors import ConfigError, DataError
from megarl.megatron.families.architecture import Head, Layer, ModelArchitecture, load_family
from megarl.megatron.families.attention import Attention, GatedDeltaNet, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import FeedForward, GatedMlp, MixtureOfExperts
from megarl.megatron.families.load_architecture import (
    find_folder_notices,
    find_weight_problems,
    fit_to_weights,
    load_architecture,
    load_architecture_from_folder,
    model_head,
    require_family,
)
from megarl.megatron.families.trainer_layouts import parallel_problems, recompute_problems
from megarl.megatron.mcore_fields import (
    ddp_fields,
    find_attention_problem,
    find_offload_problem,
    fusion_fields,
    needs_torch_layers,
    optimizer_fields,
    override_model_fields,
)
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import read_stop_token_ids
from megarl.model_files.quantization import quantized_format


def will_write_model(config: StageConfig) -> bool:
    """Whether `model.tiny` is set and `model.path` does not exist yet."""
    return config.model.tiny is not None and not Path(config.model.path).exists()


def write_missing_model(config: StageConfig) -> None:
    """Write the model that `model.tiny` describes to `model.path`, unless that exists.

    Raises:
        DataError: a training file cannot be read.
    """
    if not will_write_model(config):
        return
    from megarl.data.rows import ANSWER_FIELDS, PROMPT_FIELDS, read_rows
    from megarl.data.tiny_checkpoint import write_tiny_model

    assert config.model.tiny is not None
    fields = config.data.fields
    wanted = dict.fromkeys(
        (fields.prompt, fields.response, fields.answer, fields.chosen, fields.rejected, *PROMPT_FIELDS, *ANSWER_FIELDS)
    )
    rows = chain.from_iterable(map(read_rows, config.data.training_files.values()))
    texts = (_text(row.find(name)) for row in rows for name in wanted if row.find(name) is not None)
    write_tiny_model(config.model.path, texts, seed=config.seed, **config.model.tiny.model_dump())


def _text(value: object) -> str:
    """Return a field as text; messages as roles and contents, one below the other."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        parts = [str(message.get(name, "")) for message in value for name in ("role", "content")]
        return "\n".join([*parts, "assistant\n"])
    return str(value)


LINE_WIDTH = 110


def _find_replay_problems(config: StageConfig, experts: MixtureOfExperts) -> Iterator[str]:
    key, replay = "trainer.moe.router_replay", config.trainer.moe.router_replay
    if not isinstance(config, RunConfig):
        yield f"{key}: only megarl train passes over a token more than once in a step, got {replay}"
    elif replay == "R3" and config.rollout.engine.is_custom:
        yield f"{key}: R3 needs rollout.engine.type: sglang, got {config.rollout.engine.type}"
    elif replay == "R3" and config.rollout.engine.attn_dp_size > 1:
        yield (
            f"{key}: R3 needs engines without data-parallel attention, in which SGLang returns the routes of other "
            "tokens for prompts computed in a CUDA graph: remove attn_dp_size and dp_size from "
            f"rollout.engine.extra_args, got {config.rollout.engine.attn_dp_size} groups"
        )
    if experts.routing.top_k < 2:
        yield f"{key}: needs at least 2 experts per token, got {experts.routing.top_k}"
    if config.trainer.megatron.model.get("moe_router_fusion"):
        yield f"{key}: needs megatron.model.moe_router_fusion: false, as the fused kernel chooses experts itself"


def find_megatron_problems(config: StageConfig, model: ModelArchitecture, device: str | None) -> Iterator[str]:
    """Find fields of `trainer.megatron` and `trainer.moe` that do not fit the policy or the device.

    Args:
        device: `cpu`, `cuda`, or None where it is unknown.
    """
    trainer, key = config.trainer, "trainer.megatron.model"
    if device == "cpu":
        yield from trainer.megatron.find_te_problems()
        yield from trainer.recompute.find_te_problems()
    if model.experts is None:
        for name in trainer.megatron.model:
            if name.startswith("moe_"):
                yield f"{key}.{name}: {model.name} has no experts"
        if trainer.moe.freeze_router or trainer.moe.aux_loss_coeff or trainer.moe.router_replay != "none":
            yield f"trainer.moe: {model.name} has no experts"
    elif trainer.moe.router_replay != "none":
        yield from _find_replay_problems(config, model.experts)
    num_chunks = trainer.megatron.model.get("mlp_chunks_for_training", 1)
    if model.experts is not None and num_chunks != 1:
        yield f"{key}.mlp_chunks_for_training: the routers of {model.name} need whole micro-batches, got {num_chunks}"
    dtype = config.model.dtype
    if trainer.megatron.offloads_adam and (dtype == "float32" or (dtype == "auto" and device == "cpu")):
        yield "trainer.megatron.optimizer.optimizer_cpu_offload: needs model.dtype: bfloat16, got float32"
    elif (problem := find_offload_problem(model, trainer.megatron)) is not None:
        yield problem
    te_layers = _has_te_layers(config, model)
    for name in () if te_layers else NEEDS_TE_LAYERS:
        if name in trainer.megatron.model and dtype == "float32":
            yield f"{key}.{name}: needs model.dtype: bfloat16, got float32"
        elif name in trainer.megatron.model:
            yield f"{key}.{name}: has no effect on {model.name}, whose layers are torch's"
    for name, fits in fusion_fields(model, has_te=True, te_layers=te_layers, has_wgrad_kernel=True).items():
        if trainer.megatron.model.get(name) and not fits and (model.experts or not name.startswith("moe_")):
            yield f"{key}.{name}: no fused kernel fits the layers of {model.name}"
    yield from _find_a2a_problems(config, model)
    yield from _find_determinism_problem(config, model)


def _find_determinism_problem(config: StageConfig, model: ModelArchitecture) -> Iterator[str]:
    if config.trainer.megatron.model.get("deterministic_mode") and model.attentions(GatedDeltaNet):
        yield (
            f"trainer.megatron.model.deterministic_mode: megatron-core has none for packed sequences in gated delta "
            f"nets, which {model.name} has"
        )


def find_attention_problems(config: StageConfig, model: ModelArchitecture, gpus: Iterable[GpuType]) -> Iterator[str]:
    """Find out whether Transformer Engine's layers lack attention kernels on one of the types of GPUs.

    flash-attn that the configuration names is taken to be installed on the GPUs' nodes if this machine has no
    Transformer Engine, so that it cannot be one of them.
    """
    megatron = config.trainer.megatron
    if not _has_te_layers(config, model):
        return
    is_elsewhere = megatron.model.get("attention_backend") == "flash" and package_version("transformer-engine") is None
    for capability in () if is_elsewhere else dict.fromkeys(gpu.capability for gpu in gpus):
        problem = find_attention_problem(model, megatron, capability, cp=config.trainer.parallel.cp)
        if problem is not None:
            yield problem


def _has_te_layers(config: StageConfig, model: ModelArchitecture) -> bool:
    """Return whether the policy's layers are Transformer Engine's on GPUs that have it."""
    return not needs_torch_layers(model, config.trainer.megatron, config.model.resolved_dtype("cuda"))


def _find_a2a_problems(config: StageConfig, model: ModelArchitecture) -> Iterator[str]:
    kinds, key = config.trainer.megatron.model.get("cp_comm_type"), "trainer.megatron.model.cp_comm_type"
    if kinds is None:
        return
    unknown = sorted(set([kinds] if isinstance(kinds, str) else kinds) - {"p2p", "a2a"})
    if unknown:
        yield f"{key}: needs p2p or a2a, which Transformer Engine has for packed sequences, got {', '.join(unknown)}"
    if isinstance(kinds, list) and len(kinds) != model.num_layers:
        yield f"{key}: needs one entry for each of {model.num_layers} layers, got {len(kinds)}"
    if "a2a" not in kinds:
        return
    tp, cp = config.trainer.parallel.tp, config.trainer.parallel.cp
    if model.attentions(LatentAttention):
        yield f"{key}: Transformer Engine has only p2p for latent attention, got a2a"
    for heads in dict.fromkeys(attention.num_kv_heads for attention in model.attentions(GroupedQueryAttention)):
        if (heads // tp) % cp:
            yield (
                f"{key}: a2a divides the key-value heads of a tensor-parallel rank over parallel.cp ranks, got "
                f"{heads} / {tp} % {cp} = {heads // tp % cp}"
            )


def describe_megatron(config: StageConfig, model: ModelArchitecture, device: str | None) -> list[str]:
    """Return lines with the fields of megatron-core that matter for speed and memory, as the policy's ranks set them.

    Args:
        device: as in `find_megatron_problems`; Transformer Engine and apex are taken to be on GPUs.
    """
    has_te, megatron, optimizer = device != "cpu", config.trainer.megatron, config.trainer.optimizer
    te_layers, parallel = has_te and _has_te_layers(config, model), config.trainer.parallel
    fusions = fusion_fields(model, has_te=has_te, te_layers=te_layers, has_wgrad_kernel=has_te)
    fusions["moe_router_fusion"] &= config.trainer.moe.router_replay == "none"
    layers = "Transformer Engine" if te_layers else "torch"
    overlap = has_te and config.placement.slots > parallel.tp * parallel.pp
    fields = optimizer_fields(optimizer, megatron, overlap=overlap) | {"optimizer": optimizer.type}
    shown = {name: value for name, value in fields.items() if name not in ("lr", "min_lr", "fp8_recipe")}
    return [
        f"megatron: {layers} layers" + ("" if has_te else ", no fused kernels on the CPU"),
        *_lines("model", override_model_fields(fusions, megatron, moe=model.experts is not None)),
        *_lines("ddp", ddp_fields(optimizer, megatron, overlap=overlap)),
        *_lines("optimizer", shown),
    ]


def _lines(part: str, fields: Mapping[str, object]) -> list[str]:
    """Return `megatron.<part>: a=true, b=1, ...`, in as many lines as needed."""
    lines = [f"megatron.{part}:"]
    for name, value in fields.items():
        text = f" {name}={str(value).lower() if value is None or isinstance(value, bool) else value}"
        if len(lines[-1]) + len(text) > LINE_WIDTH:
            lines.append("    ")
        lines[-1] += text
    return lines


def describe_policy(config: StageConfig) -> list[str]:
    """Return a line with the policy's parameters and layers, from its config.json; none if that cannot be read, which
    checks report.
    """
    if will_write_model(config):
        return []
    try:
        model = load_architecture_from_folder(
            Path(config.model.path), head=model_head(config), family=config.model.family
        )
    except (ConfigError, DataError):
        return []
    more = f", and {model.num_mtp_layers} for multi-token prediction" if model.num_mtp_layers else ""
    return [f"model: {model.name}, {model.num_parameters:,} parameters in {describe_layers(model)}{more}"]


def describe_layers(model: ModelArchitecture) -> str:
    """Return the kinds of layers of a model, the most frequent first."""
    kinds = Counter(_describe_layer(layer) for layer in model.layers)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())


def _describe_layer(layer: Layer) -> str:
    return f"{_describe_attention(layer.attention)} and {_describe_mlp(layer.mlp)}"


def _describe_attention(attention: Attention) -> str:
    match attention:
        case GatedDeltaNet():
            return "gated delta net"
        case LatentAttention(indexer=indexer):
            return "latent attention" + (f" ({indexer.top_k} selected keys)" if indexer else "")
        case GroupedQueryAttention() as a:
            features = {
                f"window {a.window}": a.window,
                "QKV bias": a.qkv_bias,
                "q/k norm": a.qk_norm,
                "q/k norm of all heads": a.full_qk_norm,
                "output gate": a.output_gate,
                "sinks": a.sinks,
                "score cap": a.softcap,
                f"{a.rope.fraction:.0%} rotated": a.rope.fraction < 1,
                "post-norm": a.post_norm,
            }
            stated = [name for name, has in features.items() if has]
            return "attention" + (f" ({', '.join(stated)})" if stated else "")


def _describe_mlp(mlp: FeedForward) -> str:
    if isinstance(mlp, GatedMlp):
        return "MLP"
    shared = " and a shared one" if mlp.shared_ffn_size else ""
    return f"{mlp.routing.top_k} of {mlp.num_experts} experts{shared}"


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
        if not is_policy_folder:
            yield from (f"{auxiliary.key}.path: {problem}" for problem in _find_determinism_problem(config, model))
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
    model = fit_to_weights(model, folder)
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
        yield from find_engine_size_problems(model, config.rollout, device)
        yield from find_gather_problems(config, model, hf_config)
        if device is not None and not config.rollout.engine.is_custom:  # the problems are SGLang's
            yield from find_engine_problems(hf_config, device, origin=str(folder / "config.json"))


def find_gather_problems(config: RunConfig, model: ModelArchitecture, hf_config: JsonMapping) -> Iterator[str]:
    """Find tensors of the engines that `gather_hf` cannot assemble; `hf_config`: content of config.json."""
    if config.weight_sync.strategy != "gather_hf":
        return
    if quantized_format(hf_config) == "FP8":
        folder = Path(config.model.path)
        yield (
            f"weight_sync.strategy: engines of {folder} need weights in FP8, which micro_dp and exact send, gather_hf "
            "does not"
        )
    ep = config.trainer.parallel.ep
    if ep > 1 and model.experts is not None and model.experts.is_stacked:
        yield (
            f"weight_sync.strategy: gather_hf needs trainer.parallel.ep: 1 for {model.name}, whose tensors have all "
            f"experts of a layer, got {ep}; micro_dp and exact do not"
        )


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
    yield from (f"{key}: {problem}" for problem in _find_determinism_problem(config, model))
    parallel = reference.parallel or config.trainer.parallel
    for problem in parallel_problems(model, parallel, config.placement.slots):
        yield problem.replace("trainer.parallel", "dpo.reference.parallel")
    if vocab_size is not None and model.vocab_size != vocab_size:
        yield f"{key}: needs the vocabulary of model.path, got {model.vocab_size} tokens, model.path has {vocab_size}"


def find_engine_size_problems(model: ModelArchitecture, rollout: RolloutConfig, device: str | None) -> Iterator[str]:
    """Find sizes of the model that the parallel sizes of an engine do not divide."""
    tp, groups, ep = rollout.tp, rollout.engine.attn_dp_size, rollout.engine.ep_size
    attention = "rollout.tp" if groups == 1 else f"rollout.tp / {groups} groups of data-parallel attention"
    for what, size, units in (
        (attention, tp // groups, model.sharding_units(lambda layer: (layer.attention,))),
        ("rollout.tp", tp, model.sharding_units(lambda layer: (layer.mlp,))),
    ):
        for unit in units:
            # SGLang replicates key-value heads if there are fewer than ranks, and distributes experts over the ranks
            repeated = unit.can_replicate and size % unit.total == 0
            if unit.axis != "ep" and unit.total % size and not repeated:
                yield f"{what}: {unit.description} that do not divide, {unit.total} % {size} = {unit.total % size}"
    key = "rollout.engine.extra_args"
    if model.num_experts % ep:
        yield (
            f"{key}.ep_size: {model.name} has experts that do not divide, {model.num_experts} % {ep} = "
            f"{model.num_experts % ep}"
        )
    if rollout.engine.extra_args.get("moe_a2a_backend") == "deepep":
        if model.experts is None:
            yield f"{key}.moe_a2a_backend: {model.name} has no experts, got deepep"
        if device == "cpu":
            yield f"{key}.moe_a2a_backend: deepep needs engines on cuda, got cpu"


def find_token_limit(config: StageConfig, hf_config: JsonMapping, source: Source) -> int:
    """Return the most tokens allowed in a prompt of a source; for stages without engines, in a prompt with answer."""
    return (
        resolve_max_prompt_tokens(config, hf_config, source)
        if isinstance(config, RunConfig)
        else hf_config["max_position_embeddings"]
    )
