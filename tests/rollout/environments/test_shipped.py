"""The environments that ship: games and arithmetic, a Python interpreter, and a search."""

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from rank_bm25 import BM25Okapi

from megarl.errors import AgentError, SandboxError
from megarl.rollout.environments import python_interpreter
from megarl.rollout.environments.calculator import Calculator, ExpressionError, compute
from megarl.rollout.environments.environment import Step
from megarl.rollout.environments.guess import Guess
from megarl.rollout.environments.python_interpreter import PythonInterpreter
from megarl.rollout.environments.search import Bm25, Search, normalize, words
from megarl.sandbox.guest.channel import Limits
from megarl.sandbox.tiers import LocalSandbox
from tests.errors import expect_error
from tests.rollout.environments.scripted import make_task
from tests.sandbox.local_tiers import PATIENT, best_tier, patience


def random_expression(rng: random.Random, depth: int = 0) -> str:
    if depth == 4 or rng.random() < 0.3:
        return str(rng.randint(0, 99))
    left, right = (random_expression(rng, depth + 1) for _ in range(2))
    text = f"{left}{rng.choice([' ', ''])}{rng.choice('+-*/')}{right}"
    return rng.choice([text, f"({text})", f"-({text})"])


def test_expressions_have_the_values_that_python_gives_them() -> None:
    rng, num_values = random.Random(0), 0
    for _ in range(3000):
        text = random_expression(rng)
        try:
            got = compute(text)
        except ExpressionError:
            continue
        num_values += 1
        assert got == eval(text.replace("/", "//")) == pytest.approx(eval(text))
    assert num_values > 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unexpected end"),
        ("2+", "unexpected end"),
        ("2 3", "unexpected '3'"),
        ("2**3", r"unexpected '\*'"),
        ("abs(2)", "unexpected 'a'"),
        ("(2", "not closed"),
        ("1/0", "division by zero"),
        ("7/2", "7 / 2 is no integer"),
        ("9" * 31, "at most 30 digits"),
        ("9" * 20 + "*" + "9" * 20, "at most 30 digits"),
        ("1+" * 60 + "1", "at most 100 characters, got 121"),
        ("(" * 20 + "1" + ")" * 20, "nested more than 10 times"),
        ("-" * 99 + "1", "nested more than 10 times"),
    ],
)
def test_other_texts_have_no_value(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        compute(text)


def begin(environment: Any, answer: str | None) -> Any:
    environment.reset(make_task(answer))
    return environment


def test_the_calculator_answers_calls_and_rewards_the_answer() -> None:
    calculator = begin(Calculator(), "777")
    assert calculator.step("calc(7 * (100 + 11))") == Step(messages=[{"role": "tool", "content": "777"}], num_calls=1)
    assert calculator.step("calc(7 +)").messages == [{"role": "tool", "content": "error: unexpected end"}]
    assert calculator.step("so it is #### 777\n") == Step(reward=1.0, done=True)
    assert begin(Calculator(), "777").step("#### 77") == Step(reward=0.0, done=True)
    assert begin(Calculator(), "777").step("777") == Step(reward=0.0, done=True)
    assert begin(Calculator(), "-5").step("#### -5").reward == 1.0
    with expect_error(ValueError, "p:1", "answer"):
        begin(Calculator(), None)


def test_the_game_gives_hints_and_its_reward_at_the_end() -> None:
    game = begin(Guess(max_guesses=3), "5")
    assert game.step("3") == Step(messages=[{"role": "user", "content": "higher"}])
    assert game.step("I guess 6.") == Step(messages=[{"role": "user", "content": "lower"}])
    assert game.step("5") == Step(reward=1.0, done=True)
    lost = begin(Guess(max_guesses=1), "5")
    assert lost.step("4") == Step(reward=0.0, done=True)
    assert begin(Guess(), "5").step("no idea") == Step(reward=0.0, done=True)
    with expect_error(ValueError, "'five'", "integer", "answer"):
        begin(Guess(), "five")


CONTEXT = [["Ada Lovelace", ["Ada was a mathematician.", " She wrote notes."]], ["Lund", ["Lund is a city in Sweden."]]]
HOTPOT_ROW = {
    "_id": "5a",
    "question": "In which country is Lund?",
    "answer": "Sweden",
    "type": "bridge",
    "level": "easy",
    "supporting_facts": [["Lund", 0]],
    "context": CONTEXT,
}
HUB_ROW = HOTPOT_ROW | {
    "context": {"title": [title for title, _ in CONTEXT], "sentences": [sentences for _, sentences in CONTEXT]},
    "supporting_facts": {"title": ["Lund"], "sent_id": [0]},
}


def content(step: Step) -> str:
    (message,) = step.messages
    assert (message["role"], step.num_calls, step.done) == ("tool", 1, False)
    return str(message["content"])


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with patience():
        yield


def python(answer: str = "42", **limits: Any) -> Any:
    """Return a context manager with the environment in an episode; its sandbox is the best of this machine."""
    return closing(begin(PythonInterpreter(sandbox={"allow_unsafe": True, **PATIENT, **limits}), answer))


def test_python_keeps_variables_and_scores_answers() -> None:
    with python(output_kib=1) as env:
        assert content(env.step("I define x.\n```python\nx = 40\n```")) == "(no output)"
        assert content(env.step("```\nx + 2\n```")) == "42"
        assert content(env.step("```py\nprint('a')\nx / 0\n```")) == "a\nZeroDivisionError: division by zero"
        assert len(content(env.step("```\nprint('x' * 100000)\n```"))) <= 1025
        assert env.step("So it is #### 42") == Step(reward=1.0, done=True)


def test_python_ends_code_that_takes_too_long() -> None:
    with python(wall_seconds=0.2) as env:
        for _ in range(2):
            assert "took too long; variables are lost" in content(env.step("```\nwhile True: pass\n```"))


ENDED = "error: the interpreter has ended; variables are lost"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("", "(no output)"),
        ("x = '\x00'", "SyntaxError: source code string cannot contain null bytes"),
        ("import os\nos.write(1, b'\\xff\\n')", "\ufffd\n2"),
        ("import sys\nsys.stdout.close()", ENDED),
        ("import os\nos._exit(0)", ENDED),
        ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'2 ok')\n    except OSError: pass", ENDED),
    ],
)
def test_python_tells_how_code_has_ended(code: str, text: str) -> None:
    with python() as env:
        env.step("```\nx = 1\n```")
        assert content(env.step(f"```\n{code}\n```")) == text
        after = content(env.step("```\nx\n```"))
        assert after == ("NameError: name 'x' is not defined" if text == ENDED else "1")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("```Python\nprint(2)\n```", "2"),
        ("```python\r\nprint(3)\r\n```", "3"),
        ("```PY\nprint(4)\n```\nwhich prints\n```\n5\n```", "4"),
        ("```python\nprint(6)\nexit()\nprint(7)\n```", "6"),
        ("```python\nimport sys\nsys.exit('stop')\n```", "stop"),
        ("```python\nprint(help)\n```", "Type help() for interactive help, or help(object) for help about object."),
        ("```python\nimport os, signal\nos.kill(1, signal.SIGINT)\n```", "(no output)"),
        ("```python\ndef f(a: int): pass\nprint(f.__annotations__)\n```", "{'a': <class 'int'>}"),
    ],
)
def test_python_reads_code_as_policies_write_it(reply: str, text: str) -> None:
    if "os.kill" in reply and best_tier() == "unsafe":
        pytest.skip("needs a sandbox: the code signals the first process")
    with python() as env:
        assert content(env.step(reply)) == text
        assert content(env.step("```\nprint(1)\n```")) == "1"


