"""Record what the loss and advantage functions of verl, slime and NeMo-RL return for one batch of made-up numbers.

    python -m tests.importing.record_peer_values verl CHECKOUT COMMIT
    python -m tests.importing.record_peer_values slime CHECKOUT COMMIT
    python -m tests.importing.record_peer_values nemo-rl CHECKOUT COMMIT

CHECKOUT is a folder with the files of COMMIT: of github.com/verl-project/verl, github.com/THUDM/slime or
github.com/NVIDIA-NeMo/RL. The functions are imported from there and called; the modules that these import and that the
calls do not need are replaced by stubs in this process. The result, `peer_values/NAME.json`, has the commit, the batch,
and for each case the settings by the trainer's keys, and the values. `test_peer_values` compares megarl with it.

Shapes: B completions, T positions of the longest one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "peer_values"
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
LENGTHS = [3, 6, 2, 5, 7, 4, 1, 6, 5, 7, 3, 4]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, -1.0, 2.0, 0.25, 1.0, 1.0, 1.0, 1.0]
GREEDY = [0.5, 1.0, 0.25]
"""Reward of the greedy completion of each group."""

Case = dict[str, Any]
Settings = Mapping[str, object]


def make_batch() -> dict[str, Any]:
    """Return the inputs by name: lists of B lists of T numbers, 0 after the end of a completion."""
    rng = np.random.default_rng(20260822)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (np.arange(shape[1]) < np.array(LENGTHS)[:, None]).astype(np.float64)
    logprobs = -rng.gamma(1.5, 0.8, shape)
    old = logprobs + rng.normal(0, 0.7, shape)
    by_completion = np.repeat(rng.normal(0, 1.2, shape[0])[:, None], shape[1], 1)
    columns = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": old + rng.normal(0, 0.6, shape),
        "ref_logprobs": logprobs + rng.normal(0, 0.9, shape),
        "entropies": rng.gamma(2.0, 0.5, shape),
        "advantages": by_completion,
        "token_advantages": rng.normal(0, 1.2, shape),
        "values": rng.normal(0.3, 0.6, shape),
        "new_values": rng.normal(0.3, 0.9, shape),
    }
    held = {name: np.round(column * mask, 4).tolist() for name, column in columns.items()}
    return {"mask": mask.tolist(), "rewards": REWARDS, "groups": GROUPS, "greedy_rewards": GREEDY, **held}


def tensors(batch: Mapping[str, Any]) -> SimpleNamespace:
    """Return the inputs as float64 tensors, [B, T]; `rewards` [B]; `greedy` [B], of each completion's group."""
    found = {name: torch.tensor(value, dtype=torch.double) for name, value in batch.items() if name != "groups"}
    groups = torch.tensor(batch["groups"])
    return SimpleNamespace(**found, groups=groups, greedy=found["greedy_rewards"][groups])


def loss_case(
    name: str, settings: Settings, b: SimpleNamespace, loss_of: Callable[[Tensor], Tensor], column: str = "logprobs"
) -> Case:
    """Return the loss and its gradient for `column`."""
    leaf = getattr(b, column).clone().requires_grad_()
    value = loss_of(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"name": name, "settings": settings, "loss": value.item(), "gradient": rounded(gradient)}


def advantages_case(name: str, settings: Settings, b: SimpleNamespace, *found: Tensor) -> Case:
    """Return the advantages, and the returns if given, 0 outside the mask."""
    names = ("advantages", "returns")
    values = {n: rounded(values * b.mask) for n, values in zip(names, found, strict=False)}
    return {"name": name, "settings": settings, **values}


def rounded(values: Tensor) -> object:
    """Return nested lists with 8 decimals."""
    return np.round(values.detach().double().numpy(), 8).tolist()


class Stub:
    """Stands for whatever a module imports and the recorded calls do not need; as a decorator, it changes nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, decorated: object = None, *_: object, **__: object) -> object:
        return decorated

    def __class_getitem__(cls, _: object) -> type[Stub]:
        return cls


class StubModule(ModuleType):
    """A module that has every name; with `folder`, the package whose other modules are there."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        super().__init__(name)
        self.__path__ = [str(folder)] if folder else []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Stub,), {})
        setattr(self, name, value)
        return value


