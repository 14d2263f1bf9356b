"""Messages between host and runner, and what a runner imports before it answers."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from megarl.sandbox.fork_server_client import PACKAGES, python_path
from megarl.sandbox.guest.channel import LENGTH, encode_reply, encode_request, read_request, write_reply
from megarl.sandbox.session import ReplyBuffer

REPLY = {"text": 'a"\\\n\x00\x7fß\u2028😀\ud800', "": "", "yes": True, "no": False, "n": -3, "s": 0.1, "small": 1e-9}


def test_replies_are_json():
    assert json.loads(encode_reply(REPLY)) == REPLY
    assert json.loads(encode_reply({})) == {}


def test_replies_arrive_in_pieces():
    read, write = os.pipe()
    for reply in (REPLY, {"ready": True}):
        write_reply(write, reply)
    os.close(write)
    with open(read, "rb") as file:
        data = file.read()
    buffer, found = ReplyBuffer(1000), []
    for i in range(len(data)):
        buffer.add(data[i : i + 1])
        while (reply := buffer.next()) is not None:
            found.append(reply)
    assert found == [REPLY, {"ready": True}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"x" * 101, "a reply needs to have at most 100 bytes, got 101"),
        (b"[1]", "a reply needs to be a JSON object, got list"),
        (b"{1}", "Expecting property name"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_what_is_no_reply_is_refused(body, message):
    buffer = ReplyBuffer(100)
    buffer.add(LENGTH.pack(len(body)) + body)
    with pytest.raises(ValueError, match=message):
        buffer.next()


def test_requests_arrive_as_they_were():
    request = {"kind": "cases", "source": "\ud800\x00", "cases": [{"stdin": "x" * 200_000}, {"call": "f()"}], "n": None}
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        data = memoryview(encode_request(request))
        while data:
            data = data[os.write(write, data) :]
        os._exit(0)
    os.close(write)
    assert read_request(read) == request
    assert read_request(read) is None
    os.waitpid(pid, 0)
    os.close(read)


def test_a_runner_imports_little():
    """Most of the CPU time of a program in bubblewrap is the start of its Python; these modules would double it."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); import megarl.sandbox.guest.runner; print(*sys.modules)"
    command = [python_path(), "-s", "-S", "-P", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"json", "re", "ast", "traceback", "threading", "typing", "dataclasses", "subprocess"} & set(found)
    assert "megarl.errors" not in found
