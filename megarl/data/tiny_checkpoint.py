"""Create a model in Hugging Face format that is small enough to train on a laptop CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from megarl.errors import DataError

PAD, EOS = "<pad>", "<eos>"

CHAT_TEMPLATE = (
    "{% if tools %}tools\n{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | list | join(', ') }})\n"
    "{% endfor %}<eos>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
"""Chat template of a tiny model: it only appends, and ends every message with the stop token.

Tools are written as names with parameters, for which few tokens suffice; calls as SGLang's parser qwen25 reads them.
"""


def write_tiny_model(
    directory: str | Path,
    texts: Iterable[str],
    seed: int,
    *,
    vocab_size: int = 384,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    ffn_size: int = 384,
    context_length: int = 512,
    chat: bool = False,
) -> None:
    """Write a tokenizer trained on `texts` and a random Qwen3 of these sizes (0.49M parameters) into `directory`.

    With `chat`, the tokenizer has `CHAT_TEMPLATE`. The embedding has `vocab_size` rows; the tokenizer uses as many of
    them as it found merges for. The same texts and seed give the same weights. The global random state is unchanged.

    Raises:
        DataError: `vocab_size` is too small for the 256 bytes and 2 special tokens, or there are no texts.
    """
    if vocab_size < 258:
        raise DataError(f"a byte-level vocabulary needs vocab_size >= 256 + 2 = 258, got {vocab_size}")
    tokenizer = train_tokenizer(texts, vocab_size, context_length)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    with _no_progress_bar():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Disable the progress bars of transformers: the file has only 2 MB."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def train_tokenizer(texts: Iterable[str], vocab_size: int, context_length: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens; every digit is a separate token.

    Raises:
        DataError: there are no texts.
    """
    texts = list(texts)
    if not any(texts):
        raise DataError("a tokenizer needs texts to be trained on, got none")
    tokenizer = Tokenizer(models.BPE())
    # A model this small learns addition only digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=context_length
    )
