"""Write a random OLMoE of 0.3 million parameters, with a tokenizer of single characters, to a folder."""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte."""
    pad, end = "<pad>", "<eos>"
    words = [pad, end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end)


def main(target: str) -> None:
    """Write the model and its tokenizer to folder `target`."""
    tokenizer = make_tokenizer()
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(sys.argv[1])
