"""Reference results of the transformers library, for comparison with engines."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load(model_dir, weights=None):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if weights is not None:
        keys = model.load_state_dict(weights, strict=False)
        assert not keys.unexpected_keys
        tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
        assert keys.missing_keys in ([], tied)
    return model


def changed(model_dir, seed):
    """Return the model's tensors with randomly changed values: Hugging Face name -> tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() * (1 + 0.3 * torch.randn(p.shape, generator=generator))
        for name, p in load(model_dir).named_parameters()
    }


@torch.no_grad()
def logprobs(model, prompt, generation, temperature=1.0):
    """Return the log-probabilities of the sampled tokens [K]."""
    ids = list(prompt) + generation.token_ids.tolist()
    logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
    every = torch.log_softmax(logits / temperature, -1)
    return every[torch.arange(len(every)), generation.token_ids.tolist()].numpy()


def worst_difference(model, prompts, generations, temperature=1.0):
    pairs = zip(prompts, generations, strict=True)
    return max(np.abs(logprobs(model, p, g, temperature) - g.logprobs).max() for p, g in pairs)


@torch.no_grad()
def greedy(model, prompt, max_new_tokens, eos):
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]
