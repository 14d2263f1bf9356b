"""Passes boxes to the engine rank on the same slot: offsets are sent once, at connect, then a signal per round.

    trainer rank (BoxSender)                            engine rank (BoxReceiver)
    offer        slots of all rounds, in shared memory --> connect: reads them               once
    wait_ready                           "ready" <-------- the engine has stopped generating every sync
    select_boxes "some boxes come, listed there" --------> reads the list          every sync that leaves out boxes
    load_boxes   "round 7 is in this bucket" ------------> copies its boxes into parameters  every round
                                        "copied" <-------- the bucket may be overwritten

The two are connected by a Unix socket, which shows at once when the process at the other end has died. A receiver that
fails, dies or stalls ends neither the sender nor the other trainer ranks: the sender drops the boxes from then on and
reports it after the sync.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Ints
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, Bucket, SharedBuffer, map_bucket, no_wait

POLL_SECONDS = 0.1
"""How often a wait looks for an abort."""

MESSAGE_BYTES = 4096
"""Longest message; a path of GPU memory takes some hundreds of bytes."""

CODE_COLUMNS = 4
"""Columns of a list of codes: round, slot, number of changed elements, and offset in the bucket."""

_READY, _COPIED, _FAILED = b"=", b"+", b"-"
"""First byte of a receiver's message; after `_FAILED` comes the reason."""

_CREDENTIALS = struct.Struct("3i")
"""Result of SO_PEERCRED: pid, user and group of the process at the other end (unix(7))."""


@dataclass(frozen=True, slots=True)
class BoxOffer:
    """What an engine rank needs to receive from its trainer rank; plain data."""

    sender: str
    """Name of the trainer rank in messages."""
    address: str
    """Name of the trainer rank's socket in Linux's abstract namespace: no file is left behind."""
    path: str
    """Opens the slots of all rounds, see `encode_slots`, as long as the trainer rank offers them."""
    num_bytes: int
    """Size of the encoded slots in bytes."""

    def read_slots(self) -> list[list[BoxSlot]]:
        """Return the slots of each round; raises OSError if the trainer rank no longer offers them."""
        return decode_slots(map_bucket(Bucket(self.path, self.num_bytes)).numpy().tobytes())