def test_python_goes_on_in_a_new_sandbox_when_code_has_ended_its_own(monkeypatch) -> None:
    monkeypatch.setattr(
        python_interpreter, "open_sandbox", lambda config, key: LocalSandbox("unsafe", Limits(**PATIENT))
    )
    with python() as env:
        for _ in range(2):
            assert content(env.step("```\nx = 1\nx\n```")) == "1"
            assert content(env.step("```\nimport os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n```")) == ENDED
            assert content(env.step("```\nx\n```")) == "NameError: name 'x' is not defined"
        assert env.step("#### 42").reward == 1.0


@pytest.mark.parametrize("reply", ["#### 41", "42", "no code"])
def test_python_gives_no_reward_for_other_answers(reply: str) -> None:
    with python() as env:
        assert env.step(reply) == Step(reward=0.0, done=True)


def test_python_never_sees_the_answer() -> None:
    found = "text = repr(sys.modules) + str(vars(sys.modules['__main__'])) + str(dict(os.environ)) + str(sys.argv)"
    frames = "frame = sys._getframe()\nwhile frame:\n    text += str(frame.f_locals)\n    frame = frame.f_back"
    code = f"import os, sys\n{found}\n{frames}\nprint(text.count(str(48610 + 1)), len(text) > 1000)"
    with python("48611") as env:
        assert content(env.step(f"```\n{code}\n```")) == "0 True"


