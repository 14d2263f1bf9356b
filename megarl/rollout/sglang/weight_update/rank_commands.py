"""Sends commands to the TP ranks of an engine, reads their replies, and keeps track of whether any may have written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.errors import WeightSyncError
from megarl.rollout.sglang.weight_update.control_calls import ControlCalls
from megarl.rollout.sglang.weight_update.messages import WRITING, Command, Reply
from megarl.rollout.sglang.weight_update.rank_files import find_unresponsive, reply_prefix

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine_host import EngineHost
    from megarl.rollout.sglang.request_runner import RequestRunner


class RankCommands:
    """The commands of an engine's weight updates."""

    def __init__(self, host: EngineHost, requests: RequestRunner) -> None:
        self._host, self._tp = host, host.spec.tp
        self.calls = ControlCalls(host, requests)
        self.one_at_a_time = asyncio.Lock()
        """Serializes commands: with two in flight, it would be unknown what the engine holds."""
        self.is_mixed = False
        """The engine may hold parts of two versions."""
        self._count = 0

    def for_all(self, command: Command) -> list[Command]:
        """Return the same command for every TP rank."""
        return [command] * self._tp

    async def execute(self, commands: Sequence[Command], what: str, extra_seconds: float = 0.0) -> list[Reply]:
        """Have every TP rank execute its command inside of an update; the caller holds `one_at_a_time`.

        Args:
            commands: one per TP rank.
            what: name of the commands in error messages.
            extra_seconds: additional timeout, for waits for other processes than the engine's.

        Raises:
            WeightSyncError: a rank refused, failed or did not answer in time.
        """
        self._count += 1
        number, folders = self._count, await self._host.folders()
        writes, was_mixed = commands[0]["op"] in WRITING, self.is_mixed
        self.is_mixed |= writes  # until every rank has replied that it wrote nothing; a late rank may still write
        sglang_error = await self.calls.send(
            [{**command, "reply": reply_prefix(f, number)} for command, f in zip(commands, folders, strict=True)],
            what=what,
            unresponsive=lambda: self._unresponsive(number),
            extra_seconds=extra_seconds,
        )
        errors = [] if sglang_error is None else [sglang_error]
        replies, wrote = [], False
        for rank, reply in enumerate(await self._host.take_replies(number)):
            if reply is None:
                errors.append(f"TP rank {rank} did not reply")
            elif reply.error is not None:
                errors.append(f"TP rank {rank}: {reply.error}")
            else:
                replies.append(reply)
            wrote |= reply is None or reply.wrote
        self.is_mixed = was_mixed or (writes and wrote)
        if errors:
            raise WeightSyncError("; ".join(errors))
        return replies

    async def query(
        self, commands: Sequence[Command], *, in_update: bool, what: str = "", extra_seconds: float = 0.0
    ) -> list[Reply]:
        """Execute commands that write nothing; arguments and errors as for `execute`.

        Args:
            in_update: whether an update is open; if not, the commands run such that SGLang processes no weights.
        """
        what = what or f"the command `{commands[0]['op']}`"
        async with self.one_at_a_time:
            if in_update:
                return await self.execute(commands, what, extra_seconds)
            await self.calls.begin(reads_only=True)
            try:
                return await self.execute(commands, what, extra_seconds)
            finally:
                if not self.calls.has_pending:
                    await self.calls.end()

    async def _unresponsive(self, number: int) -> list[int]:
        return find_unresponsive(await self._host.reply_states(number))
