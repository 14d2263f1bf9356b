"""megarl: reinforcement learning for language models on Megatron-core and SGLang."""

import time

IMPORTED_SINCE = time.time()
"""When this process began to import megarl, in Unix time: a start is measured by it."""

__version__ = "0.1.0"
