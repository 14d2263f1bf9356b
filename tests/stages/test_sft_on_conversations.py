"""SFT on conversations of several turns: its loss is transformers' cross-entropy on the assistant's tokens."""

import json

import pytest
import torch

from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.data.tokenizer import load_tokenizer
from tests.data.chat_templates import CHATML, QWEN3, SPECIALS, without_marks
from tests.megatron.ranks import run_ranks
from tests.stages import stage_ranks as stages
from tests.stages.test_supervised_resume import train_both

CONVERSATIONS = [
    [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4, of course")],
    [("system", "Be brief."), ("user", "3+3="), ("assistant", "6"), ("user", "why?"), ("assistant", "3+3=6")],
    [("user", "4+4="), ("assistant", "8")],
]
LABELS_IGNORED = -100


@pytest.fixture
def rows():
    return [[{"role": role, "content": text} for role, text in of] for of in CONVERSATIONS]


def write_model(folder, template, rows):
    """Write a tiny model whose tokenizer has the template and its special tokens; return tokenizer and model."""
    write_tiny_model(folder, [message["content"] for row in rows for message in row], seed=0, vocab_size=384)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS, "eos_token": "<|im_end|>"})
    tokenizer.chat_template = without_marks(template)
    tokenizer.save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def cross_entropy(model, tokenizer, conversations, *, last_only):
    """Return the mean of transformers' cross-entropy over tokens inside of generation marks.

    Args:
        last_only: only those of the last turn of each conversation.
    """
    total, count = 0.0, 0
    for messages in conversations:
        marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([marked["input_ids"]]), torch.tensor([marked["assistant_masks"]])
        if last_only:
            end = int(mask[0].nonzero().max())
            mask[0, : int((mask[0, :end] == 0).nonzero().max())] = 0
        num = int(mask.sum())
        with torch.no_grad():
            loss = model(ids, labels=torch.where(mask == 1, ids, LABELS_IGNORED)).loss
        total, count = total + float(loss) * num, count + num
    return total / count


@pytest.mark.parametrize("template", [CHATML, QWEN3], ids=["one sample", "a sample per turn"])
def test_loss_equals_that_of_transformers(template, rows, tmp_path):
    tokenizer, model = write_model(tmp_path / "model", template, rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    is_rewritten = template is QWEN3
    trainer = stages.trainer(steps=1, batch_size=5 if is_rewritten else 3)
    config = stages.stage_config(
        "sft", tmp_path, tmp_path / "run", data={"path": str(tmp_path / "rows.jsonl")}, trainer=trainer
    )
    config = config.model_copy(update={"placement": config.placement.model_copy(update={"slots_per_node": 1})})
    run_ranks(stages.train_uninterrupted, 1, tmp_path, "sft", config)
    tokenizer.chat_template = template
    expected = rows
    if is_rewritten:
        expected = [row[: i + 1] for row in rows for i, message in enumerate(row) if message["role"] == "assistant"]
    want = cross_entropy(model, tokenizer, expected, last_only=is_rewritten)
    assert stages.losses(tmp_path / "run")[1] == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
def test_resumed_run_on_a_sample_per_turn_is_identical(rows, tmp_path):
    write_model(tmp_path / "model", QWEN3, rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl")}
    whole, parts = (stages.stage_config("sft", tmp_path, tmp_path / name, data=data) for name in ("whole", "parts"))
    run_ranks(train_both, 2, tmp_path, "sft", whole, parts)
    stages.assert_same_results(tmp_path / "parts", tmp_path / "whole")
