"""`megarl data`, and the lines of `megarl check` about data files: hand-written expectations, and brute force."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.tools.data_account import mark_trained
from megarl.data.account import Segment
from megarl.data.tokenizer import load_tokenizer
from tests.cli.tiny_run import ROWS, write_config, write_rows, write_tiny_run

IM = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tree(folder: Path) -> dict[str, Any]:
    return write_tiny_run(folder)


def _files(tree: dict[str, Any], file: Path) -> dict[str, Any]:
    """The sections that every stage needs, for training rows in `file`."""
    return {"run_dir": tree["run_dir"], "model": tree["model"], "data": {"path": str(file)}}


@pytest.fixture
def reports(output):
    """Function that runs `megarl data --json`; returns the reports by key."""

    def run_command(*words: str | Path) -> dict[str, dict[str, Any]]:
        lines = output("data", *words, "--json").splitlines()
        return {report["key"]: report for report in map(json.loads, lines)}

    return run_command


def test_shows_columns_rows_and_notices(output, tmp_path):
    rows = [
        {"prompt": "2 + 3 =", "answer": "5", "level": 1, "image": "a.png", "note": None},
        {"prompt": " 2 +  3 =\n", "answer": 5, "level": 1.5, "note": None},
        {"prompt": "2 + 3 =", "answer": "5", "level": 1, "image": "a.png", "note": None},
        {"prompt": [], "answer": " ", "level": 2},
        {"prompt": "1 + 1 =", "answer": " ", "images": []},
        {"prompt": "1 + 1 =", "answer": "2", "images": ["b.png"]},
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    expected = f"""\
{file}: 6 rows, prompts of texts, because rows have 'prompt' (text, list), 'answer' (text, integer)
column  type             rows  use
prompt  text, list          6  rendered
answer  text, integer       6  answer
level   integer, number     4  passed to rewards
image   text                2  passed to rewards
note    -                   0  passed to rewards
images  list                2  has to be empty
1 of 6 rows repeat an earlier row (first {file}:3 as {file}:1)
2 of 6 rows repeat an earlier prompt (first {file}:2 as {file}:1)
3 of 4 rows have an answer in 'answer'
1 of 6 rows cannot be used: field 'prompt' (data.fields.prompt) needs a list of messages, got an empty list \
(first {file}:4)
1 of 6 rows cannot be used: field 'images' is not empty, and models take no images, videos or audio (first {file}:6)
notice: column 'image', which 2 rows have, is not rendered (passed to rewards)
--- prompt of {file}:1
user: 2 + 3 =
"""
    printed = output("data", file, "--rows", "1").splitlines()
    assert [line.rstrip() for line in printed] == expected.splitlines()


def test_counts_are_those_of_brute_force(reports, tmp_path):
    rng = random.Random(5)

    def row() -> dict[str, Any]:
        words = rng.choices(["a", "b"], k=rng.randrange(1, 6))
        return {"prompt": rng.choice([" ", "\n", "  "]).join(words), "answer": rng.choice(["1", "", 2, None])}

    train, held_out = [row() for _ in range(300)], [row() for _ in range(60)]
    files = write_rows(tmp_path / "a.jsonl", train), write_rows(tmp_path / "b.jsonl", held_out)
    found = reports(files[0], "--eval", files[1])
    prompts = ["".join(row["prompt"].split()) for row in train]
    of_training = found["data.path"]
    assert of_training["repeated_prompts"]["count"] == 300 - len(set(prompts))
    assert of_training["repeated_rows"]["count"] == 300 - len({json.dumps(row) for row in train})
    assert of_training["num_answers"] == sum(row["answer"] in ("1", 2) for row in train)
    shared = found["data.eval_path"]["training_prompts"][str(files[0])]
    assert shared["count"] == sum("".join(row["prompt"].split()) in prompts for row in held_out)
    assert of_training["training_prompts"] == {}


def test_marks_what_is_trained_on(output, reports, folder, tree, tmp_path):
    turns = [("system", "S"), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    messages = [{"role": role, "content": text} for role, text in turns]
    messages[2]["weight"] = 0
    file = write_rows(tmp_path / "chat.jsonl", [{"messages": messages, "source": "x"}])
    plain = output("data", file, "--stage", "sft")
    assert "demonstrations of messages (OpenAI messages), because rows have 'messages' (list)" in plain
    assert "\nmessages  list     1  trained on  \nsource    text     1  ignored     \n" in plain
    assert plain.endswith("system: S\nuser: 1\nassistant: 2\nuser: 3\nassistant: ⟦4⟧\n\n")
    model = tmp_path / "model"
    model.mkdir()
    for path in (folder / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "chat_template.jinja").write_text(IM)
    rendered = output("data", file, "--stage", "sft", "--model", model)
    head = "<system>S<eos><user>1<eos><assistant>2<eos><user>3<eos><assistant>"
    assert rendered.splitlines()[-1] == f"{head}⟦4<eos>⟧"
    tokens = load_tokenizer(model)(head + "4<eos>", add_special_tokens=False)["input_ids"]
    lengths = reports(file, "--stage", "sft", "--model", model)["data.path"]["lengths"]
    assert (lengths["num_rows"], lengths["limit"], lengths["num_longer"]) == (1, 128, 0)
    assert set(lengths["quantiles"].values()) == {len(tokens)}


def test_colours_take_the_place_of_marks():
    segments = [Segment("a\x1b[2J", False), Segment("b\n", True)]
    assert mark_trained(segments, is_coloured=False).plain == "a\\x1b[2J⟦b\n⟧"
    coloured = mark_trained(segments, is_coloured=True)
    assert coloured.plain == "a\\x1b[2Jb\n"
    assert [(coloured.plain[span.start : span.end], span.style) for span in coloured.spans] == [("b\n", "green")]


def test_pairs_that_cannot_be_used_are_counted_by_reason(reports, tmp_path):
    good = {"prompt": "p", "chosen": "a", "rejected": "b", "system": "s"}
    rows = [good, {**good, "rejected": "a"}, {**good, "chosen": " "}, {**good, "margin": -1}, {**good, "rejected": "a"}]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    report = reports(file, "--stage", "dpo")["data.path"]
    left_out = {reason: (rows["count"], rows["example"]) for reason, rows in report["left_out"].items()}
    assert left_out == {
        "fields 'chosen' (data.fields.chosen) and 'rejected' (data.fields.rejected) hold the same answer; a preference "
        "needs two": (2, f"{file}:2"),
        "field 'chosen' (data.fields.chosen) is blank": (1, f"{file}:3"),
        "field 'margin' (data.fields.margin) needs a number from 0 to 1e+18, got -1": (1, f"{file}:4"),
    }
    assert (report["num_rows"], report["num_usable"], report["format"]) == (5, 1, "pairs of texts")
    uses = {name: column["use"] for name, column in report["columns"].items()}
    assert uses["margin"] == "margin"
    assert report["notices"] == ["column 'system', which 5 rows have, is not rendered (ignored)"]


def test_prompts_that_end_with_the_assistant_cannot_be_used(reports, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": messages, "answer": "1"}])
    report = reports(file)["data.path"]
    assert (report["num_usable"], report["format"]) == (0, "prompts, none of which can be used")
    assert "end with one of the assistant" in next(iter(report["left_out"]))
    for choice in ("drop", "continue"):
        assert reports(file, "--set", f"data.last_assistant={choice}")["data.path"]["num_usable"] == 1


def test_messages_without_a_chat_template_cannot_be_used(reports, tree, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "Hi"}], "answer": "1"}])
    report = reports(file, "--model", tree["model"]["path"], "--set", "rollout.max_new_tokens=28")["data.path"]
    assert report["left_out"] == {
        "field 'prompt' (data.fields.prompt) holds messages, which need a chat template, the tokenizer of "
        f"{tree['model']['path']} has none": {"count": 1, "example": f"{file}:1"}
    }


@pytest.mark.parametrize(
    ("stage", "row", "notice"),
    [
        ("train", {"prompt": "p", "answer": "1", "label": "2"}, "column 'label' is not read, because .* 'answer'"),
        ("train", {"prompt": "p", "question": "q", "answer": "1"}, "column 'question' is not read, .* have 'prompt'"),
        ("sft", {"prompt": "p", "response": "r", "completion": "c"}, "column 'completion' is not read, .* 'response'"),
    ],
)
def test_columns_that_another_format_reads_are_noticed(reports, tmp_path, stage, row, notice):
    file = write_rows(tmp_path / "rows.jsonl", [row])
    (found,) = reports(file, "--stage", stage)["data.path"]["notices"]
    assert re.match(notice, found)


def test_columns_that_the_user_has_chosen_have_no_rivals(reports, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": "1", "label": "2"}])
    assert not reports(file, "--set", "data.fields.answer=label")["data.path"]["notices"]


def test_a_prompt_template_that_no_row_uses_is_noticed(reports, tmp_path):
    text, messages = {"prompt": "Hi", "answer": "1"}, {"prompt": [{"role": "user", "content": "Hi"}], "answer": "1"}
    for row, expected in ((text, 0), (messages, 1)):
        file = write_rows(tmp_path / "rows.jsonl", [row])
        notices = reports(file, "--set", "data.prompt_template='Q: {prompt}'")["data.path"]["notices"]
        assert sum("data.prompt_template is applied to no row" in notice for notice in notices) == expected


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_fields_that_no_row_has_are_refused_after_the_account(run, tmp_path, words):
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": "1"}])
    code, out, err = run("data", file, "--set", "data.fields.tools=functions", *words)
    assert code == 2
    assert "1 rows" in out or '"num_rows": 1' in out
    assert f"{file}: no row has field 'functions' (data.fields.tools); the columns are 'answer', 'prompt'" in err


def test_lengths_are_those_of_the_tokenizer(reports, tree, tmp_path):
    rows = [{"prompt": "1 + " * n, "answer": "1"} for n in range(1, 40)]
    file, model = write_rows(tmp_path / "rows.jsonl", rows), tree["model"]["path"]
    found = reports(file, "--model", model, "--set", "rollout.max_new_tokens=28")["data.path"]["lengths"]
    lengths = sorted(len(ids) for ids in load_tokenizer(model)([row["prompt"] for row in rows])["input_ids"])
    assert found["num_rows"] == 39
    assert found["quantiles"] == {
        "median": lengths[19],
        "90 %": lengths[35],
        "99 %": lengths[38],
        "longest": lengths[38],
    }
    assert (found["limit"], found["num_longer"]) == (100, sum(length > 100 for length in lengths))
    assert found["num_longer"]


def test_takes_the_files_of_a_configuration(reports, folder, tree):
    found = reports("--config", write_config(folder / "run.yaml", tree))
    assert [(key, report["num_rows"]) for key, report in found.items()] == [("data.path", 8), ("data.eval_path", 2)]
    assert found["data.eval_path"]["training_prompts"][tree["data"]["path"]]["count"] == 2
    assert next(iter(found["data.path"]["shown"].values())) == {"prompt": [{"text": "0 + 1 =\n", "is_trained": False}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "rows.jsonl: no such data file"),
        ("\n", "rows.jsonl: the data file has no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', "rows.jsonl:2: not valid JSON: Expecting value"),
    ],
)
def test_files_that_cannot_be_read_are_refused(refusal, tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    error = refusal("data", file)
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs either FILE or --config, got neither"),
        (["a.jsonl", "--config", "b.yaml"], "needs either FILE or --config, got both"),
        (["a.jsonl", "--rows=-1"], "--rows needs at least 0, got -1"),
        (["a.jsonl", "--set", "data.fields.anwer=x"], "data.fields.anwer: unknown key"),
        (["a.jsonl", "--model", "missing"], "missing"),
        (["a.jsonl", "--model", "org/missing"], "model.path: there is no folder org/missing, and the model cannot be"),
    ],
)
def test_options_that_cannot_be_used_are_refused(refusal, words, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert message in refusal("data", *words)


def test_check_reports_each_file(output, folder, tree, tmp_path):
    rows = [*ROWS, {**ROWS[0], "input": "more"}, ROWS[0]]
    file = write_rows(tmp_path / "train.jsonl", rows)
    config = write_config(folder / "more.yaml", tree)
    lines = output("check", config, "--set", f"data.path={file}").splitlines()
    held_out = tree["data"]["eval_path"]
    assert [line for line in lines if line.startswith("# data.")] == [
        "# data.path: 10 rows, prompts of texts; rendered: prompt; answer: answer; passed to rewards: response, input",
        f"# data.path: 1 of 10 rows repeat an earlier row (first {file}:10 as {file}:1)",
        f"# data.path: 2 of 10 rows repeat an earlier prompt (first {file}:9 as {file}:1)",
        f"# data.path: {_tokens(tree, rows)}",
        "# data.path: column 'input', which 1 rows have, is not rendered (passed to rewards)",
        "# data.eval_path: 2 rows, prompts of texts; rendered: prompt; answer: answer; passed to rewards: response",
        f"# data.eval_path: 2 of 2 prompts are in the training rows of {file} (first {held_out}:1 as {file}:1)",
        f"# data.eval_path: {_tokens(tree, ROWS[:2])}",
    ]


def _tokens(tree: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The line about the lengths of prompts, by the tokenizer itself: the context has 128 tokens, a completion 32."""
    tokenizer = load_tokenizer(tree["model"]["path"])
    lengths = sorted(len(tokenizer(row["prompt"])["input_ids"]) for row in rows)
    ranks = {"median": math.ceil(len(rows) / 2), "90 %": math.ceil(0.9 * len(rows)), "99 %": len(rows)}
    shares = ", ".join(f"{name} {lengths[rank - 1]}" for name, rank in ranks.items())
    num_longer = sum(length > 96 for length in lengths)
    return f"tokens of all rows: {shares}, longest {lengths[-1]}; {num_longer} are above the limit of 96"


