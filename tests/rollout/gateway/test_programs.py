"""Commands and functions as harnesses: their task, their failures, and processes that must not survive."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megarl.config.harness import HarnessConfig
from megarl.config.rollout import RolloutConfig
from megarl.errors import ConfigError
from megarl.rollout.engine import Generation, GenerationRequest
from megarl.rollout.environments.environment import Task
from megarl.rollout.gateway import harness_agent
from megarl.rollout.gateway.program import check_harness
from tests.rollout.clock import iterate, jump
from tests.rollout.gateway.clients import ask_raw
from tests.rollout.gateway.scripted import SeededEngine, logged_ids, make_agent, make_prompt, run_groups, sampled_ids
from tests.time_limits import UNREACHED_SECONDS

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, "model": os.environ["OPENAI_MODEL"]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""


def run_script(
    tokenizer: Any, script: str, *, num_samples: int = 1, max_new_tokens: int = 1000, **config: Any
) -> tuple[SeededEngine, Any, Any]:
    engine = SeededEngine(tokenizer)
    command = [sys.executable, "-c", ASK + textwrap.dedent(script)]
    agent = make_agent(tokenizer, None, command=command, **config)
    ((summary, trajectories),) = run_groups(
        engine, agent, [make_prompt(tokenizer)], num_samples=num_samples, max_new_tokens=max_new_tokens
    )
    return engine, summary, trajectories


def test_a_command_gets_its_task_and_may_return_a_reward(tokenizer: Any, tmp_path: Path) -> None:
    engine, summary, trajectories = run_script(
        tokenizer,
        f"""
        reply = ask(task["messages"])
        ask([*task["messages"], reply, {{"role": "user", "content": "why?"}}])
        variables = {{key for key in os.environ if key.startswith("RAY_") or key == "PYTHONPATH"}}
        found = {{**task, "variables": sorted(variables), "mine": os.environ["MINE"]}}
        json.dump(found, open({str(tmp_path / "task.json")!r}, "w"))
        json.dump({{"reward": 0.25}}, open(os.environ["RESULT_FILE"], "w"))
        """,
        kwargs={"depth": 2},
        env={"MINE": "5"},
        needs_reward=True,
    )
    task = json.loads((tmp_path / "task.json").read_text())
    assert task.pop("seed") >= 0
    assert task == {
        "prompt_id": "d.jsonl:1",
        "messages": [{"role": "user", "content": "is it?"}],
        "row": {"prompt": "is it?"},  # not the answer
        "kwargs": {"depth": 2},
        "variables": [],
        "mine": "5",
    }
    assert summary.trajectories[0].reward == 0.25
    assert trajectories[0].turn_rewards == (0.0, 0.25)
    assert sampled_ids(trajectories) == logged_ids(engine)


FAILURES = {
    "exit code": ("ask(task['messages']); print('no disk'); sys.exit(3)", "ended with exit code 3: no disk"),
    "death": ("ask(task['messages']); os.kill(os.getpid(), 9)", "ended with exit code -9"),
    "hang": ("import time; time.sleep(6000)", "did not end and asked for no further turn within"),
    "no request": ("pass", "ended without a request to the policy"),
    "no reward": ("ask(task['messages'])", "needs to return a reward for the term of type environment, got none"),
    "bad reward": (
        "ask(task['messages']); open(os.environ['RESULT_FILE'], 'w').write('{\"reward\": NaN}')",
        "needs to return a finite reward, or none, got nan",
    ),
    "refused": ("ask([{'role': 'user'}, 3])", "(its last refused request: a message needs a role, got 3)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_fails_twice_is_left_out_and_never_a_reward_of_0(
    tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, message = FAILURES[name]
    limits = {}
    if name == "hang":
        monkeypatch.setattr(harness_agent, "END_SECONDS", 0.1)
        limits["max_seconds"] = 0.1
    _, summary, (trajectory,) = run_script(tokenizer, script, needs_reward=name == "no reward", **limits)
    assert message in trajectory.reward_errors["environment"]
    assert not trajectory.loss_mask.any()
    assert summary.kept == ()
    assert summary.terms["environment"].num_retried == 1  # asked again once


def test_a_program_that_fails_once_is_repeated(tokenizer: Any, tmp_path: Path) -> None:
    mark = tmp_path / "failed"
    engine, summary, trajectories = run_script(
        tokenizer,
        f"""
        ask(task["messages"])
        if not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, "w").close()
            sys.exit(1)
        """,
    )
    assert summary.kept == (0,)
    assert len(engine.log) == 2
    assert sampled_ids(trajectories) == [engine.log[1][1].token_ids.tolist()]  # nothing of the first attempt


def test_a_program_that_fails_after_a_limit_is_truncated(tokenizer: Any) -> None:
    script = "for n in range(9): ask([{'role': 'user', 'content': str(n)}])"
    _, summary, _ = run_script(tokenizer, script, max_turns=2)
    assert summary.trajectories[0].finish_reason == "turns"
    assert summary.kept == (0,)


def test_no_process_of_a_program_survives_its_episode(tokenizer: Any, tmp_path: Path) -> None:
    _, summary, _ = run_script(
        tokenizer,
        f"""
        import subprocess
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)  # {tmp_path}"
        sleep = [sys.executable, "-c", code]
        subprocess.Popen(sleep, env={{}})  # in the group of the program
        subprocess.Popen(sleep, start_new_session=True)  # a daemon
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                import time; time.sleep(3600)
            os._exit(0)
        ask(task["messages"])
        print(os.environ["OPENAI_API_KEY"])
        """,
    )
    assert summary.kept == (0,)
    assert not list(_with_command(str(tmp_path)))


def _with_command(text: str) -> Iterator[str]:
    """Yield the processes whose command line has the text."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if text.encode() in (folder / "cmdline").read_bytes():
                yield folder.name


