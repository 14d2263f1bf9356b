"""Loading demonstrations and preference pairs: tokens, loss masks, margins, safety labels and bad rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.config.data import DataConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preference_pairs import load_preferences
from megarl.data.prompts import load_prompts
from megarl.errors import DataError
from tests.data.conftest import Jsonl, Tokenizer
from tests.errors import expect_error

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}


def check_response(trajectory: Trajectory, prompt: Prompt, number: int, field: str, tokenizer: Tokenizer) -> None:
    """Check that prompt and text of the field follow each other, and that the loss mask covers the text and EOS."""
    n = len(prompt.token_ids)
    assert (trajectory.prompt_id, trajectory.group_id) == (prompt.prompt_id, number)
    assert trajectory.token_ids[:n].tolist() == list(prompt.token_ids)
    assert trajectory.loss_mask.tolist() == [False] * n + [True] * (trajectory.num_tokens - n)
    answer = trajectory.token_ids[n:]
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer[:-1]) == prompt.row[field]


def test_the_loss_masks_cover_answers_and_eos(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    config = DataConfig(path=str(jsonl(PAIR, {"prompt": "2+2=", "chosen": "4", "rejected": "22", "margin": 1.5})))
    got = load_preferences(config, tokenizer, max_tokens=64)
    prompts = load_prompts(config.resolved_sources[0], tokenizer, path=config.file, max_prompt_tokens=64)
    assert [pair.margin for pair in got] == [0.0, 1.5]
    for i, (pair, prompt) in enumerate(zip(got, prompts, strict=True)):
        assert pair.safe is None
        for trajectory, field in ((pair.chosen, "chosen"), (pair.rejected, "rejected")):
            check_response(trajectory, prompt, i, field, tokenizer)
    assert got[0].chosen.token_ids.dtype == np.int32


def test_chat_pairs_from_parquet(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    path = tmp_path / "pairs.parquet"
    messages = [{"role": "user", "content": "Hi"}]
    row = {"ask": messages, "good": "Ah", "bad": "Oh", "margin": 2}
    pq.write_table(pa.Table.from_pylist([row | {"good": "Yo", "margin": None}, row]), path)
    fields = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    first, second = load_preferences(DataConfig(path=str(path), fields=fields), chat_tokenizer, max_tokens=64)
    assert chat_tokenizer.decode(first.chosen.token_ids) == "<user>Hi<eos><assistant>Yo<eos>"
    assert chat_tokenizer.decode(second.rejected.token_ids) == "<user>Hi<eos><assistant>Oh<eos>"
    assert (first.margin, second.margin) == (0.0, 2.0)


def test_safety_labels_are_read_on_request(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    rows = [PAIR | {"chosen_safe": True, "rejected_safe": safe} for safe in (True, False)]
    config = DataConfig(path=str(jsonl(*rows)))
    got = load_preferences(config, tokenizer, max_tokens=64, safety=True)
    assert [pair.safe for pair in got] == [(True, True), (True, False)]
    assert [pair.safe for pair in load_preferences(config, tokenizer, max_tokens=64)] == [None, None]
    (without,) = load_preferences(DataConfig(path=str(jsonl(PAIR))), tokenizer, max_tokens=64, safety=True)
    assert without.safe is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, r"field 'prompt' \(data.fields.prompt\) is missing"),
        ({"prompt": "a", "rejected": "b"}, r"field 'chosen' \(data.fields.chosen\) is missing; the row has"),
        ({"prompt": "a", "chosen": "b"}, r"field 'rejected' \(data.fields.rejected\) is missing"),
        (PAIR | {"chosen": ""}, r"field 'chosen' \(data.fields.chosen\) is empty"),
        (PAIR | {"rejected": ""}, r"field 'rejected' \(data.fields.rejected\) is empty"),
        (PAIR | {"rejected": 7}, r"field 'rejected' \(data.fields.rejected\) needs a string, got int"),
        (PAIR | {"rejected": "2"}, r"'chosen' .* and 'rejected' .* hold the same answer"),
        (PAIR | {"prompt": ""}, r"field 'prompt' \(data.fields.prompt\) holds no tokens"),
        (PAIR | {"margin": "1"}, r"'margin' \(data.fields.margin\) needs a number from 0 to 1e\+18, got '1'"),
        (PAIR | {"margin": True}, r"'margin' .* got True"),
        (PAIR | {"margin": -1}, r"'margin' .* got -1"),
        (PAIR | {"margin": float("nan")}, r"'margin' .* got nan"),
        (PAIR | {"margin": 10**400}, r"'margin' .* got 1000"),
        (PAIR | {"chosen": " \n"}, r"field 'chosen' \(data.fields.chosen\) is blank"),
        (PAIR | {"chosen": float("nan")}, r"field 'chosen' \(data.fields.chosen\) needs a string, got float"),
        (PAIR | {"rejected": "2<eos>"}, r"'chosen' .* and 'rejected' .* hold the same answer"),
        (PAIR | {"chosen_safe": 1, "rejected_safe": True}, r"'chosen_safe' \(.*\) needs true or false, got 1"),
        (PAIR | {"chosen_safe": True}, r"'rejected_safe' \(.*\) needs true or false, got nothing, but"),
        (PAIR | {"chosen_safe": True, "rejected_safe": True}, r"the row has safety labels .* unlike .*rows.jsonl:1"),
    ],
)
def test_bad_rows_are_reported(jsonl: Jsonl, tokenizer: Tokenizer, row: object, message: str) -> None:
    path = str(jsonl(PAIR, row))
    with pytest.raises(DataError, match="rows.jsonl:2: .*" + message):
        load_preferences(DataConfig(path=path), tokenizer, max_tokens=64, safety=True)


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_both_answers_must_fit_the_limit(longer: str, jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = str(jsonl({"prompt": "123", "chosen": "4", "rejected": "5"} | {longer: "45"}, PAIR | {"prompt": "1"}))
    assert len(load_preferences(DataConfig(path=path), tokenizer, max_tokens=6)) == 2
    with expect_error(DataError, "rows.jsonl:1", "6", "1", "= 5"):
        load_preferences(DataConfig(path=path), tokenizer, max_tokens=5)
    (kept,) = load_preferences(DataConfig(path=path, overlong_prompts="drop"), tokenizer, max_tokens=5)
    assert kept.chosen.prompt_id == "rows.jsonl:2"
    with expect_error(DataError, "2", "sequences", "longer"):
        load_preferences(DataConfig(path=path, overlong_prompts="drop"), tokenizer, max_tokens=2)


def test_the_loss_mask_covers_response_and_eos(arithmetic: Path, tokenizer: Tokenizer) -> None:
    config = DataConfig(path=str(arithmetic / "sft.jsonl"))
    got = load_demonstrations(config, tokenizer, max_tokens=64)
    prompts = load_prompts(config.resolved_sources[0], tokenizer, path=config.file, max_prompt_tokens=64)
    assert len(got) == len(prompts) == 6000
    for i, (trajectory, prompt) in enumerate(zip(got, prompts, strict=True)):
        check_response(trajectory, prompt, i, "response", tokenizer)
        assert trajectory.prompt_length == len(prompt.token_ids)
    first = got[0]
    assert (first.token_ids.dtype, first.loss_mask.dtype) == (np.int32, np.bool_)
    assert (first.logprobs == 0).all()
    assert (first.policy_versions == -1).all()


def test_chat_demonstration(jsonl: Jsonl, chat_tokenizer: Tokenizer) -> None:
    path = str(jsonl({"prompt": "Hi", "response": "Yo"}))
    (got,) = load_demonstrations(DataConfig(path=path), chat_tokenizer, max_tokens=64)
    assert chat_tokenizer.decode(got.token_ids) == "<user>Hi<eos><assistant>Yo<eos>"
    assert chat_tokenizer.decode(got.token_ids[got.loss_mask]) == "Yo<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, r"a demonstration needs field 'response' \(data.fields.resp"),
        ({"prompt": "a", "response": ""}, r"field 'response' \(data.fields.response\) is empty"),
        ({"prompt": "a", "response": "\t "}, r"field 'response' \(data.fields.response\) is blank"),
        ({"prompt": "", "response": "b"}, r"field 'prompt' \(data.fields.prompt\) holds no tokens"),
        ({"prompt": "a", "response": None}, r".*data.fields.response\) needs a string, got NoneType"),
        ({"prompt": "a", "response": 1}, r".*data.fields.response\) needs a string, got int"),
        ({"response": "b"}, r"field 'prompt' \(data.fields.prompt\) is missing"),
    ],
)
def test_bad_demonstrations_are_reported(jsonl: Jsonl, tokenizer: Tokenizer, row: object, message: str) -> None:
    with pytest.raises(DataError, match="rows.jsonl:1: " + message):
        load_demonstrations(DataConfig(path=str(jsonl(row))), tokenizer, max_tokens=64)


def test_eos_at_the_end_of_a_response_is_not_repeated(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token
    texts = ["4", f"4{eos}", f"4{eos}{eos}", f"4{eos} ", eos]
    path = str(jsonl(*({"prompt": "1", "response": text} for text in texts)))
    got = load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=64)
    ends = [tokenizer.decode(row.token_ids) for row in got]
    assert ends == [*[f"14{eos}"] * 4, f"1{eos}"]
    (pair,) = load_preferences(DataConfig(path=str(jsonl(PAIR | {"chosen": f"2{eos}"}))), tokenizer, max_tokens=64)
    assert [tokenizer.decode(each.token_ids) for each in (pair.chosen, pair.rejected)] == [
        f"1+1=2{eos}",
        f"1+1=11{eos}",
    ]
    # its tokens fit exactly
    path = str(jsonl({"prompt": "1", "response": f"4{eos}"}))
    assert len(load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=3)) == 1


def test_bos_alone_is_a_prompt(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.pad_token_id
    with_bos = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", bos)])
    tokenizer.backend_tokenizer.post_processor = with_bos
    config = DataConfig(path=str(jsonl({"prompt": "", "response": "4"})))
    (got,) = load_demonstrations(config, tokenizer, max_tokens=9)
    assert got.prompt_length == 1


def test_texts_without_tokens_are_refused_by_line(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    from tokenizers.normalizers import Replace

    tokenizer.backend_tokenizer.normalizer = Replace("~", "")
    config = DataConfig(path=str(jsonl({"prompt": "1", "response": "4"}, {"prompt": "1", "response": "~"})))
    with expect_error(DataError, "rows.jsonl:2", "'response' (data.fields.response)"):
        load_demonstrations(config, tokenizer, max_tokens=9)
    config = DataConfig(path=str(jsonl(PAIR, PAIR | {"rejected": "~"})))
    with expect_error(DataError, "rows.jsonl:2", "'rejected' (data.fields.rejected)"):
        load_preferences(config, tokenizer, max_tokens=9)
    config = DataConfig(path=str(jsonl(PAIR | {"chosen": "11~"})))
    with expect_error(DataError, "rows.jsonl:1"):
        load_preferences(config, tokenizer, max_tokens=9)


def test_the_length_limit_counts_prompt_response_and_eos(jsonl: Jsonl, tokenizer: Tokenizer) -> None:
    path = str(jsonl({"prompt": "123", "response": "45"}, {"prompt": "1", "response": "2"}))
    assert len(load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=6)) == 2
    with expect_error(DataError, "rows.jsonl:1", "6", "1", "= 5"):
        load_demonstrations(DataConfig(path=path), tokenizer, max_tokens=5)
    (kept,) = load_demonstrations(DataConfig(path=path, overlong_prompts="drop"), tokenizer, max_tokens=5)
    assert kept.prompt_id == "rows.jsonl:2"