def test_a_sandbox_that_cannot_start_fails_the_episode(monkeypatch) -> None:
    class Broken(LocalSandbox):
        def open_interpreter(self):
            raise SandboxError("cannot start a sandbox of tier launcher: no memory")

    monkeypatch.setattr(python_interpreter, "open_sandbox", lambda config, key: Broken("launcher", Limits()))
    env = begin(PythonInterpreter(), "1")
    with expect_error(SandboxError, "cannot", "start"):
        env.step("```\n1\n```")
    env.close()
    with expect_error(AgentError, "rollout.env.kwargs.sandbox.wall", "Extra"):
        PythonInterpreter(sandbox={"wall": 1})


@pytest.mark.parametrize("size", [1, 2, 7, 60])
def test_scores_are_those_of_rank_bm25(size: int) -> None:
    rng = random.Random(size)
    vocabulary = [f"w{i}" for i in range(30)]
    passages = [rng.choices(vocabulary, weights=range(30, 0, -1), k=rng.randint(1, 40)) for _ in range(size)]
    index, reference = Bm25(passages), BM25Okapi(passages)
    for _ in range(50):
        query = rng.choices([*vocabulary, "unknown"], k=rng.randint(1, 6))
        expected = reference.get_scores(query)
        assert index.scores(query) == pytest.approx(list(expected), abs=1e-12)
        best = index.top(query, 3)
        sharing = [s for s, passage in zip(expected, passages, strict=True) if set(passage) & set(query)]
        assert [expected[i] for i in best] == pytest.approx(sorted(sharing, reverse=True)[:3])


def test_an_index_needs_passages() -> None:
    with expect_error(ValueError, "passage", "least"):
        Bm25([])
    assert words("Ada's 2 NOTES") == ["ada", "s", "2", "notes"]


@pytest.mark.parametrize("row", [HOTPOT_ROW, HUB_ROW])
def test_search_reads_rows_as_hotpotqa_publishes_them(row: dict[str, object]) -> None:
    env = Search(num_passages=1)
    env.reset(make_task("Sweden", row))
    assert content(env.step("search(notes of Ada)")) == "Ada Lovelace: Ada was a mathematician. She wrote notes."
    assert content(env.step("search(city Lund)")) == "Lund: Lund is a city in Sweden."
    assert content(env.step("search(nowhere)")) == "nothing found"
    assert env.step("It is #### the sweden.") == Step(reward=1.0, done=True)
    assert env.step("It is #### Norway") == Step(reward=0.0, done=True)
    env.close()


def test_search_shares_an_index_of_a_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file, task = tmp_path / "passages.jsonl", make_task("x")
    file.write_text('{"title": "A", "text": "apples grow"}\n{"title": "B", "text": "bears hunt"}\n')
    first, second = Search(index=str(file)), Search(index="~/passages.jsonl")
    first.reset(task)
    file.unlink()
    second.reset(task)
    assert content(second.step("search(bears)")) == "B: bears hunt"
    file.write_text('{"title": "A"}\n')
    with expect_error(ValueError, "passages.jsonl:1", "['title']"):
        Search(index=str(file)).reset(make_task("x"))


def test_search_refuses_rows() -> None:
    with expect_error(ValueError, "p:1", "answer"):
        Search().reset(make_task(None, HOTPOT_ROW))
    with expect_error(ValueError, "p:1", "passages", "needs"):
        Search().reset(make_task("x", {"context": "text"}))
    with expect_error(AgentError, "num_passages", "1", "0"):
        Search(num_passages=0)


def test_answers_are_compared_as_in_squad() -> None:
    assert normalize("The  Beatles!") == normalize("beatles")
    assert normalize("an apple, a day") == "apple day"