async def hang_for_ever(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))
    jump(3 * UNREACHED_SECONDS)
    await asyncio.sleep(1e6)


async def raise_an_error(task: Task, base_url: str, api_key: str) -> None:
    await ask_raw(base_url, api_key, list(task.messages))
    raise RuntimeError("no such tool")


@pytest.mark.parametrize(("function", "message"), [(hang_for_ever, "did not end"), (raise_an_error, "no such tool")])
def test_functions_fail_as_commands_do(tokenizer: Any, function: Any, message: str) -> None:
    agent = make_agent(tokenizer, function)
    ((_, (trajectory,)),) = run_groups(SeededEngine(tokenizer), agent, [make_prompt(tokenizer)])
    assert message in trajectory.reward_errors["environment"]


class LateEngine(SeededEngine):
    """The time of an episode is over while a request is in flight."""

    async def generate(self, request: GenerationRequest) -> Generation:
        jump(3 * UNREACHED_SECONDS)
        await iterate()
        return await super().generate(request)


def test_a_turn_that_is_sampled_when_the_time_is_over_is_trained(tokenizer: Any) -> None:
    engine = LateEngine(tokenizer)
    agent = make_agent(tokenizer, hang_for_ever)
    ((summary, trajectories),) = run_groups(engine, agent, [make_prompt(tokenizer)])
    assert summary.trajectories[0].finish_reason == "seconds"
    assert sampled_ids(trajectories) == logged_ids(engine)


running: Counter[str] = Counter()


async def count_programs(task: Task, base_url: str, api_key: str) -> None:
    running["now"] += 1
    running["most"] = max(running["most"], running["now"])
    await ask_raw(base_url, api_key, list(task.messages))
    running["now"] -= 1


def test_no_more_programs_run_at_once_than_allowed(tokenizer: Any) -> None:
    running.clear()
    agent = make_agent(tokenizer, count_programs, max_programs=2)
    run_groups(SeededEngine(tokenizer), agent, [make_prompt(tokenizer, number) for number in range(6)])
    assert running == {"now": 0, "most": 2}


def not_async(task: Task, base_url: str, api_key: str) -> None: ...


async def takes_too_little(task: Task) -> None: ...


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"command": ["no-such-program-1"]}, "rollout.harness.command: the program 'no-such-program-1' was not found"),
        ({"path": f"{__name__}:not_async"}, "rollout.harness.path needs an async function, got"),
        ({"path": f"{__name__}:takes_too_little"}, "needs to take task, base_url, api_key and rollout.harness.kwargs"),
        ({"path": f"{__name__}:hang_for_ever", "kwargs": {"a": 1}}, "got an unexpected keyword argument 'a'"),
        ({"path": f"{__name__}:hang_for_ever", "tool_parser": "qwen99"}, "rollout.harness.tool_parser needs one of"),
        ({"path": f"{__name__}:hang_for_ever", "reasoning_parser": "no"}, "reasoning_parser needs one of"),
    ],
)
def test_programs_are_checked_before_the_run(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_harness(HarnessConfig(**section))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "command and path: one of them names the program, got neither"),
        ({"command": ["ls"], "path": "a:b"}, "command and path: one of them names the program, got both"),
        ({"command": []}, "command needs a program, got an empty list"),
        ({"path": "a:b", "env": {"A": "1"}}, "env belongs to a command, got it with path = a:b; remove it"),
    ],
)
def test_sections_name_one_program(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HarnessConfig(**section)


def test_one_of_agent_environment_and_harness_runs_an_episode() -> None:
    message = r"harness: one of agent, env and harness runs an episode, got harness \(a:b\) and env.path = c:D"
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate({"harness": {"path": "a:b"}, "env": {"path": "c:D"}})
