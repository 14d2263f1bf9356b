"""Kernels for training and weight sync: each op has a PyTorch reference and a Triton kernel for CUDA.

The package needs PyTorch only, and imports nothing of megarl. `MEGARL_KERNELS=torch` turns the Triton kernels off.
"""

from megarl_kernels.fp8_block import fp8_block_dequantize as fp8_block_dequantize
from megarl_kernels.fp8_block import fp8_block_encode as fp8_block_encode
from megarl_kernels.fp8_block import fp8_block_maxima as fp8_block_maxima
from megarl_kernels.fp8_block import fp8_block_quantize as fp8_block_quantize
from megarl_kernels.fp8_block import fp8_block_scales as fp8_block_scales
from megarl_kernels.linear_logprob import clear_dummy_gradients as clear_dummy_gradients
from megarl_kernels.linear_logprob import linear_logprob_entropy as linear_logprob_entropy
from megarl_kernels.logprob_entropy import logprob_entropy_ as logprob_entropy_
from megarl_kernels.reverse_scan import segmented_reverse_scan as segmented_reverse_scan
