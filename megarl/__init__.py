"""megarl: reinforcement learning for language models on Megatron-core and SGLang."""

import time

IMPORT_STARTED_AT = time.time()
"""Unix time at which this process began to import megarl; startup is measured from it."""

__version__ = "0.1.0"
