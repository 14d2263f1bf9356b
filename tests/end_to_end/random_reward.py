"""A reward that says nothing about the answer."""

import zlib


def score(trajectory, text, row):
    return float(zlib.crc32(trajectory.token_ids.tobytes() + trajectory.logprobs.tobytes()) % 2)
