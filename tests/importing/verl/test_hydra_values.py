"""Values of Hydra's overrides: expectations from Hydra's documentation of its grammar and of OmegaConf's resolvers."""

import pytest

from megarl.importing.verl.hydra_values import parse_value, resolve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("True", True),
        ("false", False),
        ("12", 12),
        ("-1", -1),
        ("1_000", 1000),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("0.", 0.0),
        ("abc", "abc"),
        ("", ""),
        ("a b", "a b"),
        ("'12'", "12"),
        ('"it\'s"', "it's"),
        (r"'it\'s'", "it's"),
        ("[]", []),
        ("[1, a,'b, c',[2]]", [1, "a", "b, c", [2]]),
        ('["console","wandb"]', ["console", "wandb"]),
        ("{a: 1,b:{c: [x]}}", {"a": 1, "b": {"c": ["x"]}}),
        ("/path/with:colon,and,commas", "/path/with:colon,and,commas"),
        ("['${a.b}/x', ${oc.env:X,y}]", ["${a.b}/x", "${oc.env:X,y}"]),
        ("0.5_5.0", "0.5_5.0"),
    ],
)
def test_values(text, value):
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize("text", ["[1", "{a:1", "{a}", "'x", "['a' b]"])
def test_what_is_not_closed_is_refused(text):
    with pytest.raises(ValueError, match=r"closed|closing|needs key"):
        parse_value(text)


KEYS = {"a.b": 4, "a.text": "t", "c": "${a.b}", "loop": "${loop}", "list": [1, 2]}


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("${a.b}", 4),
        ("${c}", 4),
        ("x-${a.b}-${a.text}", "x-4-t"),
        ("${.text}", "t"),
        ("${oc.select:a.none,7}", 7),
        ("${oc.select:a.b,7}", 4),
        ("${oc.env:NOT_LOOKED_UP,/default}", "/default"),
        ("${list}", [1, 2]),
        (["${a.b}", {"k": "${c}"}], [4, {"k": 4}]),
        (3, 3),
    ],
)
def test_interpolations(value, resolved):
    assert resolve(value, KEYS.get, "a") == resolved


@pytest.mark.parametrize("value", ["${oc.env:X}", "${none.such}", "${now:%Y}", "${loop}"])
def test_interpolations_without_a_value_that_could_be_known(value):
    with pytest.raises(LookupError):
        resolve(value, KEYS.get, "a")