class BoxSender:
    """A `ShardSink` for an engine rank in another process on the same node."""

    def __init__(
        self,
        name: str,
        receiver: str,
        rounds: Sequence[Sequence[BoxSlot]],
        stall_seconds: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Offer the boxes of a plan.

        Args:
            name: name of this trainer rank in messages.
            receiver: name of the engine rank in messages.
            rounds: the slots of each round's bucket.
            stall_seconds: a receiver that takes longer for a round counts as lost.
            check: called while waiting; what it raises ends the wait.
        """
        self._receiver, self._check = receiver, check
        self.stall_seconds = stall_seconds
        """Maximum seconds for a round, from the next wait on."""
        encoded = encode_slots(rounds)
        self._plan = _share(encoded)
        address = f"megarl-weights-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{address}")
        self._listener.listen()
        self._listener.setblocking(False)
        self._codes: SharedBuffer | None = None
        """The list of the latest `expect_codes`."""
        self._connection: socket.socket | None = None
        self._num_sent = self._num_copied = 0
        self._is_ready = False
        self.failure = ""
        """Why the receiver has not received all boxes of the latest sync; empty if it has."""
        self.offer = BoxOffer(name, address, self._plan.path, len(encoded))

    def begin(self) -> None:
        """Prepare for a sync, with the engine process that has connected last."""
        self.failure, self._is_ready = "", False
        while (connection := _accept(self._listener)) is not None:
            self._disconnect()
            self._connection, self._num_sent, self._num_copied = connection, 0, 0
        if self._connection is None:
            self.failure = f"{self._receiver} has not connected"

    def wait_ready(self, seconds: float) -> None:
        """Wait until the engine receives boxes; what takes longer counts as failed.

        Engines that generate complete their step first. No other rank waits for this one meanwhile: the sync that
        heartbeats watch, and the stall time of rounds, begin after it.
        """
        self._wait(lambda: self._is_ready, f"did not begin to receive weights within {seconds:g} s", seconds)

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """List the codes that come in this sync, as `CodeSink.expect_codes`."""
        if self._codes is not None:
            self._codes.close()
        lines = [np.insert(of_round, 0, index, axis=1) for index, of_round in enumerate(rounds)]
        encoded = np.concatenate([np.zeros((0, CODE_COLUMNS), np.int64), *lines]).tobytes()
        self._codes = _share(encoded)
        self._send({"codes": self._codes.path, "num_bytes": len(encoded)})

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Signal that the boxes of round `index` are in the bucket; the returned function waits until they are copied.

        If the receiver fails, the boxes are dropped and `failure` is set.
        """
        if bucket is None or self._connection is None:
            return no_wait
        if not self._send({"round": index, "path": bucket.path, "num_bytes": bucket.num_bytes}):
            return no_wait
        self._num_sent += 1
        number = self._num_sent
        return lambda: self._wait(
            lambda: self._num_copied >= number,
            f"did not copy its weights within {self.stall_seconds:g} s",
            self.stall_seconds,
        )

    def close(self) -> None:
        """Close the connection and withdraw the offer."""
        self._disconnect()
        self._listener.close()
        self._plan.close()
        if self._codes is not None:
            self._codes.close()

    def _send(self, message: dict[str, str | int]) -> bool:
        """Send a message; return False if the receiver has failed, in this message or before."""
        if self._connection is None:
            return False
        try:
            self._connection.send(json.dumps(message).encode())
        except OSError as e:
            self._fail(f"{self._receiver} has closed its connection ({e.strerror})")
            return False
        return True

    def _wait(self, is_done: Callable[[], bool], problem: str, seconds: float) -> None:
        """Wait for messages until `is_done`, or the receiver has failed, at the latest after `seconds` by `problem`."""
        end = time.monotonic() + seconds
        while self._connection is not None and not is_done():
            message = _receive(self._connection, end, self._check)
            if message is None:
                self._fail(f"{self._receiver} {problem}")
            elif not message:
                self._fail(f"{self._receiver} has closed its connection")
            elif message[:1] == _FAILED:
                self._fail(f"{self._receiver}: {message[1:].decode()}")
            elif message == _READY:
                self._is_ready = True
            else:
                self._num_copied += 1

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class BoxReceiver:
    """An engine rank's end of the connection; a failed sync closes it."""

    def __init__(self, offer: BoxOffer) -> None:
        """Connect; raises WeightSyncError if the trainer rank no longer offers its boxes."""
        self.sender = offer.sender
        self._connection: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect(f"\0{offer.address}")
        except OSError as e:
            self.close()
            raise WeightSyncError(f"{offer.sender} does not accept connections ({e.strerror})") from e
        if owner_of(self._connection) != os.getuid():
            self.close()
            raise WeightSyncError(f"the socket of {offer.sender} belongs to another user")

    @property
    def is_connected(self) -> bool:
        """Whether no sync has failed since the connection was made."""
        return self._connection is not None

    def receive(self, index: int, seconds: float, check: Callable[[], None]) -> BoxBucket:
        """Wait for round `index`; return its bucket, without slots.

        Args:
            seconds: longest wait; a trainer rank that has failed or is late raises WeightSyncError.
            check: called while waiting; what it raises ends the wait.
        """
        fields = self._next(f"round {index} of the weights", seconds, check)
        if fields.get("round") != index:
            came = f"round {fields['round']}" if "round" in fields else "a list of codes"
            raise WeightSyncError(f"{came} came from {self.sender} instead of round {index}")
        return Bucket(fields["path"], fields["num_bytes"])

    def receive_codes(self, seconds: float, check: Callable[[], None]) -> Ints:
        """Wait for the list of the codes that come in this sync; arguments and errors as for `receive`.

        Returns:
            int64 [n, CODE_COLUMNS]: the round of each code, and the columns of `CodedRound.lines`.
        """
        fields = self._next("the list of codes of changed weights", seconds, check)
        if "codes" not in fields:
            raise WeightSyncError(f"round {fields['round']} came from {self.sender} instead of a list of codes")
        data = map_bucket(Bucket(fields["codes"], fields["num_bytes"]))
        return np.frombuffer(data.numpy().tobytes(), np.int64).reshape(-1, CODE_COLUMNS)

    def _next(self, what: str, seconds: float, check: Callable[[], None]) -> dict[str, Any]:
        """Return the next message; `what`: its name in errors."""
        assert self._connection is not None, "the connection was closed when a sync failed"
        message = _receive(self._connection, time.monotonic() + seconds, check)
        if message is None:
            raise WeightSyncError(f"{what} did not come from {self.sender} in {seconds:g} s")
        if not message:
            raise WeightSyncError(f"{self.sender} has aborted the sync, or has ended")
        fields: dict[str, Any] = json.loads(message)
        return fields

    def report_ready(self) -> None:
        """Tell the trainer rank that this rank receives boxes from now on."""
        self._send(_READY)

    def acknowledge(self) -> None:
        """Tell the trainer rank that the bucket of the latest round may be overwritten."""
        self._send(_COPIED)

    def fail(self, reason: str) -> None:
        """Tell the trainer rank that the sync has failed, and close the connection."""
        self._send(_FAILED + reason.encode()[: MESSAGE_BYTES - 1])
        self.close()

    def close(self) -> None:
        """Close the connection, which ends the trainer rank's waits."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, message: bytes) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except OSError:  # the next `receive` reports it
                return


def _share(content: bytes) -> SharedBuffer:
    buffer = SharedBuffer(len(content))
    buffer.bytes[: len(content)].numpy()[:] = np.frombuffer(content, np.uint8)
    return buffer


def encode_slots(rounds: Sequence[Sequence[BoxSlot]]) -> bytes:
    """Encode the slots of each round's bucket, with each name once: 100,000 slots have some hundreds of names."""
    numbers = dict[str, int]()

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    encoded = [
        [(number(slot.local), slot.local_box, number(slot.dtype), slot.offset) for slot in slots] for slots in rounds
    ]
    return json.dumps([list(numbers), encoded]).encode()


def decode_slots(encoded: bytes) -> list[list[BoxSlot]]:
    """Decode what `encode_slots` returns."""
    names, rounds = json.loads(encoded)
    return [
        [BoxSlot(names[local], tuple(map(tuple, box)), names[dtype], offset) for local, box, dtype, offset in slots]
        for slots in rounds
    ]


def _accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection of a process of this user; None if there is none."""
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return None
        if owner_of(connection) == os.getuid():
            return connection
        connection.close()


def owner_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _receive(connection: socket.socket, end: float, check: Callable[[], None]) -> bytes | None:
    """Return the next message; None if none came until `end`, empty if the other end is closed.

    Args:
        end: by `time.monotonic`.
        check: called while waiting; what it raises ends the wait.
    """
    connection.settimeout(POLL_SECONDS)
    while True:
        check()
        try:
            return connection.recv(MESSAGE_BYTES)
        except TimeoutError:
            if time.monotonic() > end:
                return None
        except ConnectionResetError:
            return b""
