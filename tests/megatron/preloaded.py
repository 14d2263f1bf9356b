"""Imports shared by all test ranks, done once in the forkserver process that ranks are forked from (`ranks.py`)."""

import importlib
import os

from megarl.megatron.runtime import platform

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the forked ranks run on the CPU; CUDA could not be used in them
platform.prepare()
for name in (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.multi_token_prediction",
    "megarl.algorithms",
    "megarl.megatron.training.trainer",
    "megarl.cli.tools.model_conversion",
    "megarl.stages",
    "pyarrow.parquet",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",
    "transformers",
    "transformers.modeling_rope_utils",
):
    importlib.import_module(name)