class StubFinder(MetaPathFinder, Loader):
    """Finds the modules with these names, and those in them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return the specification of a stub, or None for other modules."""
        is_stub = any(fullname == name or fullname.startswith(f"{name}.") for name in self.names)
        return ModuleSpec(fullname, self, is_package=True) if is_stub else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stub."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def prepare(checkout: Path, packages: Sequence[str], stubs: Sequence[str]) -> None:
    """Make `packages` of the checkout importable without what their __init__ imports, and `stubs` empty."""
    torch.compile = lambda function=None, **_: function if function else (lambda f: f)  # type: ignore[assignment]
    sys.meta_path.insert(0, StubFinder(stubs))
    for name in packages:
        module = StubModule(name, checkout / name.replace(".", "/"))
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def record_verl(checkout: Path, b: SimpleNamespace) -> Iterator[Case]:
    """Yield the cases of verl: core_algos.py and rollout_corr_helper.py of verl/trainer/ppo."""
    prepare(
        checkout,
        ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"),
        (
            *("omegaconf", "tensordict", "verl.trainer.config", "verl.workers.config", "verl.utils.import_utils"),
            *("verl.protocol", "verl.utils.device"),
        ),
    )
    core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    correction: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    actor, mode_key = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.policy_loss.loss_mode"

    def policy(
        name: str, settings: Settings, *, mode: str = "vanilla", agg: str = "token-mean", advantages: str = "advantages"
    ) -> Case:
        given = {"adv_estimator": "grpo", **settings}
        config = core.ActorConfig()
        fields = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
        fields |= {key.removeprefix(actor): value for key, value in settings.items() if key.startswith(actor)}
        config.__dict__ |= {**fields, "global_batch_info": {}}
        if "loss_scale_factor" in fields:
            config.global_batch_info["loss_scale_factor"] = fields["loss_scale_factor"]
        config.get = lambda key, default: config.__dict__.get(key, default)
        rollout = {k.rpartition(".")[2]: v for k, v in settings.items() if ".rollout_correction." in k}
        weights, mask = None, b.mask
        if rollout:
            log_ratio = b.old_logprobs - b.rollout_logprobs
            if "rollout_is" in rollout:
                weights, _ = correction.compute_rollout_correction_weights(log_ratio, b.mask, **rollout)
            else:
                mask, _ = correction.compute_rollout_rejection_mask(log_ratio, b.mask, **rollout)

        def loss_of(logprobs: Tensor) -> Tensor:
            function = core.get_policy_loss_fn(mode)
            loss, _ = function(b.old_logprobs, logprobs, getattr(b, advantages), mask, agg, config, weights)
            if fields.get("entropy_coeff"):
                loss = loss - fields["entropy_coeff"] * core.agg_loss(b.entropies, mask, agg)
            if fields.get("use_kl_loss"):
                kl = core.kl_penalty(logprobs, b.ref_logprobs, fields["kl_loss_type"])
                loss = loss + fields["kl_loss_coef"] * core.agg_loss(kl, mask, agg)
            return loss

        del given["adv_estimator"]
        return {
            **loss_case(name, {"algorithm.adv_estimator": "grpo", **given}, b, loss_of),
            "advantages_column": advantages,
        }

    yield policy("clip", {}, advantages="token_advantages")
    yield policy("clip without dual clip", {f"{actor}clip_ratio_c": 1e6})
    yield policy("clip higher", {f"{actor}clip_ratio_high": 0.28, f"{actor}clip_ratio_c": 10.0})
    for agg in ("seq-mean-token-sum", "seq-mean-token-mean"):
        yield policy(agg, {f"{actor}loss_agg_mode": agg}, agg=agg, advantages="token_advantages")
    agg = "seq-mean-token-sum-norm"
    yield policy(agg, {f"{actor}loss_agg_mode": agg, f"{actor}loss_scale_factor": 64}, agg=agg)
    yield policy(f"{agg}, longest", {f"{actor}loss_agg_mode": agg, "data.max_response_length": max(LENGTHS)}, agg=agg)
    clip = {f"{actor}clip_ratio_low": 3e-4, f"{actor}clip_ratio_high": 4e-4}
    yield policy("gspo", {mode_key: "gspo", **clip}, mode="gspo")
    yield policy("gspo, wide", {mode_key: "gspo", f"{actor}clip_ratio_high": 0.3}, mode="gspo")
    yield policy(
        "cispo", {mode_key: "cispo", f"{actor}clip_ratio_low": 10.0, f"{actor}clip_ratio_high": 0.2}, mode="cispo"
    )
    yield policy("cispo with a lower bound", {mode_key: "cispo"}, mode="cispo")
    wide = {f"{actor}clip_ratio_low": 0.4, f"{actor}clip_ratio_high": 0.4}
    yield policy("geo_mean", {mode_key: "geo_mean", **wide}, mode="geo_mean")
    yield policy("entropy", {f"{actor}entropy_coeff": 0.01})
    for kind in ("kl", "abs", "mse", "low_var_kl", "k2", "k3", "k3+", "kl+"):
        section = {f"{actor}use_kl_loss": True, f"{actor}kl_loss_coef": 0.05, f"{actor}kl_loss_type": kind}
        yield policy(f"kl loss {kind}", section)
    head = "algorithm.rollout_correction."
    for name, section in {
        "token": {"rollout_is": "token", "rollout_is_threshold": 2.0},
        "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
        "token, two bounds": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        "token, normalized": {
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": True,
        },
        "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.25"},
    }.items():
        yield policy(f"rollout correction {name}", {f"{head}{key}": value for key, value in section.items()})
    yield from _verl_advantages(core, b)