def test_check_counts_rows_that_are_too_long(output, folder, tree, tmp_path):
    rows = [*ROWS, {**ROWS[0], "prompt": "1 + " * 60, "response": "3"}]
    file = write_rows(tmp_path / "train.jsonl", rows)
    config = write_config(folder / "long.yaml", tree)
    words = ["--set", f"data.path={file}", "data.overlong_prompts=drop"]
    dropped = "# data.path: 1 of 9 rows are dropped, because they are too long"
    assert {dropped, f"# data.path: {_tokens(tree, rows)}"} <= {*output("check", config, *words).splitlines()}
    sft = write_config(folder / "sft.yaml", {key: value for key, value in tree.items() if key != "rollout"})
    found = output("check", sft, "--stage", "sft", *words).splitlines()
    assert dropped in found
    assert (
        "# data.path: 9 rows, demonstrations of texts; rendered: prompt; ignored: answer; trained on: response" in found
    )


@pytest.mark.parametrize("stage", ["train", "sft", "rm"])
def test_check_refuses_optional_fields_that_no_row_has(refusal, output, folder, tree, stage):
    rows = [{**row, "chosen": "a", "rejected": "b"} for row in ROWS]
    file = write_rows(folder / "all.jsonl", rows)
    own: dict[str, Any] = {"train": {"rollout": tree["rollout"]}, "sft": {}, "rm": {"rm": {}}}[stage]
    if stage == "train":
        own["reward"] = {"terms": {"form": {"type": "format", "pattern": "x"}}}  # which needs no answer
    config = write_config(folder / f"{stage}.yaml", {**_files(tree, file), **own})
    missing = {"train": "answer", "sft": "tools", "rm": "margin"}[stage]
    error = refusal("check", config, "--stage", stage, "--set", f"data.fields.{missing}=typo")
    columns = ", ".join(map(repr, sorted(rows[0])))
    assert f"data.path: {file}: no row has field 'typo' (data.fields.{missing}); the columns are {columns}" in error
    output("check", config, "--stage", stage)


@pytest.mark.parametrize("stage", ["train", "sft", "dpo"])
def test_check_refuses_rows_with_images(refusal, folder, tree, stage, tmp_path):
    rows = [{**row, "chosen": "a", "rejected": "b", "images": [] if i < 3 else ["a.png"]} for i, row in enumerate(ROWS)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    own = {"rollout": tree["rollout"]} if stage == "train" else {"dpo": {}} if stage == "dpo" else {}
    config = write_config(tmp_path / "c.yaml", {**_files(tree, file), **own})
    error = refusal("check", config, "--stage", stage)
    assert f"data.path: {file}:4: field 'images' is not empty" in error
