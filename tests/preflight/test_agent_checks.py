"""What runs an episode, and the settings that need an environment or a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.preflight.agent_checks import find_agent_problems
from megarl.sandbox import tiers
from tests.rollout.environments.chat_templates import STRIPS_THOUGHTS, chat_tokenizer
from tests.run.finished_groups import run_config

CALCULATOR = {"path": "megarl.rollout.environments.calculator:Calculator"}
GAME = {"terms": {"game": {"type": "environment"}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models: `chat`, `plain` without a chat template, and `thoughts`, whose template strips thoughts."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("chat", "plain", "thoughts"):
        write_tiny_model(folder / name, ["some text"], seed=0, chat=name == "chat")
    chat_tokenizer(STRIPS_THOUGHTS).save_pretrained(folder / "thoughts")
    return folder


def problems(folder: Path, *, env: dict[str, Any] | None = CALCULATOR, **sections: Any) -> list[str]:
    tree = {"model": {"path": str(folder)}, "reward": GAME, "rollout": {"env": env}} | sections
    return list(find_agent_problems(run_config(tree.pop("algorithm", {"type": "grpo"}), **tree)))


def test_an_environment_with_a_chat_template_has_no_problems(models: Path) -> None:
    assert problems(models / "chat") == []
    assert problems(models / "chat", algorithm={"type": "gspo", "advantages_per": "turn"}) == []
    assert problems(models / "thoughts", env={**CALCULATOR, "forks": "allow"}) == []


def test_a_sandbox_that_an_environment_needs_is_checked(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def python(**sandbox: Any) -> dict[str, Any]:
        path = "megarl.rollout.environments.python_interpreter:PythonInterpreter"
        return {"path": path, "kwargs": {"sandbox": sandbox}}

    monkeypatch.setattr(tiers, "find_tier_problem", lambda tier: None if tier == "bubblewrap" else "not installed")
    assert problems(models / "chat", env=python()) == []
    (unknown,) = problems(models / "chat", env=python(wall=1))
    assert unknown == "rollout.env.kwargs.sandbox.wall: Extra inputs are not permitted"
    (missing,) = problems(models / "chat", env=python(tier="launcher"))
    assert missing.startswith(
        "rollout.env.kwargs.sandbox needs a sandbox that works on this machine, or allow_unsafe: "
    )
    assert missing.endswith("got none (launcher: not installed)")


def test_each_setting_that_cannot_work_is_one_sentence(models: Path) -> None:
    (missing,) = problems(models / "plain")
    assert missing.startswith("rollout.env needs a tokenizer with a chat template, that of ")
    (rewriting,) = problems(models / "thoughts")
    assert rewriting.startswith("rollout.env.forks: forbid needs a chat template that only appends to a conversation")
    (forks,) = problems(models / "chat", env={**CALCULATOR, "forks": "allow"}, algorithm={"type": "gspo"})
    assert forks == (
        "rollout.env.forks needs to be forbid, got allow: algorithm.type: gspo computes importance ratios over whole "
        "sequences"
    )
    (unused,) = problems(models / "chat", env=None)
    assert unused == (
        "reward.terms.game is of type environment, which needs rollout.env, or an agent or harness that gives rewards "
        "of turns"
    )
    (turns,) = problems(
        models / "chat",
        algorithm={"type": "grpo", "advantages_per": "turn"},
        reward={"terms": {"match": {"type": "numeric"}}},
    )
    assert turns == (
        "algorithm.advantages_per: turn needs a term of type environment in reward.terms, which adds up the rewards of "
        "turns, got match"
    )
    (path,) = problems(models / "chat", env={"path": "nowhere:Nothing"})
    assert path.startswith("rollout.env.path: cannot import nowhere")
    (never,) = problems(models / "chat", data={"path": "d.jsonl", "chat_template": "never"})
    assert never == "rollout.env needs a chat template, got data.chat_template: never"


def test_environments_of_sources_are_named_by_their_keys(models: Path) -> None:
    def sources(**games: Any) -> dict[str, Any]:
        plain = {"path": "a.jsonl", "ratio": 0.5, "reward_terms": ["match"]}
        return {"sources": {"math": plain, "games": {"path": "b.jsonl", "ratio": 0.5, "env": CALCULATOR, **games}}}

    reward = {"terms": {"match": {"type": "numeric"}, **GAME["terms"]}}
    assert problems(models / "chat", env=None, data=sources(), reward=reward) == []
    (path,) = problems(models / "chat", env=None, data=sources(env={"path": "nowhere:Nothing"}), reward=reward)
    assert path.startswith("data.sources.games.env.path: cannot import nowhere")
    (never,) = problems(models / "chat", env=None, data=sources(chat_template="never"), reward=reward)
    assert never == "data.sources.games.env needs a chat template, got data.sources.games.chat_template: never"
    (missing,) = problems(models / "plain", env=None, data=sources(), reward=reward)
    assert missing.startswith("data.sources.games.env needs a tokenizer with a chat template, that of ")


def test_each_setting_of_a_harness_that_cannot_work_is_one_sentence(models: Path) -> None:
    def found(model: str, algorithm: str = "grpo", **harness: Any) -> list[str]:
        sections = {"rollout": {"harness": {"command": ["python3"], **harness}}, "algorithm": {"type": algorithm}}
        return problems(models / model, **sections)

    assert found("chat") == found("thoughts") == found("chat", "gspo", forks="forbid") == []
    (missing,) = found("plain")
    assert missing.startswith("rollout.harness needs a tokenizer with a chat template, that of ")
    (forks,) = found("chat", "gspo")
    assert forks.startswith("rollout.harness.forks needs to be forbid, got allow: algorithm.type: gspo computes")
    (rewriting,) = found("thoughts", forks="forbid")
    assert rewriting.startswith("rollout.harness.forks: forbid needs a chat template that only appends")
    (program,) = found("chat", command=["no-such-program-1"])
    assert program == "rollout.harness.command: the program 'no-such-program-1' was not found on this node"