def _verl_advantages(core: Any, b: SimpleNamespace) -> Iterator[Case]:
    estimator, use_kl = "algorithm.adv_estimator", "algorithm.use_kl_in_reward"
    groups = np.array(GROUPS)
    ends = torch.zeros_like(b.mask)
    ends[torch.arange(len(LENGTHS)), b.mask.sum(1).long() - 1] = b.rewards

    def rewards(settings: Settings) -> Tensor:
        if not settings.get(use_kl):
            return ends
        kl = core.kl_penalty(b.old_logprobs, b.ref_logprobs, settings["algorithm.kl_penalty"]) * b.mask
        return ends - settings["algorithm.kl_ctrl.kl_coef"] * kl

    def penalty(kind: str) -> Settings:
        return {use_kl: True, "algorithm.kl_penalty": kind, "algorithm.kl_ctrl.kl_coef": 0.1}

    for by_std in (True, False):
        given = {estimator: "grpo", "algorithm.norm_adv_by_std_in_grpo": by_std}
        found, _ = core.compute_grpo_outcome_advantage(rewards(given), b.mask, groups, norm_adv_by_std_in_grpo=by_std)
        yield advantages_case(f"grpo, std {by_std}".lower(), given, b, found)
    for name in ("rloo", "reinforce_plus_plus_baseline"):
        function = core.get_adv_estimator_fn(name)
        yield advantages_case(name, {estimator: name}, b, function(ends.clone(), b.mask, groups)[0])
    for kind in ("kl", "mse", "low_var_kl", "abs"):
        given = {estimator: "rloo", **penalty(kind)}
        found, _ = core.compute_rloo_outcome_advantage(rewards(given), b.mask, groups)
        yield advantages_case(f"rloo, {kind} in rewards", given, b, found)
    for gamma in (1.0, 0.9):
        given = {estimator: "reinforce_plus_plus", "algorithm.gamma": gamma, **penalty("kl")}
        config = SimpleNamespace(gamma=gamma)
        found, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards(given), b.mask, config=config)
        yield advantages_case(f"reinforce_plus_plus, gamma {gamma}", given, b, found)
    found, _ = core.compute_remax_outcome_advantage(ends, b.greedy, b.mask)
    yield advantages_case("remax", {estimator: "remax"}, b, found)
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95)):
        given = {estimator: "gae", "algorithm.gamma": gamma, "algorithm.lam": lam, **penalty("low_var_kl")}
        found = core.compute_gae_advantage_return(rewards(given), b.values, b.mask, gamma, lam)
        yield advantages_case(f"gae, gamma {gamma}, lam {lam}", given, b, *found)
        returns = found[1]
    for clip in (0.5, 0.2):

        def value_loss(values: Tensor, clip: float = clip) -> Tensor:
            loss: Tensor = core.compute_value_loss(values, returns, b.values, b.mask, clip)[0]
            return loss

        given = {estimator: "gae", "critic.cliprange_value": clip}
        yield {
            **loss_case(f"value loss, clip {clip}", given, b, value_loss, "new_values"),
            "returns": rounded(returns * b.mask),
        }
    given = {
        estimator: "gae",
        **penalty("kl"),
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.target_kl": 0.1,
        "algorithm.kl_ctrl.horizon": 1000,
    }
    controller = core.AdaptiveKLController(0.1, 0.1, 1000)
    coefficients = []
    for current in (0.3, 0.11, 0.02, 0.1):
        controller.update(current, 64)
        coefficients.append(float(controller.value))
    yield {"name": "adaptive controller", "settings": given, "kl": [0.3, 0.11, 0.02, 0.1], "coefficients": coefficients}


