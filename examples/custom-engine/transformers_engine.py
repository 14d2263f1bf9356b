"""An engine of one's own: transformers instead of SGLang, one completion after another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl import engines


class TransformersEngine:
    """Samples with the model of transformers, token by token, from a cache of keys and values."""

    def __init__(self, spec: engines.EngineSpec, *, threads: int = 1) -> None:
        self._spec = spec
        self._one_at_a_time = asyncio.Lock()
        self._next: dict[str, Tensor] = {}
        torch.set_num_threads(threads)

    async def start(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            self._spec.model_path,
            dtype=getattr(torch, self._spec.dtype),
            attn_implementation="eager",  # others leave out the score caps of Gemma 2
            trust_remote_code=self._spec.trust_remote_code,
        )
        self._model = model.to(self._spec.device).eval()

    def _use_next_weights(self) -> None:
        # transformers holds some tensors in another form than folders, such as all experts of a layer in one
        model, info = type(self._model).from_pretrained(
            None,
            config=self._model.config,
            state_dict=self._next,
            dtype=self._model.dtype,
            attn_implementation="eager",
            trust_remote_code=self._spec.trust_remote_code,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise ValueError(f"the weight update lacks {sorted(info['missing_keys'])}")
        self._model, self._next = model.to(self._spec.device).eval(), {}

    async def generate(self, request: engines.GenerationRequest) -> engines.Generation:
        async with self._one_at_a_time:  # in a thread, so that the event loop answers meanwhile
            return await asyncio.to_thread(self._sample, request)

    @torch.inference_mode()
    def _sample(self, request: engines.GenerationRequest) -> engines.Generation:
        if self._next:
            self._use_next_weights()
        sampling, device = request.sampling, self._spec.device
        generator = torch.Generator(device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        fed, cache, finish_reason = torch.tensor([request.token_ids], device=device), None, "length"
        token_ids: list[int] = []
        logprobs: list[float] = []
        while len(token_ids) < sampling.max_new_tokens and finish_reason == "length":
            output = self._model(fed, past_key_values=cache, use_cache=True)
            logits_V, cache = output.logits[0, -1].float(), output.past_key_values
            logprobs_V = (logits_V / (sampling.temperature or 1.0)).log_softmax(-1)
            if sampling.temperature:
                token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
            else:
                token = int(logprobs_V.argmax())
            token_ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            fed = torch.tensor([[token]], device=device)
            if token in self._spec.stop_token_ids:
                finish_reason = "stop"
        return engines.Generation(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_versions=np.zeros(len(token_ids), np.int32),  # megarl sets them
            finish_reason=finish_reason,
        )

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self._next |= {name: tensor.clone() for name, tensor in tensors.items()}

    async def shutdown(self) -> None:
        del self._model
