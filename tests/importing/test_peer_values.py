"""megarl's losses, advantages and coefficients under converted settings, against what the peers' own functions return.

`record_peer_values` made the values. Where megarl has no equal setting, the conversion has to say so, and the values
have to differ: `DIFFERENT` lists these cases with part of the sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from megarl.algorithms.grpo import group_estimates
from megarl.algorithms.ppo import ppo_estimates, vapo_estimates
from megarl.algorithms.reinforce import reinforce_estimates, remax_estimates
from megarl.batch.pack import PackedBatch
from megarl.config.algorithm import AlgorithmConfig
from megarl.functional import (
    AdaptiveKl,
    Denominators,
    Sequences,
    aggregate,
    dpo_loss,
    normalize,
    rpo_loss,
    spread_completions,
    value_loss,
)
from megarl.importing.conversion import PEERS, Conversion, convert
from megarl.importing.tables import Setting
from megarl.losses import CispoLoss, ClippedLoss, GmpoLoss, GspoLoss, LossBatch, PolicyLoss, TokenScores
from megarl.rollout.estimators import EstimatorOutput, TokenBatch

FILES = {name: Path(__file__).parent / "peer_values" / f"{name.replace('-', '_')}.json" for name in PEERS}
RECORDS: dict[str, Any] = {name: json.loads(path.read_text()) for name, path in FILES.items()}
CASES = [(peer, case["name"]) for peer, record in RECORDS.items() for case in record["cases"]]

DIFFERENT: dict[tuple[str, str], str] = {
    ("verl", "cispo with a lower bound"): "from below",
    ("verl", "kl loss kl"): "expected gradient of k1",
    ("verl", "kl loss abs"): "k2 (mse) and k3",
    ("verl", "rollout correction token, normalized"): "does not normalize",
    ("verl", "rollout correction seq_mean_k1"): "leaves them out",
    ("verl", "rloo, abs in rewards"): "kl, mse and low_var_kl",
    ("slime", "cispo with a lower bound"): "no lower bound",
    ("slime", "kl loss k1"): "expected gradient is 0",
    ("slime", "kl loss, unbiased"): "by the ratio pi / pi_old",
    ("slime", "tis with a lower bound"): "no lower bound",
    ("slime", "opsm"): "off-policy sequences",
    ("slime", "rollout log-probabilities"): "old log-probabilities itself",
    ("slime", "grpo whitened"): "does not whiten",
    ("slime", "reinforce_plus_plus_baseline, kl"): "from its own advantage",
    ("slime", "value loss"): "half of slime's",
    ("slime", "sft, per sample"): "averages over those of each sample",
    ("nemo-rl", "cispo with a lower bound"): "no lower bound",
    ("nemo-rl", "kl loss k1"): "gradient of k1",
    ("nemo-rl", "kl loss k2"): "gradient of k2",
    ("nemo-rl", "kl loss, on-policy"): "pi / pi_engine",
    ("nemo-rl", "tis with a lower bound"): "no lower bound",
    ("nemo-rl", "seq-mask-tis"): "not both",
    ("nemo-rl", "without ratio"): "disable_ppo_ratio",
    ("nemo-rl", "positive examples"): "vapo only",
    ("nemo-rl", "grpo, std true, leave one out true"): "not of the others",
    ("nemo-rl", "reinforce_plus_plus, baseline true, kl 0.1"): "from its own advantage",
    ("nemo-rl", "reinforce_plus_plus, baseline false, kl 0.1"): "from its own advantage",
    ("nemo-rl", "value loss, scale 0.4"): "value_loss_fn.scale",
    ("nemo-rl", "dpo reference_policy_kl_penalty, sft_loss_weight"): "a mean over its tokens",
    ("nemo-rl", "dpo reference_policy_kl_penalty, preference_average_log_probs"): "does not average",
}
"""Peer and case -> part of the sentence with which the conversion reports the difference."""

GRADIENT_ONLY = ("k3+", "kl+", "kl loss k3", "kl loss, on-policy")
"""Ends of the names of penalties whose gradient is that of k2, and whose value is another."""

REFUSED = {("slime", "grpo without normalization"): "without the baseline of their group"}


def case_of(peer: str, name: str) -> dict[str, Any]:
    """Return a recorded case."""
    found: dict[str, Any] = next(case for case in RECORDS[peer]["cases"] if case["name"] == name)
    return found


def conversion_of(peer: str, case: dict[str, Any]) -> Conversion:
    """Return the conversion of the settings of a case, with a batch of three groups of four."""
    batches: dict[str, dict[str, object]] = {
        "verl": {
            "data.train_batch_size": 3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 3,
            "actor_rollout_ref.rollout.n": 4,
        },
        "slime": {
            "--rollout-batch-size": 3,
            "--n-samples-per-prompt": 4,
            "--prompt-data": "d.jsonl",
            "--num-rollout": 1,
        },
        "nemo-rl": {"policy.train_global_batch_size": 12},
    }
    given = {**batches[peer], **case["settings"]}
    if peer == "nemo-rl" and not any(key.startswith(("dpo.", "sft.")) for key in given):
        section = "ppo" if any(key.startswith("ppo.") for key in given) else "grpo"
        given |= {
            f"{section}.num_prompts_per_step": 3,
            f"{section}.num_generations_per_prompt": 4,
            f"{section}.seed": 1,
        }
        if section == "grpo" and "grpo.use_leave_one_out_baseline" not in given:
            given["grpo.use_leave_one_out_baseline"] = False
    settings = {key: Setting(key=key, value=value, origin="run.sh:1") for key, value in given.items()}
    table_of = PEERS[peer].table_of
    return convert(PEERS[peer].table if table_of is None else table_of(settings), settings)


def algorithm_of(conversion: Conversion) -> Any:
    """Return the section `algorithm` that the conversion wrote."""
    return TypeAdapter[Any](AlgorithmConfig).validate_python(conversion.tree()["algorithm"])


class Batch:
    """The recorded batch, packed: T tokens of all completions; the first token of each is a prompt of one token."""

    def __init__(self, peer: str) -> None:
        self.values = RECORDS[peer]["batch"]
        self.mask = torch.tensor(self.values["mask"]) > 0
        self.lengths = self.mask.sum(1)
        self.cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), self.lengths.cumsum(0)])

    def packed(self, name: str) -> Tensor:
        """Return a column, float64 [T]."""
        return torch.tensor(self.values[name], dtype=torch.double)[self.mask]

    def padded(self, values_T: Tensor) -> np.ndarray:
        """Return [B, T] of packed values, 0 after the ends."""
        full = torch.zeros(self.mask.shape, dtype=torch.double)
        full[self.mask] = values_T.double()
        return full.numpy()

    def loss_batch(self, advantages: str, old: str) -> LossBatch:
        """Return what a loss is computed on."""
        ids_T = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        mask_T = torch.ones(len(ids_T), dtype=torch.bool)
        ends_T = torch.zeros(len(ids_T), dtype=torch.bool)
        ends_T[self.cu_seqlens[1:] - 1] = True
        positive = (torch.tensor(self.values["rewards"]) > 0).double()
        pack = PackedBatch(
            token_ids_T=ids_T,
            position_ids_T=ids_T,
            target_ids_T=ids_T,
            mask_T=mask_T,
            rollout_logprobs_T=self.packed("rollout_logprobs"),
            sequence_tokens_T=self.lengths[ids_T].float(),
            sequence_ids_T=ids_T,
            ends_T=ends_T,
            cu_seqlens_S=self.cu_seqlens,
            columns={
                "advantages": self.packed(advantages),
                "old_logprobs": self.packed(old),
                "ref_logprobs": self.packed("ref_logprobs"),
                "positive": positive[ids_T],
            },
        )
        counts = Denominators(num_tokens=len(ids_T), num_sequences=len(self.lengths))
        return LossBatch(pack=pack, denominators=counts, sequences=Sequences.of(self.cu_seqlens))

    def token_batch(self) -> TokenBatch:
        """Return what advantages are estimated from."""
        groups = torch.tensor(self.values["groups"])
        names = ("values", "old_logprobs", "ref_logprobs")
        return TokenBatch(
            mask_T=torch.ones(int(self.lengths.sum()), dtype=torch.bool),
            cu_seqlens_N=self.cu_seqlens,
            rewards_N=torch.tensor(self.values["rewards"]),
            group_ids_N=groups,
            columns={name: self.packed(name) for name in names},
            scalars={"greedy_rewards": torch.tensor(self.values["greedy_rewards"])[groups]},
        )


def policy_loss(peer: str, case: dict[str, Any], algorithm: Any, length_norm: int) -> tuple[float, np.ndarray]:
    """Return megarl's loss and its gradient for the log-probabilities."""
    batch = Batch(peer)
    losses: Any = {"gspo": GspoLoss, "cispo": CispoLoss, "gmpo": GmpoLoss}
    token_loss = losses.get(algorithm.type, ClippedLoss)(algorithm)
    # a ratio that is 1 by force is that of a first update, whose old log-probabilities are those of the policy
    old = "logprobs" if "loss_fn.force_on_policy_ratio" in case["settings"] else "old_logprobs"
    loss = PolicyLoss(
        token_loss=token_loss,
        algorithm=algorithm,
        length_norm=algorithm.length_norm or length_norm,
        nll=getattr(algorithm, "nll_coefficient", 0.0),
    )
    leaf = batch.packed("logprobs").requires_grad_()
    scores = TokenScores(logprobs_T=leaf, entropy_T=batch.packed("entropies"))
    value = loss(scores, batch.loss_batch(case["advantages_column"], old)).loss
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), batch.padded(gradient)