def record_slime(checkout: Path, b: SimpleNamespace) -> Iterator[Case]:
    """Yield the cases of slime: the policy's and the critic's loss, and the advantages, of megatron_utils/loss.py."""
    prepare(
        checkout,
        ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils"),
        ("megatron", "slime.utils.types", "slime.utils.misc", "ray"),
    )
    loss: Any = importlib.import_module("slime.backends.megatron_utils.loss")
    cp: Any = importlib.import_module("slime.backends.megatron_utils.cp_utils")
    parallel = SimpleNamespace(
        get_context_parallel_world_size=lambda: 1,
        get_context_parallel_rank=lambda: 0,
        get_context_parallel_group=lambda: None,
        is_pipeline_last_stage=lambda: True,
        get_data_parallel_group=lambda **_: None,
    )
    importlib.import_module("megatron.core").mpu = parallel  # type: ignore[attr-defined]
    loss.mpu = cp.mpu = parallel
    torch.distributed.all_reduce = lambda *_, **__: None  # type: ignore[assignment]  # of one rank
    defaults: dict[str, object] = {
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "eps_clip_c": None,
        "kl_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "use_unbiased_kl": False,
        "entropy_coef": 0.0,
        "use_rollout_logprobs": False,
        "use_tis": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0,
        "custom_tis_function_path": None,
        "get_mismatch_metrics": False,
        "use_opsm": False,
        "opsm_delta": 1e-4,
        "calculate_per_token_loss": False,
        "value_clip": 0.2,
        "gamma": 1.0,
        "lambd": 1.0,
        "rollout_top_p": 1.0,
        "normalize_advantages": False,
        "custom_advantage_function_path": None,
        "use_opd": False,
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "allgather_cp": False,
    }
    loss.load_function = lambda path: getattr(loss, str(path).rpartition(".")[2])

    def arguments(settings: Settings) -> SimpleNamespace:
        names = {"disable_rewards_normalization": "rewards_normalization"}
        names["disable_grpo_std_normalization"] = "grpo_std_normalization"
        given: dict[str, object] = {}
        for key, value in settings.items():
            name = key.removeprefix("--").replace("-", "_")
            given[names.get(name, name)] = not value if name in names else value
        merged = {**defaults, **given}
        merged["eps_clip_high"] = merged["eps_clip"] if merged["eps_clip_high"] is None else merged["eps_clip_high"]
        return SimpleNamespace(**merged)

    def split(values: Tensor) -> list[Tensor]:
        return [row[:n] for row, n in zip(values, LENGTHS, strict=True)]

    def reduced(per_token: bool) -> tuple[Any, float]:
        masks = split(b.mask)
        function = cp.get_sum_of_sample_mean(LENGTHS, LENGTHS, masks, None, per_token)
        return function, float(b.mask.sum()) if per_token else float(len(LENGTHS))

    def policy(name: str, settings: Settings, advantages: str = "advantages") -> Case:
        args = arguments(settings)
        batch = {
            "advantages": split(getattr(b, advantages)),
            **{name: split(getattr(b, source)) for name, source in COLUMNS.items()},
            "response_lengths": LENGTHS,
            "total_lengths": LENGTHS,
            "loss_masks": split(b.mask),
            "unconcat_tokens": None,
            "rollout_mask_sums": [mask.sum() for mask in split(b.mask)],
        }
        function, count = reduced(args.calculate_per_token_loss)

        def loss_of(logprobs: Tensor) -> Tensor:
            scores = {"log_probs": split(logprobs), "entropy": split(b.entropies)}
            loss.get_log_probs_and_entropy = lambda *_, **__: (None, scores)
            value: Tensor = loss.policy_loss_function(args, batch, logprobs, function)[0]
            return value / count

        return {**loss_case(name, settings, b, loss_of), "advantages_column": advantages}

    per_token, estimator = {"--calculate-per-token-loss": True}, "--advantage-estimator"
    yield policy("clip", {}, "token_advantages")
    yield policy("clip per token", {**per_token, "--eps-clip-high": 0.28})
    yield policy("dual clip", {"--eps-clip": 0.2, "--eps-clip-high": 0.28, "--eps-clip-c": 3.0}, "token_advantages")
    yield policy("gspo", {estimator: "gspo", "--eps-clip": 3e-4, "--eps-clip-high": 4e-4})
    yield policy("gspo, wide", {estimator: "gspo", "--eps-clip": 0.3, **per_token})
    yield policy("cispo", {estimator: "cispo", "--eps-clip": 1.0, "--eps-clip-high": 0.5})
    yield policy("cispo with a lower bound", {estimator: "cispo", "--eps-clip": 0.2})
    yield policy("entropy", {"--entropy-coef": 0.01})
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        section = {"--use-kl-loss": True, "--kl-loss-coef": 0.05, "--kl-loss-type": kind}
        yield policy(f"kl loss {kind}", section)
    yield policy("kl loss, unbiased", {**section, "--use-unbiased-kl": True})
    yield policy("tis", {"--use-tis": True, "--tis-clip": 1.5})
    yield policy("tis with a lower bound", {"--use-tis": True, "--tis-clip": 1.5, "--tis-clip-low": 0.7})
    icepop = {"--use-tis": True, "--tis-clip": 1.5, "--tis-clip-low": 0.7}
    icepop["--custom-tis-function-path"] = "slime.backends.megatron_utils.loss.icepop_function"
    yield policy("icepop", {**icepop, "--use-kl-loss": True, "--kl-loss-coef": 0.05, "--kl-loss-type": "k2"})
    yield policy("opsm", {"--use-opsm": True, "--opsm-delta": 0.1})
    yield policy("rollout log-probabilities", {"--use-rollout-logprobs": True})

    def supervised(name: str, settings: Settings) -> Case:
        given = {
            "--loss-type": "sft_loss",
            "--rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
            **settings,
        }
        args = arguments(given)
        batch = {"response_lengths": LENGTHS, "total_lengths": LENGTHS, "unconcat_tokens": None}
        function, count = reduced(args.calculate_per_token_loss)

        def loss_of(logprobs: Tensor) -> Tensor:
            loss.get_log_probs_and_entropy = lambda *_, **__: (None, {"log_probs": split(logprobs)})
            value: Tensor = loss.sft_loss_function(args, batch, logprobs, function)[0]
            return value / count

        return loss_case(name, given, b, loss_of)

    yield supervised("sft", per_token)
    yield supervised("sft, per sample", {})

    manager: Any = _slime_rollout_manager(checkout)

    def advantages(name: str, settings: Settings) -> Case:
        args = arguments(settings)
        samples = [SimpleNamespace(get_reward_value=lambda _, reward=reward: reward) for reward in REWARDS]
        held = SimpleNamespace(args=args, custom_reward_post_process_func=None)
        args.n_samples_per_prompt, args.rollout_batch_size = 4, 3
        _, rewards = manager._post_process_rewards(held, samples)
        data = {
            "rewards": rewards,
            "response_lengths": LENGTHS,
            "total_lengths": LENGTHS,
            "loss_masks": split(b.mask),
            "values": split(b.values),
            "log_probs": split(b.old_logprobs),
            "ref_log_probs": split(b.ref_logprobs),
        }
        loss.compute_advantages_and_returns(args, data)
        found = [torch.nn.utils.rnn.pad_sequence(data[key], batch_first=True) for key in ("advantages", "returns")]
        return advantages_case(name, settings, b, *found)

    whiten = {"--normalize-advantages": True}
    yield advantages("grpo", {estimator: "grpo"})
    yield advantages("grpo without std", {estimator: "grpo", "--disable-grpo-std-normalization": True})
    yield advantages("grpo whitened", {estimator: "grpo", **whiten})
    yield advantages("grpo without normalization", {estimator: "grpo", "--disable-rewards-normalization": True})
    yield advantages("reinforce_plus_plus", {estimator: "reinforce_plus_plus", **whiten, "--gamma": 0.9})
    penalty = {"--kl-coef": 0.1, "--kl-loss-type": "k1"}
    yield advantages("reinforce_plus_plus, kl", {estimator: "reinforce_plus_plus", **whiten, **penalty})
    yield advantages("reinforce_plus_plus_baseline", {estimator: "reinforce_plus_plus_baseline", **whiten})
    yield advantages(
        "reinforce_plus_plus_baseline, kl", {estimator: "reinforce_plus_plus_baseline", **whiten, **penalty}
    )
    yield advantages("ppo", {estimator: "ppo", "--gamma": 0.99, "--lambd": 0.95})
    k3 = {"--kl-coef": 0.1, "--kl-loss-type": "low_var_kl"}
    yield advantages("ppo whitened, kl", {estimator: "ppo", **whiten, **k3, "--lambd": 0.95})

    returns = advantages("ppo", {estimator: "ppo"})["returns"]
    settings = {estimator: "ppo", "--value-clip": 0.2}
    args, (function, count) = arguments(settings), reduced(per_token=False)
    flat = {"values": split(b.values), "returns": split(torch.tensor(returns)), "unconcat_tokens": None}
    flat |= {"total_lengths": LENGTHS, "response_lengths": LENGTHS}

    def value_loss(values: Tensor) -> Tensor:
        loss.get_values = lambda *_, **__: (None, {"values": split(values)})
        value: Tensor = loss.value_loss_function(args, flat, values, function)[0]
        return value / count

    yield {**loss_case("value loss", settings, b, value_loss, "new_values"), "returns": returns}


