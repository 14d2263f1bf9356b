"""Two policies trained against each other: a proposer poses problems on which a solver fails, and the solver learns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megarl import rl

PROBLEM = re.compile(r"([1-9])([+-])([1-9])")


class TwoPoliciesConfig(rl.GrpoConfig):
    """The section `algorithm`: that of GRPO, for both policies; `model.path` is the solver."""

    proposer: rl.TrainedModelConfig = rl.TrainedModelConfig()
    """The policy that poses problems. Default: it begins as the solver does."""
    train_proposer: bool = True
    """Whether the proposer learns."""
    train_solver: bool = True
    """Whether the solver learns."""

    def models(self) -> tuple[rl.ModelUse, ...]:
        proposer = rl.ModelUse(name="proposer", field="proposer", section=self.proposer)
        return (*super().models(), proposer)


def is_problem(trajectory: object, text: str, row: object) -> float:
    """Return 1 if the proposer has written a problem, such as `7-9`: the reward term `form`."""
    del trajectory, row
    return float(PROBLEM.fullmatch(text.strip()) is not None)


class TwoPolicies(rl.Algorithm[TwoPoliciesConfig]):
    Config = TwoPoliciesConfig

    def train(self, run: rl.RLRun, config: TwoPoliciesConfig) -> None:
        model = run.config.model
        tokenizer = rl.load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        loss, outputs = rl.ClippedLoss.of(config), rl.group_outputs(config)
        run.begin()
        for prompts in run.steps():
            run.serve("proposer")
            proposals = run.sample(prompts)
            texts = [
                tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in proposals.fetch_sampled_tokens()
            ]
            problems = sorted({text for text in texts if PROBLEM.fullmatch(text)})
            if not problems:
                run.notify(f"step {run.step}: no completion of the proposer is a problem")
                run.finish_step(proposals, None)
                continue
            run.serve("policy")
            answers = run.sample([solver_prompt(tokenizer, problem) for problem in problems], attempt=1)
            accuracies = dict(zip(problems, group_means(answers), strict=True))
            proposals.add_to_rewards("difficulty", [1 - accuracies.get(text, 1.0) for text in texts])
            posed = [text for text in texts if text in accuracies]
            run.add_metrics(
                {
                    "proposer/valid": len(posed) / len(texts),
                    "proposer/subtractions": sum("-" in text for text in posed) / len(posed),
                    "solver/accuracy_on_posed": sum(accuracies[text] for text in posed) / len(posed),
                }
            )
            if config.train_proposer:
                run.estimate(rl.group_estimates, proposals, config, 0.0, outputs=outputs)
                run.train_model(proposals, "proposer", run.policy_loss(loss))
            run.estimate(rl.group_estimates, answers, config, 0.0, outputs=outputs)
            run.finish_step(answers, run.train_policy(answers, loss) if config.train_solver else None)


def solver_prompt(tokenizer: PreTrainedTokenizerBase, problem: str) -> rl.Prompt:
    """Return the solver's prompt for a problem, which the term `accuracy` scores."""
    found = PROBLEM.fullmatch(problem)
    assert found is not None
    a, b = int(found[1]), int(found[3])
    answer, text = str(a + b if found[2] == "+" else a - b), f"{problem}\n"
    return rl.Prompt(
        prompt_id=problem,
        text=text,
        token_ids=tuple(tokenizer.encode(text)),
        row={"prompt": text, "answer": answer},
        answer=answer,
        reward_terms=("accuracy",),
    )


def group_means(batch: rl.RolloutBatch) -> Sequence[float]:
    """Return the mean reward of each group."""
    rewards: dict[int, list[float]] = {}
    for group, reward in zip(batch.group_ids, batch.rewards, strict=True):
        rewards.setdefault(group, []).append(reward)
    return [sum(of_group) / len(of_group) for of_group in rewards.values()]
