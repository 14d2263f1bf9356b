"""Simulation of all ranks' rounds in one process on NumPy arrays, without an executor."""

import numpy as np
import torch

from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.plan_cache import cached_index
from megarl.reshard.planning.rounds import build_rounds
from megarl.reshard.transfer.element_code import decode_boxes


def plans(sources, needs, topology, bucket_bytes, groups=()):
    """Return the rounds of every rank."""
    index = cached_index(sources, needs, topology, bucket_bytes, groups=groups)
    return [build_rounds(index, plan_rank(index, rank)) for rank in range(len(sources))]


ELEMENTS = {"bfloat16": np.uint16, "float32": np.uint32}
"""Unsigned integers of the size of an element: any bit pattern is a valid value."""


def make_tensors(sources, needs, seed=0):
    """Return full random tensors, each rank's shards of them, and its targets, which are 0."""
    rng = np.random.default_rng(seed)
    specs = sources[0].tensors.items()
    whole = {name: rng.integers(1, 1 << 16, spec.shape).astype(ELEMENTS[spec.dtype]) for name, spec in specs}
    held = [local_tensors(layout, whole) for layout in sources]
    return whole, held, [local_tensors(needs[rank]) if rank in needs else {} for rank in range(len(sources))]


def local_tensors(layout, whole=None):
    """Return name -> local tensor of a process, sliced from the full tensors `whole`; zeros if `whole` is None."""
    shapes, dtypes = {}, {}
    for piece in layout.pieces:
        ends = [stop for _, stop in piece.local_box]
        shapes[piece.local] = [max(pair) for pair in zip(ends, shapes.get(piece.local, ends), strict=True)]
        dtypes[piece.local] = ELEMENTS[layout.tensors[piece.tensor].dtype]
    tensors = {local: np.zeros(shape, dtypes[local]) for local, shape in shapes.items()}
    for piece in layout.pieces if whole is not None else ():
        tensors[piece.local][slices(piece.local_box)] = whole[piece.tensor][slices(piece.box)]
    return tensors


def run(rounds, held, targets, groups=(), codes=None):
    """Execute all ranks' rounds.

    Args:
        rounds: by rank.
        held: by rank, name -> array.
        targets: by rank, name -> array; written.
        codes: by rank and round, `CodedRound.lines` of a delta sync; None: boxes are sent as they are.

    Returns:
        (source, destination, bytes) of every message between two ranks.
    """
    messages = []
    group_of = {rank: sorted(group) for group in groups for rank in group}
    for number in range(len(rounds[0])):
        buckets = [np.full(of_rank[number].bucket_bytes, 0xEE, np.uint8) for of_rank in rounds]
        for rank, of_rank in enumerate(rounds):
            for copy in of_rank[number].copies:
                assert codes is not None or copy.part.num_bytes == copy.slot.num_bytes
                _put(buckets[rank], copy, _bytes(held[rank], copy.part))
        _gather(rounds, number, held, buckets, group_of, messages, is_coded=codes is not None)
        for hop in range(len(rounds[0][number].hops)):
            sent = {}
            for rank, of_rank in enumerate(rounds):
                for send in of_rank[number].hops[hop].sends:
                    data = [
                        buckets[rank][p.offset : p.offset + p.num_bytes] if p.local is None else _bytes(held[rank], p)
                        for p in send.parts
                    ]
                    sent.setdefault((rank, send.to), []).append(np.concatenate(data))
            for rank, of_rank in enumerate(rounds):
                for message in of_rank[number].hops[hop].receives:
                    data = sent[message.source, rank].pop(0)
                    assert len(data) == message.num_bytes
                    assert codes is not None or len(data) == sum(slot.num_bytes for slot in message.slots)
                    buckets[rank][message.offset : message.offset + message.num_bytes] = data
                    messages.append((message.source, rank, message.num_bytes))
            assert not any(sent.values())
        for rank, of_rank in enumerate(rounds):
            boxes = [targets[rank][slot.local][slices(slot.local_box)] for slot in of_rank[number].slots]
            if codes is not None:
                decode_boxes(torch.from_numpy(buckets[rank]), codes[rank][number], [*map(torch.from_numpy, boxes)])
                continue
            for slot, target in zip(of_rank[number].slots, boxes, strict=True):
                assert slot.offset % target.itemsize == 0
                data = buckets[rank][slot.offset : slot.offset + slot.num_bytes]
                target[...] = data.view(target.dtype).reshape(target.shape)
    return messages


def bytes_into_nodes(messages, topology):
    """Return the bytes of the messages that enter each node."""
    entering = dict.fromkeys(topology.nodes, 0)
    for source, to, num_bytes in messages:
        entering[topology.nodes[to]] += 0 if topology.same_node(source, to) else num_bytes
    return entering


def _gather(rounds, number, held, buckets, group_of, messages, *, is_coded):
    for rank, of_rank in enumerate(rounds):
        for index, gather in enumerate(of_rank[number].gathers):
            group = group_of[rank]
            assert len(gather.slots) == len(group)
            for member, slots in zip(group, gather.slots, strict=True):
                theirs = rounds[member][number].gathers[index]
                assert (theirs.offset, theirs.num_bytes) == (gather.offset, gather.num_bytes)
                for copy in theirs.own_copies:
                    assert is_coded or copy.part.num_bytes == copy.slot.num_bytes
                    _put(buckets[rank], copy, _bytes(held[member], copy.part))
                if member != rank:
                    sent = sum(copy.part.num_bytes for copy in theirs.own_copies)
                    assert len(theirs.own_copies) == len(slots)
                    assert sent <= gather.share
                    assert is_coded or sent == gather.share == sum(slot.num_bytes for slot in slots)
                    messages.append((member, rank, gather.share))


def _put(bucket, copy, data):
    assert len(data) == copy.part.num_bytes
    bucket[copy.slot.offset : copy.slot.offset + len(data)] = data


def _bytes(tensors, part):
    return np.ascontiguousarray(tensors[part.local][slices(part.box)]).reshape(-1).view(np.uint8)