COLUMNS = {"log_probs": "old_logprobs", "rollout_log_probs": "rollout_logprobs", "ref_log_probs": "ref_logprobs"}
"""slime's name of a column -> that of the batch."""


def _slime_rollout_manager(checkout: Path) -> object:
    """Return the class with `_post_process_rewards`, from its own source text: its module starts servers."""
    lines = (checkout / "slime/ray/rollout.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    def _post_process_rewards"))
    last = next(i for i in range(first + 1, len(lines)) if lines[i].startswith("    def "))
    names: dict[str, Any] = {"torch": torch, "Sample": Stub}
    exec("\n".join(["class Manager:", *lines[first:last]]), names)
    found: object = names["Manager"]
    return found


def record_nemo_rl(checkout: Path, b: SimpleNamespace) -> Iterator[Case]:
    """Yield the cases of NeMo-RL: loss_functions.py and advantage_estimator.py of nemo_rl/algorithms."""
    prepare(
        checkout,
        ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.distributed", "nemo_rl.models"),
        (
            *("ray", "nemo_rl.data", "nemo_rl.models.dtensor", "nemo_rl.models.policy", "nemo_rl.utils"),
            *("nemo_rl.distributed.model_utils", "nemo_rl.distributed.batched_data_dict", "nemo_rl.environments"),
            *("nemo_rl.algorithms.x_token", "nemo_rl.algorithms.loss.utils", "nemo_rl.algorithms.loss.wrapper"),
        ),
    )
    losses: Any = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    estimators: Any = importlib.import_module("nemo_rl.algorithms.advantage_estimator")
    ones = torch.ones(len(LENGTHS), dtype=torch.double)
    num_sequences, num_tokens = torch.tensor(float(len(LENGTHS))), b.mask.sum()

    def shifted(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:, :1]), values], 1)

    def policy(name: str, settings: Settings, advantages: str = "advantages") -> Case:
        off = {"loss_fn.reference_policy_kl_penalty": 0.0, **settings}
        config = losses.ClippedPGLossConfig(**{key.removeprefix("loss_fn."): value for key, value in off.items()})
        function = losses.ClippedPGLossFn(config)
        data = {
            "advantages": shifted(getattr(b, advantages)),
            "prev_logprobs": shifted(b.old_logprobs),
            "generation_logprobs": shifted(b.rollout_logprobs),
            "reference_policy_logprobs": shifted(b.ref_logprobs),
            "token_mask": shifted(b.mask),
            "sample_mask": ones,
            "rewards": b.rewards,
        }

        def loss_of(logprobs: Tensor) -> Tensor:
            value: Tensor = function(logprobs, data, num_sequences, num_tokens)[0]
            return value

        return {**loss_case(name, off, b, loss_of), "advantages_column": advantages}

    head = "loss_fn."
    yield policy("clip", {}, "token_advantages")
    yield policy("clip, dual", {f"{head}ratio_clip_max": 0.28, f"{head}ratio_clip_c": 3.0}, "token_advantages")
    by_sequence = {f"{head}token_level_loss": False}
    yield policy("by sequence", by_sequence, "token_advantages")
    level = {**by_sequence, f"{head}sequence_level_importance_ratios": True}
    yield policy("gspo", {**level, f"{head}ratio_clip_min": 3e-4, f"{head}ratio_clip_max": 4e-4})
    yield policy("gspo, wide", {**level, f"{head}ratio_clip_max": 0.3})
    cispo = {f"{head}use_cispo": True, f"{head}ratio_clip_max": 0.5}
    yield policy("cispo", {**cispo, f"{head}ratio_clip_min": 1.0})
    yield policy("cispo with a lower bound", {**cispo, f"{head}ratio_clip_min": 0.2})
    for kind in ("k1", "k2", "k3"):
        section = {f"{head}reference_policy_kl_penalty": 0.05, f"{head}reference_policy_kl_type": kind}
        yield policy(f"kl loss {kind}", section)
    yield policy("kl loss, on-policy", {**section, f"{head}use_on_policy_kl_approximation": True})
    correct = f"{head}use_importance_sampling_correction"
    truncated = f"{head}truncated_importance_sampling"
    yield policy("correction", {correct: True})
    high, low = f"{truncated}_ratio", f"{truncated}_ratio_min"
    yield policy("tis", {correct: True, f"{truncated}_type": "tis", high: 2.0})
    yield policy("tis with a lower bound", {correct: True, f"{truncated}_type": "tis", high: 2.0, low: 0.7})
    yield policy("icepop", {correct: True, f"{truncated}_type": "icepop", high: 2.0, low: 0.5})
    yield policy("seq-mask-tis", {correct: True, f"{truncated}_type": "seq-mask-tis", high: 1.25, low: 0.8})
    yield policy("gspo, correction", {**level, correct: True, f"{truncated}_type": "tis", high: 1.5})
    yield policy("forced on-policy ratio", {f"{head}force_on_policy_ratio": True})
    yield policy("without ratio", {f"{head}disable_ppo_ratio": True})
    yield policy("positive examples", {f"{head}positive_example_nll_weight": 0.1})

    prompts = b.groups[:, None]
    off = losses.ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
    keys = {
        "normalize_rewards": "grpo.normalize_rewards",
        "use_leave_one_out_baseline": "grpo.use_leave_one_out_baseline",
    }
    for normalize in (True, False):
        for others in (True, False):
            section = {"normalize_rewards": normalize, "use_leave_one_out_baseline": others}
            function = estimators.GRPOAdvantageEstimator(estimators.AdvEstimatorConfig(**section), off)
            given = {keys[name]: value for name, value in section.items()}
            name = f"grpo, std {normalize}, leave one out {others}".lower()
            found = function.compute_advantage(prompts, b.rewards.float(), b.mask)
            yield advantages_case(name, given, b, found.double())
    estimator = "grpo.adv_estimator."
    for minus in (True, False):
        for coefficient in (0.0, 0.1):
            penalty = {"reference_policy_kl_penalty": coefficient, "reference_policy_kl_type": "k1"}
            penalty["use_kl_in_reward"] = coefficient > 0
            section = {"name": "reinforce_plus_plus", "minus_baseline": minus}
            function = estimators.ReinforcePlusPlusAdvantageEstimator(
                estimators.AdvEstimatorConfig(**section), losses.ClippedPGLossConfig(**penalty)
            )
            found = function.compute_advantage(
                prompts, b.rewards.float(), b.mask, logprobs_policy=b.old_logprobs, logprobs_reference=b.ref_logprobs
            )
            given = {f"{estimator}{key}": value for key, value in section.items()}
            given |= {f"{head}{key}": value for key, value in penalty.items()}
            yield advantages_case(f"reinforce_plus_plus, baseline {minus}, kl {coefficient}".lower(), given, b, found)
    for extra in ({}, {"normalize_advantages": False}, {"length_adaptive_alpha": 0.5, "gae_lambda_value": 1.0}):
        section = {
            "name": "gae",
            "gae_lambda": 0.95,
            "gae_gamma": 0.99,
            "normalize_advantages": True,
            "gae_lambda_value": None,
            "gae_lambda_policy": None,
            "length_adaptive_alpha": 0.0,
            **extra,
        }
        function = estimators.GeneralizedAdvantageEstimator(section, off)
        found = function.compute_advantage(prompts, b.rewards, b.mask, b.values)
        given = {f"ppo.adv_estimator.{key}": value for key, value in section.items()}
        given[f"{head}reference_policy_kl_penalty"] = 0.0
        yield advantages_case(f"gae {extra or 'whitened'}", given, b, *found)
    returns = found[1]
    for scale in (1.0, 0.4):
        config = losses.MseValueLossConfig(scale=scale, cliprange=0.2)
        data = {"token_mask": b.mask, "sample_mask": ones, "returns": returns, "values": b.values}

        def value_loss(values: Tensor, config: Any = config, data: Any = data) -> Tensor:
            value: Tensor = losses.MseValueLossFn(config)(values, data, num_sequences, num_tokens)[0]
            return value

        given = {"ppo.adv_estimator.name": "gae", "value_loss_fn.scale": scale, "value_loss_fn.cliprange": 0.2}
        case = loss_case(f"value loss, scale {scale}", given, b, value_loss, "new_values")
        yield {**case, "returns": rounded(returns * b.mask)}
    yield from _nemo_rl_preferences(losses, b, shifted)