def estimates(peer: str, algorithm: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return megarl's advantages and returns."""
    batch = Batch(peer)
    tokens = batch.token_batch()
    coefficient = 0.0 if algorithm.kl_reward is None else algorithm.kl_reward.coefficient
    match algorithm.type:
        case "ppo" | "pf_ppo":
            out: EstimatorOutput = ppo_estimates(tokens, algorithm, coefficient)
        case "vapo":
            out = vapo_estimates(tokens, algorithm, coefficient)
        case "reinforce_pp" | "reinforce_pp_baseline":
            out = reinforce_estimates(tokens, algorithm, coefficient)
        case "remax":
            out = remax_estimates(tokens, algorithm, coefficient)
        case _:
            scalars = group_estimates(tokens, algorithm, coefficient).scalars["advantages"]
            return batch.padded(spread_completions(scalars, tokens.mask_T, tokens.cu_seqlens_N)), None
    advantages_T = out.columns["advantages"]
    if out.whitening is not None:
        white = out.whitening
        advantages_T = normalize(advantages_T, tokens.mask_T, mean=white.mean, variance=white.variance)
    returns_T = out.columns.get("returns")
    return batch.padded(advantages_T), None if returns_T is None else batch.padded(returns_T)


def critic_loss(peer: str, case: dict[str, Any], algorithm: Any) -> tuple[float, np.ndarray]:
    """Return the critic's loss, a mean over tokens, and its gradient for the values."""
    batch = Batch(peer)
    leaf = batch.packed("new_values").requires_grad_()
    returns_T = torch.tensor(case["returns"], dtype=torch.double)[batch.mask]
    loss_T = value_loss(leaf, batch.packed("values"), returns_T, clip=algorithm.critic.clip).loss_T
    found = batch.loss_batch("advantages", "old_logprobs")
    counts = found.denominators
    mode: Any = "seq-mean-token-mean" if peer == "slime" else "token-mean"
    value = aggregate(loss_T, found.mask_T, found.pack.sequence_tokens_T, mode=mode, denominators=counts)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), batch.padded(gradient)


