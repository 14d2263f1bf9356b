"""Every algorithm learns arithmetic, starting from a model that ends most answers too early, and so does the demo.

Faster: `test_train.py` checks that a policy learns, `test_multi_turn.py` that one of its own runs.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.tokenizer import load_tokenizer
from tests.end_to_end.launched import gained, run_to_end

pytestmark = pytest.mark.slow
EXAMPLE = str(Path(__file__).parents[2] / "examples/custom-algorithm")
STEPS = 20
CRITIC_LR = "algorithm.critic.optimizer.lr=1e-3"
PLAIN = "grpo dr_grpo rloo gspo cispo gmpo dapo reinforce_pp reinforce_pp_baseline remax"
SETTINGS = {
    **{kind: [] for kind in PLAIN.split()},
    "ppo": [CRITIC_LR],
    "pf_ppo": [CRITIC_LR],
    # completions have about ten tokens, for which the default, meant for thousands, makes lambda 0
    "vapo": [CRITIC_LR, "algorithm.pretraining.max_steps=5", "algorithm.length_alpha=1.0"],
    "prime": ["algorithm.reward_model.optimizer.lr=1e-4"],
}
CUSTOM = "my_algorithm:SoftClip"
"""The algorithm of examples/custom-algorithm, outside the package."""
SETTINGS[CUSTOM] = ["algorithm.steepness=2.0"]
MARGIN = 0.05
"""Smallest increase of strict accuracy from the mean of the first 5 steps to that of the last 5."""


@pytest.fixture(autouse=True)
def _importable_example(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", EXAMPLE, prepend=":")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Create the demo's data and fine-tuned model; return their folder."""
    folder = tmp_path_factory.mktemp("demo")
    run_to_end(folder, "demo", "--data-only", "--out", folder / "demo")
    places = [f"data.path={folder}/demo/data/sft.jsonl", f"model.path={folder}/demo/base", f"run_dir={folder}/sft"]
    run_to_end(folder, "sft", "yaml/demo-sft.yaml", "--set", *places, "trainer.steps=200")
    return folder


def train(demo, folder, kind, *settings):
    folder.mkdir(exist_ok=True)
    places = [f"data.path={demo}/demo/data/train.jsonl", "data.eval_path=null", f"model.path={demo}/sft/model"]
    algorithm = f"algorithm={{type: {kind}, prompts_per_step: 32, group_size: 8, num_mini_batches: 2}}"
    changes = (*places, f"run_dir={folder}/run", algorithm, f"trainer.steps={STEPS}", *settings)
    run_to_end(folder, "train", "yaml/demo.yaml", "--set", *changes)
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "reward/mean" in row]


@pytest.mark.parametrize("kind", SETTINGS)
def test_accuracy_rises(kind, demo, tmp_path):
    steps = train(demo, tmp_path, kind, *SETTINGS[kind])
    # includes the groups that dynamic sampling discards
    assert gained([step.get("reward/sampled_mean", step["reward/accuracy"]) for step in steps]) > MARGIN


def write_verl(folder, rows):
    """Write rows as verl's Parquet files have them."""
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "reward_model": {"ground_truth": row["answer"]}}
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_slime(folder, rows):
    """Write rows as slime's JSONL files have them."""
    rows = [{"prompt": row["prompt"], "label": row["answer"], "metadata": {"level": 1}} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("write", [write_verl, write_slime])
def test_rewards_count_on_files_of_other_trainers(write, demo, tmp_path):
    tokenizer = load_tokenizer(demo / "sft/model")
    tokenizer.chat_template = "{{ messages[0].content }}"
    shutil.copytree(demo / "sft/model", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (demo / "demo/data/train.jsonl").read_text().splitlines()]
    changes = (f"data.path={write(tmp_path, rows)}", f"model.path={tmp_path}/model", "trainer.steps=2")
    steps = train(demo, tmp_path, "grpo", *changes)
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["reward/accuracy"] < 1
        assert step["loss"] != 0


def test_distillation_reduces_divergence_from_the_teacher(demo, tmp_path):
    train(demo, tmp_path / "teacher", "grpo", "trainer.steps=40")
    teacher = f"algorithm.teacher.path={tmp_path}/teacher/run/model"
    steps = train(demo, tmp_path / "student", "distillation", teacher)
    assert gained([step["reward/accuracy"] for step in steps]) > MARGIN
    divergence = [step["distillation/reverse_kl"] for step in steps]
    assert sum(divergence[-5:]) < 0.5 * sum(divergence[:5])


def test_safe_rlhf_keeps_cost_below_its_limit_while_reward_rises(demo, tmp_path):
    """The cost is a false equation, which solutions in two steps make likely: without a limit it exceeds 0.28."""
    limit = 0.2
    steps = train(
        demo,
        tmp_path,
        "safe_rlhf",
        CRITIC_LR,
        "algorithm.cost_critic.optimizer.lr=1e-3",
        f"algorithm.cost_limit={limit}",
        "algorithm.multiplier_lr=1.0",
        "reward.terms.cost={type: python, path: 'tests.end_to_end.rewards:false_equation'}",
        "trainer.steps=40",
    )
    assert gained([step["reward/accuracy"] for step in steps]) > MARGIN
    costs = [step["reward/cost"] for step in steps]
    assert sum(costs[-10:]) / 10 < limit + 0.04


RANDOM_REWARD = (
    "reward.terms={random: {type: python, path: 'tests.end_to_end.rewards:random'}, "
    "accuracy: {type: numeric, strict: true, weight: 0.0}}"
)


def run_demo(folder, *arguments):
    run_to_end(folder, "demo", "--out", folder / "demo", *arguments)
    return json.loads((folder / "demo/summary.json").read_text())


def test_accuracy_rises_by_a_quarter(tmp_path):
    summary = run_demo(tmp_path, "--seed", "11")
    assert summary["eval_after"] - summary["eval_before"] >= 0.25
    assert summary["logprob_abs_max"] <= 1e-4


def test_accuracy_does_not_rise_with_random_rewards(tmp_path):
    summary = run_demo(tmp_path, "--set", RANDOM_REWARD, "reward.eval_term=accuracy")
    assert summary["eval_after"] - summary["eval_before"] <= 0.1
