"""Reward-model and DPO stages: preflight checks and the functions that need no ranks."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.batch.trajectory import Trajectory
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config import DpoConfig, RmConfig, StageConfig
from megarl.config.load import make_config
from megarl.config.run import with_absolute_paths
from megarl.controller.preflight.run_checks import check_run
from megarl.data.preference_pairs import PreferencePair
from megarl.data.sampler import PromptOrder, PromptSampler
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.errors import ConfigError
from megarl.stages import (
    iter_forward_requests,
    make_pair_scalars,
    preference_accuracy,
    select_rows,
    sum_answer_logprobs,
)

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}


def answer(num_tokens: int) -> Trajectory:
    return Trajectory(
        prompt_id="",
        group_id=0,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.arange(num_tokens) >= num_tokens // 2,
        logprobs=np.zeros(num_tokens, np.float32),
        policy_versions=np.zeros(num_tokens, np.int32),
    )


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    write_tiny_model(tmp_path / "model", ["1+1=211"], seed=0, context_length=64)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "pairs.jsonl")},
    }


def problems(kind: type[StageConfig], tree: dict[str, Any], **sections: Any) -> list[str]:
    return check_run(make_config(kind, tree | sections))


@pytest.mark.parametrize("kind", [RmConfig, DpoConfig])
def test_valid_config_has_no_problems(kind, tree):
    assert problems(kind, tree) == []


def test_bad_rows_of_both_files_and_a_small_batch_are_reported_together(tree, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps(PAIR | {"rejected": "2"}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR | {"margin": "wide"}) + "\n")
    data = {"path": str(tmp_path / "pairs.jsonl"), "eval_path": str(tmp_path / "held.jsonl")}
    batch, first, second = problems(
        RmConfig, tree, data=data, trainer={"batch_size": 1}, placement={"slots_per_node": 2}
    )
    assert batch.startswith("trainer.batch_size: needs at least one pair per data-parallel rank, got 1 < dp = ")
    assert first.startswith(f"data.path: {tmp_path}/pairs.jsonl:1: field 'margin'")
    assert second.startswith(f"data.eval_path: {tmp_path}/held.jsonl:1: fields 'chosen'")


def test_safety_labels_are_checked_only_for_cost_models(tree, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR | {"chosen_safe": "yes", "rejected_safe": False}) + "\n")
    assert problems(RmConfig, tree) == []
    (problem,) = problems(RmConfig, tree, rm={"kind": "cost"})
    assert "'chosen_safe' (data.fields.chosen_safe) needs true or false, got 'yes'" in problem


def test_reference_needs_the_same_vocabulary_and_a_valid_layout(tree, tmp_path):
    write_tiny_model(tmp_path / "other", ["1+1=211"], seed=0, vocab_size=300)
    reference = {"path": str(tmp_path / "other"), "parallel": {"tp": 3}}
    found = problems(DpoConfig, tree, dpo={"reference": reference}, placement={"slots_per_node": 3})
    assert any(problem.startswith("dpo.reference.parallel.tp: ") for problem in found), found
    assert found[-1] == "dpo.reference.path: needs the vocabulary of model.path, got 300 tokens, model.path has 384"
    (missing,) = problems(DpoConfig, tree, dpo={"reference": {"path": str(tmp_path / "none")}})
    assert missing.startswith("dpo.reference.path: needs a folder in Hugging Face format")


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        (DpoConfig, {"dpo": {"reference": {"parallel": {"tp": 2}}}}, "dpo: reference.parallel needs reference.path"),
        (RmConfig, {"trainer": {"offload": {"weights": True}}}, "trainer.offload: only train has engines"),
        (RmConfig, {"rm": {"kind": "price"}}, "rm.kind: Input should be 'reward' or 'cost', got 'price'"),
        (DpoConfig, {"dpo": {"beta": 0}}, "dpo.beta: Input should be greater than 0, got 0"),
    ],
)
def test_invalid_values_are_rejected(kind, sections, message, tree):
    with pytest.raises(ConfigError, match=message):
        make_config(kind, tree | sections)


def test_reference_path_is_made_absolute(tree):
    config = with_absolute_paths(make_config(DpoConfig, tree | {"dpo": {"reference": {"path": "some/model"}}}))
    assert config.dpo.reference.path == str(Path.cwd() / "some/model")


def test_tie_counts_as_half_a_pair():
    assert preference_accuracy([(1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (2.0, 1.0)]) == 0.625


def test_pair_scalars_mark_unsafe_answers():
    pair = PreferencePair(chosen=answer(4), rejected=answer(5), margin=0.5)
    assert make_pair_scalars(pair) == ({"margins": 0.5}, {"margins": 0.5})
    chosen, rejected = make_pair_scalars(replace(pair, safe=(True, False)))
    assert (chosen, rejected) == ({"margins": 0.5, "signs": -1.0}, {"margins": 0.5, "signs": 1.0})


def test_forward_requests_contain_every_answer_in_order():
    model: Any = SimpleNamespace(group=SimpleNamespace(put=LocalPayload), grid=RankGrid(dp=2))
    answers = [answer(n) for n in range(10, 60)]
    chunks = list(iter_forward_requests(answers, model, max_tokens=20))
    assert len(chunks) > 2
    assert [a for chunk in chunks for a in chunk.payloads[0].fetch()] == answers
    for chunk in chunks:
        lengths = [a.num_tokens for a in chunk.payloads[0].fetch()]
        assert [(ref.key, ref.num_tokens) for ref in chunk.samples] == [((0, i), n) for i, n in enumerate(lengths)]
        # without the last answer, a chunk fits into full micro-batches on both replicas
        assert sum(lengths[:-1]) < 2 * 16 * 20
    assert list(iter_forward_requests([], model, max_tokens=20)) == []


@pytest.mark.parametrize(("steps", "used"), [(2, 6), (4, 10)])
def test_select_rows_covers_all_rows_that_are_sampled(steps, used, tree):
    config = make_config(DpoConfig, tree | {"trainer": {"steps": steps, "batch_size": 3}, "seed": 5})
    rows = select_rows(config, 10)
    assert len(rows) == used
    assert set(rows) >= set(PromptSampler(PromptOrder(10, 5, shuffle=True)).take(3 * steps))


def test_answer_logprob_excludes_the_prompt():
    assert sum_answer_logprobs(answer(4), np.array([0, -1, -2, -4], np.float32)) == -6