def preference_values(peer: str, dpo: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Return the loss of DPO on pairs of neighbours in the batch, and its gradient for the log-probabilities."""
    batch = Batch(peer)
    leaf = batch.packed("logprobs").requires_grad_()
    sequences = Sequences.of(batch.cu_seqlens)
    chosen_S, reference_S = sequences.sum(leaf), sequences.sum(batch.packed("ref_logprobs"))
    sums = (chosen_S[::2], chosen_S[1::2], reference_S[::2], reference_S[1::2])
    if dpo.get("nll"):
        out = rpo_loss(*sums, batch.lengths[::2], beta=dpo["beta"], alpha=dpo["nll"])
    else:
        out = dpo_loss(*sums, beta=dpo["beta"])
    value = out.loss_B.mean()
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), batch.padded(gradient)


def megarl_values(peer: str, case: dict[str, Any], conversion: Conversion) -> dict[str, Any]:
    """Return megarl's values by the names of those of the case."""
    tree: Any = conversion.tree()
    if "dpo" in tree:
        loss, gradient = preference_values(peer, tree["dpo"])
        return {"loss": loss, "gradient": gradient}
    if case["name"].startswith("sft"):
        batch = Batch(peer)
        count = int(batch.lengths.sum())
        gradient = np.where(batch.mask.numpy(), -1 / count, 0.0)
        return {"loss": -float(batch.packed("logprobs").mean()), "gradient": gradient}
    algorithm = algorithm_of(conversion)
    if "coefficients" in case:
        section = algorithm.kl_reward
        kl = AdaptiveKl(section.coefficient, section.target, section.horizon)
        return {"coefficients": [kl.update(value, 64) for value in case["kl"]]}
    if "advantages" in case:
        advantages, returns = estimates(peer, algorithm)
        return {"advantages": advantages, **({} if returns is None else {"returns": returns})}
    if "advantages_column" in case:
        loss, gradient = policy_loss(peer, case, algorithm, tree.get("rollout", {}).get("max_new_tokens", 512))
    else:
        loss, gradient = critic_loss(peer, case, algorithm)
    return {"loss": loss, "gradient": gradient}


def largest_difference(case: dict[str, Any], got: dict[str, Any], names: tuple[str, ...]) -> float:
    """Return the largest difference of any value from the recorded one, relative where that is above 1."""
    shared = [name for name in names if name in case and name in got]
    assert shared, (case["name"], names)
    wanted = [np.asarray(case[name], dtype=np.float64) for name in shared]
    pairs = zip((np.asarray(got[name]) for name in shared), wanted, strict=True)
    return max(float((np.abs(a - b) / np.maximum(1, np.abs(b))).max()) for a, b in pairs)


@pytest.mark.parametrize(("peer", "name"), CASES, ids=[f"{peer}: {name}" for peer, name in CASES])
def test_values_under_converted_settings(peer: str, name: str) -> None:
    case = case_of(peer, name)
    if (peer, name) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[peer, name]):
            conversion_of(peer, case)
        return
    conversion = conversion_of(peer, case)
    got = megarl_values(peer, case, conversion)
    if (reason := DIFFERENT.get((peer, name))) is not None:
        report = " ".join([*(unmapped.reason for unmapped in conversion.unmapped), *conversion.differences])
        assert reason in report
        assert largest_difference(case, got, ("loss", "gradient", "advantages")) > 1e-4
        return
    values = ("gradient",) if name.endswith(GRADIENT_ONLY) and peer != "slime" else ("loss", "gradient")
    assert largest_difference(case, got, (*values, "advantages", "returns", "coefficients")) < 1e-5


def test_files_name_repository_and_commit() -> None:
    for record in RECORDS.values():
        assert record["repository"].startswith("https://github.com/")
        assert len(record["commit"]) == 40
