"""What runs inside a sandbox: messages to the host, imports of the runner, and the filter of system calls.

The filter is compared with an interpreter of its instructions, and its numbers with the kernel's headers.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest

from megarl.sandbox.guest.channel import LENGTH, encode_reply, encode_request, read_request, write_reply
from megarl.sandbox.guest.seccomp import (
    ALLOW,
    AUDIT_ARCH,
    ENOSYS,
    EPERM,
    KILL,
    allowed_calls,
    build_filter,
    other_calls,
)
from megarl.sandbox.session import PACKAGES, ReplyBuffer, python_path
from tests.errors import expect_error

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
MACHINES = sorted(HEADERS)
CONDITIONAL = ("clone", "prctl", "ioctl", "socketpair", "prlimit64", "setpriority")
"""Calls that are allowed with some arguments."""


def decide(program: bytes, number: int, arguments: tuple[int, ...] = (), *, arch: int) -> int:
    """Return what the kernel would: the classic BPF instructions that <linux/filter.h> defines, on `seccomp_data`."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *(0,) * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("=HBBI", program))
    position, register = 0, 0
    while True:
        code, if_true, if_false, constant = instructions[position]
        position += 1
        match code:
            case 0x20:
                register = struct.unpack_from("=I", data, constant)[0]
            case 0x15:
                position += if_true if register == constant else if_false
            case 0x35:
                position += if_true if register >= constant else if_false
            case 0x45:
                position += if_true if register & constant else if_false
            case 0x06:
                return constant
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("machine", MACHINES)
def test_allows_its_calls_and_no_others(machine):
    program, arch = build_filter(machine), AUDIT_ARCH[machine]
    conditional = {allowed_calls(machine)[name] for name in CONDITIONAL}
    allowed = set(allowed_calls(machine).values())
    for number in range(1000):
        if number == other_calls(machine)["clone3"]:
            assert decide(program, number, arch=arch) == ENOSYS
        elif number not in conditional:
            assert decide(program, number, arch=arch) == (ALLOW if number in allowed else EPERM)
    assert decide(program, 0, arch=0x40000003) == KILL  # calls of 32-bit x86
    if machine == "x86_64":
        assert decide(program, 0x40000000 | 39, arch=arch) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_looks_at_arguments(machine):
    program, arch, calls = build_filter(machine), AUDIT_ARCH[machine], allowed_calls(machine)

    def of(name: str, *arguments: int) -> int:
        return decide(program, calls[name], arguments, arch=arch)

    assert of("clone", 0x01200011) == ALLOW  # fork
    assert of("clone", 0x003D0F00) == ALLOW  # a thread
    for namespace in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert of("clone", namespace | 17) == EPERM
    assert (of("socketpair", 1), of("socketpair", 2)) == (ALLOW, EPERM)
    assert (of("ioctl", 0, 0x5401), of("ioctl", 0, 0x5412)) == (ALLOW, EPERM)  # TIOCSTI
    assert [of("prlimit64", pid) for pid in (0, 1, 2)] == [ALLOW, EPERM, EPERM]
    assert [of("setpriority", *which) for which in ((0, 0), (0, 1), (1, 0), (2, 0))] == [ALLOW, EPERM, EPERM, EPERM]
    assert [of("prctl", option) for option in (15, 22, 4)] == [ALLOW, EPERM, EPERM]  # SET_SECCOMP, SET_DUMPABLE


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernel(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    found = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    found.setdefault("newfstatat", found.get("fstatat", -1))
    for name, number in (allowed_calls(machine) | other_calls(machine)).items():
        assert found.get(name, number) == number, name


def test_needs_a_known_architecture():
    with expect_error(OSError, "x86_64", "aarch64", "riscv64"):
        build_filter("riscv64")


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
