"""The agent that lets a program run episodes through the gateway."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from megarl.batch.trajectory import TIME_LIMIT, Trajectory
from megarl.config.data import DataConfig
from megarl.config.rollout import HarnessConfig
from megarl.rollout.agents.episode import Episode
from megarl.rollout.environments.conversation import EnvironmentFailedError, make_renderers
from megarl.rollout.environments.environment import Task, Tasks
from megarl.rollout.gateway.harness_process import HARNESS, check_harness, run_command, run_function
from megarl.rollout.gateway.reply_parser import PlainTextParser, ReplyParser, SglangParser
from megarl.rollout.gateway.server import GatewayServer
from megarl.rollout.gateway.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""How long a program may continue after a limit has ended its episode."""


class HarnessAgent:
    """Runs the program of `rollout.harness` once for each episode; an agent, as `rollout.agent` names one."""

    def __init__(
        self,
        config: HarnessConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        refuses_forks: str | None = None,
        needs_reward: bool = False,
        parser: ReplyParser | None = None,
    ) -> None:
        """Check the program and the chat template.

        Args:
            refuses_forks: why the algorithm cannot train on forked segments; None: it can.
            needs_reward: the program needs to return a reward.
            parser: splits replies; None: those of SGLang that the configuration names.

        Raises:
            ConfigError: as `check_harness`.
            DataError: as `require_chat_template`.
        """
        self._renderers = make_renderers(data, tokenizer, config, refuses_forks=refuses_forks, key=HARNESS)
        self._config, self._function, self._needs_reward = config, check_harness(config), needs_reward
        self._answer_field = None if config.include_answer else data.fields.answer
        self._tasks = Tasks(data, tokenizer)
        if config.tool_parser is not None and not all(each.writes_tools for each in self._renderers.values()):
            logger.warning(
                "%s.tool_parser: the chat template of %s does not write definitions of tools, so that the policy does "
                "not see those that the program sends",
                HARNESS,
                tokenizer.name_or_path or "this model",
            )
        self._parser = parser or _make_parser(config)
        self._can_call = parser is not None or config.tool_parser is not None
        self._server = GatewayServer(tokenizer, host=config.host)
        self._slots = asyncio.Semaphore(config.max_programs)

    async def close(self) -> None:
        """Stop the server and the parsers."""
        await self._server.close()
        await self._parser.close()

    async def __call__(self, episode: Episode) -> list[Trajectory]:
        """Run one episode and return its trajectories.

        Raises:
            EnvironmentFailedError: the program failed, hung, or asked for no turn.
            EngineFailedError: as `Episode.generate`.
        """
        episode.end_by_itself()
        async with self._slots:
            await self._server.start()
            renderer = self._renderers[episode.prompt.source]
            session = Session(episode, self._config, renderer, self._parser, can_call=self._can_call)
            try:
                with self._server.serve(session) as (base_url, api_key):
                    reward = await self._run(episode, session, base_url, api_key)
            finally:
                await session.close()
        return session.trajectories(reward)

    async def _run(self, episode: Episode, session: Session, base_url: str, api_key: str) -> float | None:
        """Run the program until it ends, a limit has ended the episode, or an engine fails; return its reward."""
        program = asyncio.ensure_future(self._start(self._tasks.of(episode), base_url, api_key))
        over = asyncio.ensure_future(_is_over(session, episode))
        try:
            try:
                async with episode.clock.timeout(self._config.max_seconds + END_SECONDS):
                    ends: list[asyncio.Future[Any]] = [program, over, session.error]
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            except TimeoutError:
                await self._end_by_time(session)
            if session.error.done():
                session.error.result()
            if not program.done():
                return None
            try:
                reward = program.result()
            except EnvironmentFailedError as e:
                if session.ending is not None:  # programs fail when their requests are refused
                    return None
                refused = f" (its last refused request: {session.last_refusal})" if session.last_refusal else ""
                raise EnvironmentFailedError(f"{e}{refused}") from e
        finally:
            over.cancel()
            program.cancel()
            await asyncio.gather(program, over, return_exceptions=True)
        if session.ending is None:
            self._require_result(session, reward)
        return reward

    async def _end_by_time(self, session: Session) -> None:
        """End an episode whose time is over; a turn that is being sampled is finished.

        Raises:
            EnvironmentFailedError: the program did not wait for the policy.
        """
        in_flight = session.in_flight
        if session.ending is None and not in_flight:
            raise EnvironmentFailedError(
                f"{HARNESS} ({self._config.label}) did not end and asked for no further turn within "
                f"{self._config.max_seconds:g} s (rollout.harness.max_seconds)"
            )
        session.end(TIME_LIMIT)
        if in_flight:
            await asyncio.wait(in_flight)

    def _require_result(self, session: Session, reward: float | None) -> None:
        if not session.num_turns:
            raise EnvironmentFailedError(f"{HARNESS} ({self._config.label}) ended without a request to the policy")
        if self._needs_reward and reward is None:
            raise EnvironmentFailedError(
                f"{HARNESS} ({self._config.label}) needs to return a reward for the term of type environment, got none"
            )

    async def _start(self, task: Task, base_url: str, api_key: str) -> float | None:
        if self._function is not None:
            return await run_function(self._function, self._config, task, base_url, api_key)
        row = {key: value for key, value in task.prompt.row.items() if key != self._answer_field}
        described: dict[str, Any] = {
            "prompt_id": task.prompt.prompt_id,
            "messages": list(task.messages),
            "tools": list(task.tools),
            "seed": task.seed,
            "row": row,
        }
        return await run_command(self._config, described, base_url, api_key, self._config.host)


async def _is_over(session: Session, episode: Episode) -> None:
    """Return once a program should have ended after a limit; turns that the time limit ends are finished before."""
    await session.limit_reached.wait()
    if episode.limit_reached.done() and session.in_flight:
        await asyncio.wait(session.in_flight)
    await asyncio.sleep(END_SECONDS)


def _make_parser(config: HarnessConfig) -> ReplyParser:
    if config.tool_parser is None and config.reasoning_parser is None:
        return PlainTextParser()
    return SglangParser(tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)