def _nemo_rl_preferences(losses: Any, b: SimpleNamespace, shifted: Callable[[Tensor], Tensor]) -> Iterator[Case]:
    """Yield DPO on pairs of neighbours in the batch, and SFT."""
    ones = torch.ones(len(LENGTHS), dtype=torch.double)
    for section in (
        {"reference_policy_kl_penalty": 0.1},
        {"reference_policy_kl_penalty": 0.1, "sft_loss_weight": 0.2, "sft_average_log_probs": True},
        {"reference_policy_kl_penalty": 0.1, "sft_loss_weight": 0.2},
        {"reference_policy_kl_penalty": 0.1, "preference_average_log_probs": True},
    ):
        function = losses.DPOLossFn(losses.DPOLossConfig(**section))
        # the reference's log-probabilities are shifted by one less than the policy's
        reference = torch.cat([b.ref_logprobs, torch.zeros_like(b.ref_logprobs[:, :1])], 1)
        data = {"token_mask": shifted(b.mask), "sample_mask": ones, "reference_policy_logprobs": reference}

        def loss_of(logprobs: Tensor, function: Any = function, data: Any = data) -> Tensor:
            value: Tensor = function(logprobs, data, torch.tensor(float(len(LENGTHS))), b.mask.sum())[0]
            return value

        given = {f"dpo.{key}": value for key, value in section.items()}
        yield loss_case(f"dpo {', '.join(section)}", given, b, loss_of)

    def likelihood(logprobs: Tensor) -> Tensor:
        data = {"token_mask": shifted(b.mask), "sample_mask": ones}
        value: Tensor = losses.NLLLossFn()(logprobs, data, None, b.mask.sum())[0]
        return value

    yield loss_case("sft", {"sft.max_num_steps": 10}, b, likelihood)


RECORDERS = {
    "verl": ("https://github.com/verl-project/verl", record_verl),
    "slime": ("https://github.com/THUDM/slime", record_slime),
    "nemo-rl": ("https://github.com/NVIDIA-NeMo/RL", record_nemo_rl),
}


def main() -> None:
    """Write the JSON of one trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=RECORDERS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("commit")
    args = parser.parse_args()
    repository, record = RECORDERS[args.peer]
    batch = make_batch()
    cases = list(record(args.checkout.resolve(), tensors(batch)))
    head = {"repository": repository, "commit": args.commit, "batch": batch}
    lines = ",\n".join(json.dumps(case) for case in cases)
    text = f'{json.dumps(head, indent=0)[:-2]},\n"cases": [\n{lines}\n]\n}}\n'
    (FOLDER / f"{args.peer.replace('-', '_')}.json").write_text(text)
    sys.stdout.write(f"{len(cases)} cases of {args.peer}\n")


if __name__ == "__main__":
    main()
