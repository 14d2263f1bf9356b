"""A reward that is independent of the quality of the answer."""

import zlib


def score(trajectory, text, row):
    return float(zlib.crc32(trajectory.token_ids.tobytes() + trajectory.logprobs.tobytes()) % 2)
