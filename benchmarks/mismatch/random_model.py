"""Random models in which a tensor that is missing or in the wrong place changes the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_random_model(config: dict[str, Any], *, values: bool = False) -> PreTrainedModel:
    """Return a random float32 model, the same for the same config; its norms are not 1 and its biases not 0.

    Args:
        config: content of config.json.
        values: build a value model (one scalar per token instead of logits).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    kind, labels = (AutoModelForSequenceClassification, {"num_labels": 1}) if values else (AutoModelForCausalLM, {})
    described = AutoConfig.for_model(**config, **labels)
    model: PreTrainedModel = kind.from_config(described, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif name.endswith((".bias", "proj_bias", "gate.weight", "router.weight", "sinks")):
                tensor.normal_(std=0.3)
            elif name.endswith("A_log"):
                tensor.uniform_(-2.0, 0.0)  # a gated delta net then remembers more than a few tokens
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.1)
        # transformers zeroes the padding token's row; a norm of zeros amplifies rounding a thousandfold
        model.get_input_embeddings().weight.normal_(std=0.2)
    return model.eval()
