"""The benchmark of codes of changed elements: sizes against arithmetic, and decoding, with and without zstd."""

import json
import math
import sys
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.reshard import changed_weights
from benchmarks.reshard.changed_weights import CODECS, PIECES, code_bytes, entropy_bytes, main

BOX = 2**19
"""Elements of a box of 1 MiB."""
UNCOMPRESSED = ["megarl", "verl: indices"]
CASES = {
    "none": [],
    "one": [70_000],
    "first and last": [0, BOX - 1],
    "runs": [*range(5, 900), *range(65_530, 65_540)],
    "all": list(range(BOX)),
    "many": list(range(3, BOX, 7)),
}


@pytest.fixture
def no_zstd(monkeypatch):
    monkeypatch.setattr(changed_weights, "find_spec", lambda _: None)


@pytest.fixture
def zlib_as_zstd(monkeypatch):
    """A package zstandard that compresses with zlib."""
    module = SimpleNamespace(
        ZstdCompressor=lambda *, level: SimpleNamespace(compress=lambda data: zlib.compress(data, level)),
        ZstdDecompressor=lambda: SimpleNamespace(decompress=zlib.decompress),
    )
    monkeypatch.setitem(sys.modules, "zstandard", module)
    monkeypatch.setattr(changed_weights, "find_spec", lambda _: module)


def weights(places: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and their base, which differ in the low byte at even places, in both bytes at odd ones."""
    base = np.random.default_rng(0).integers(-(2**15), 2**15, BOX, dtype=np.int16)
    flips = np.zeros(BOX, np.int16)
    flips[places] = np.where(np.array(places, dtype=int) % 2, 0x0101, 1)
    return base ^ flips, base


def expected_bytes(name: str, places: list[int]) -> int:
    """Return the size of a code before zstd, with all sums written out."""
    changed, blocks = len(places), BOX // 65_536
    longest = max(after - before - 1 for before, after in zip([-1, *places], places, strict=False)) if places else 0
    return {
        "megarl": min(4 * blocks + 4 * changed, BOX // 8 + 2 * changed, 2 * BOX),
        "verl: indices": 6 * changed,
        "NeMo-RL: xor + zstd": changed * ((2 if longest < 65_536 else 4) + 2),
        "slime, Miles: xor + zstd": 2 * BOX,
        "slime, Miles: overwrite + zstd": 4 + 5 * sum(1 + place % 2 for place in places),
    }[name.replace("megarl + zstd", "megarl")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CODECS)
def test_codes_have_the_documented_size(name, case):
    now, base = weights(CASES[case])
    untouched = base.copy()
    size = code_bytes(CODECS[name], now, base, None)  # decodes, and compares
    whole = name.startswith("megarl") and case == "all"
    assert size == (2 * BOX if whole else expected_bytes(name, CASES[case]) if CASES[case] else 0)
    assert np.array_equal(base, untouched)


@pytest.mark.parametrize("name", CODECS)
def test_code_that_restores_other_weights_is_an_error(name):
    now, base = weights(CASES["runs"])
    codec, other = CODECS[name], np.where(now != base, now ^ 0x4000, now)
    broken = replace(codec, encode=lambda *_: codec.encode(other, base))
    wrong = f"restores {len(CASES['runs'])} of {BOX} elements wrongly"
    with pytest.raises(RuntimeError, match=wrong):
        code_bytes(broken, now, base, None)


def test_entropy_is_that_of_places_and_differences():
    base = np.zeros(1000, np.int16)
    now = base.copy()
    now[:250] = [-1, 1, 1, 1, 2] * 50
    places = 1000 * (2 / 4 + 3 / 4 * math.log2(4 / 3))
    differences = 250 * (2 / 5 * math.log2(5) + 3 / 5 * math.log2(5 / 3))
    assert entropy_bytes(now, base) == pytest.approx((places + differences) / 8)


def reports(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main(["--lr", "1e-7", "1e-5", "--steps=2", "--mib=1", "--boxes=2", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_has_shares_that_follow_from_the_changed_elements(capsys, zlib_as_zstd):
    found = reports(capsys)
    assert [(each["lr"], each["step"]) for each in found] == [(1e-7, 1), (1e-7, 2), (1e-5, 1), (1e-5, 2)]
    for report in found:
        share, sent = report["changed_elements"], report["codecs"]
        assert list(sent) == list(CODECS)
        assert sent["verl: indices"] == pytest.approx(3 * share)
        places, bitmap = 4 * 8 / (2 * BOX) + 2 * share, 1 / 16 + share
        assert sent["megarl"] == pytest.approx(min(places, bitmap))
        assert list(report["pieces"]) == [str(size) for size in PIECES]
        assert share < report["pieces"]["1024"] <= report["pieces"]["262144"] == 1
        assert report["entropy"] < min(sent["megarl"], sent["NeMo-RL: xor + zstd"])
        assert sent["NeMo-RL: xor + zstd"] < 2 * share
        assert report["zstd_seconds_per_gib"].keys() == {name for name, codec in CODECS.items() if codec.zstd}
    assert found[0]["changed_elements"] < found[2]["changed_elements"]


def test_codecs_that_need_zstd_are_left_out_without_it(capsys, no_zstd):
    assert main(["--lr=1e-6", "--steps=1", "--mib=1", "--boxes=1"]) == 0
    out, err = capsys.readouterr()
    assert err == (
        "The package zstandard is not installed; codecs left out: megarl + zstd; NeMo-RL: xor + zstd; "
        "slime, Miles: xor + zstd; slime, Miles: overwrite + zstd.\n"
    )
    assert all(name in out for name in UNCOMPRESSED)
    assert "NeMo-RL" not in out
    (report,) = reports(capsys)[:1]
    assert list(report["codecs"]) == UNCOMPRESSED
    assert report["zstd_seconds_per_gib"] == {}
