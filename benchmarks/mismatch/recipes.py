"""The recipes of the repository, scaled down where they need GPUs or a large model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_EVALUATION: dict[str, object] = {"data.eval_path": "null"}

SMALL_STEPS: dict[str, object] = {"algorithm.prompts_per_step": 8, "algorithm.group_size": 4} | NO_EVALUATION

FROM_DEMO: dict[str, object] = {"model.path": "runs/demo/sft/model"}

TINY_GSM8K: dict[str, object] = {
    "model.path": "runs/gsm8k-laptop/sft/model",
    "data.system_prompt": "null",
    "data.prompt_template": '"{prompt}\\n"',
    "algorithm.group_size": 4,
    "algorithm.prompts_per_step": 8,
    "rollout.max_new_tokens": 96,
    "rollout.replicas": 1,
    "rollout.workers": 1,
    "placement.slots_per_node": 2,
} | NO_EVALUATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A configuration file, and what differs from it."""

    file: str
    """Relative to the repository."""
    command: str = "train"
    steps: int | None = 40
    """None: as in the file, because other recipes need the model."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    difference: str = ""
    """What the overrides change, in words."""
    needs: str = ""
    """Option of the benchmark without which the recipe is left out."""


RECIPES = (
    Recipe(file="yaml/demo-sft.yaml", command="sft", steps=None),
    Recipe(file="yaml/demo.yaml"),
    Recipe(file="yaml/demo-async.yaml", overrides=SMALL_STEPS, difference="8 prompts of 4 samples"),
    Recipe(
        file="yaml/demo-disaggregated.yaml",
        overrides=SMALL_STEPS | {"placement.slots_per_node": 1},
        difference="8 prompts of 4 samples, one trainer rank",
    ),
    Recipe(
        file="yaml/demo-2node.yaml",
        overrides={"placement.nodes": 1, "placement.slots_per_node": 2},
        difference="two slots of one node",
    ),
    Recipe(file="examples/custom-agent/agent.yaml", overrides=SMALL_STEPS, difference="8 prompts of 4 samples"),
    Recipe(file="examples/custom-engine/engine.yaml", steps=None),
    Recipe(file="examples/custom-family/train.yaml", steps=None),
    Recipe(file="examples/custom-algorithm/demo.yaml", overrides=SMALL_STEPS, difference="8 prompts of 4 samples"),
    Recipe(file="examples/nested-algorithm/demo.yaml", overrides=SMALL_STEPS, difference="8 prompts of 4 samples"),
    Recipe(file="examples/custom-reward/demo.yaml", overrides=SMALL_STEPS, difference="8 prompts of 4 samples"),
    Recipe(file="examples/reward-model-ppo/sft.yaml", command="sft"),
    Recipe(
        file="examples/reward-model-ppo/rm.yaml",
        command="rm",
        overrides=FROM_DEMO,
        difference="the model of demo-sft.yaml",
    ),
    Recipe(
        file="examples/reward-model-ppo/ppo.yaml",
        overrides=FROM_DEMO | SMALL_STEPS,
        difference="the model of demo-sft.yaml, 8 prompts of 4 samples",
    ),
    Recipe(file="examples/two-policies/sft.yaml", command="sft", steps=None),
    Recipe(file="examples/two-policies/train.yaml", steps=None),
    Recipe(file="yaml/agents/calculator-sft.yaml", command="sft", steps=None),
    Recipe(file="yaml/agents/calculator.yaml", overrides=NO_EVALUATION, steps=10),
    Recipe(file="yaml/agents/guess-sft.yaml", command="sft", steps=None),
    Recipe(file="yaml/agents/guess.yaml", overrides=NO_EVALUATION, steps=10),
    Recipe(file="yaml/agents/python-sft.yaml", command="sft", steps=None),
    Recipe(file="yaml/agents/python.yaml", overrides=NO_EVALUATION, steps=10),
    Recipe(file="yaml/agents/search-sft.yaml", command="sft", steps=None),
    Recipe(file="yaml/agents/search.yaml", overrides=NO_EVALUATION, steps=10),
    Recipe(file="yaml/agents/http-sft.yaml", command="sft", steps=None),
    Recipe(file="yaml/agents/http.yaml", overrides=NO_EVALUATION, steps=10, needs="http_api"),
    Recipe(file="examples/gateway/sft.yaml", command="sft", steps=None),
    Recipe(file="examples/gateway/train.yaml", overrides=NO_EVALUATION, steps=10, needs="openai_agents"),
    Recipe(
        file="examples/gsm8k-grpo/laptop-sft.yaml",
        command="sft",
        overrides={"trainer.batch_size": 8},
        difference="batches of 8",
        needs="gsm8k",
    ),
    Recipe(
        file="examples/gsm8k-grpo/laptop.yaml",
        overrides={"algorithm.group_size": 4, "rollout.max_new_tokens": 96} | NO_EVALUATION,
        difference="8 prompts of 4 samples of 96 tokens",
        needs="gsm8k",
    ),
    Recipe(
        file="examples/gsm8k-grpo/gpu.yaml",
        overrides=TINY_GSM8K,
        difference="the model of laptop-sft.yaml, 8 prompts of 4 samples of 96 tokens, one engine, two slots",
        needs="gsm8k",
    ),
    Recipe(
        file="examples/two-node-slurm/train.yaml",
        overrides=TINY_GSM8K | {"trainer.parallel.tp": 2, "placement.nodes": 1},
        difference="the same, with tp 2 in trainer and engine",
        needs="gsm8k",
    ),
    Recipe(
        file="examples/real-model/train.yaml",
        overrides={"algorithm.prompts_per_step": 1} | NO_EVALUATION,
        difference="one prompt of 8 samples",
        needs="real_model",
    ),
)
"""In an order in which each finds the model that it starts from."""
