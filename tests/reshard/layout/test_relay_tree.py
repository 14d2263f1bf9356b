"""Relay trees against their definition, machine by machine."""

import numpy as np
import pytest

from megarl.reshard.layout.relay_tree import RelayTree


@pytest.mark.parametrize(("machines", "roots"), [(1, 1), (5, 1), (7, 3), (8, 8), (8, 2), (64, 2), (100, 7)])
@pytest.mark.parametrize("origins", [(), (0,), (1, 2, 5)])
def test_every_machine_receives_once_over_short_paths(machines, roots, origins):
    origins = [number for number in origins if number < machines]
    tree = RelayTree.over(machines, roots, origins)
    assert tree.num_roots <= roots
    for rotation in range(machines):
        turn = np.array([rotation])
        paths = {machine: path_of(tree, machine, turn) for machine in range(machines)}
        entered = [root for machine, (root, parent, origin, _) in paths.items() if parent == origin == -1]
        assert len(set(entered)) == len(entered) <= tree.num_roots  # each root sends at most once
        assert origins or len(entered) == tree.num_roots
        for root in range(tree.num_roots):
            entry = int(tree.entries(np.array([root]), turn)[0])
            assert (entry == -1) == (root not in entered)
            assert entry == -1 or paths[entry] == (root, -1, -1, 0)
        for machine, (root, parent, origin, passed) in paths.items():
            if machine in origins:
                assert (parent, origin, passed) == (-1, machine, 0)
            elif parent != -1:
                assert paths[parent] == (root, paths[parent][1], origin, passed - 1)
            assert passed <= tree.depth <= (tree.arc - 1).bit_length()
            children = {to for _, to in tree.children(machine, turn)}
            assert children == {other for other, (_, source, _, _) in paths.items() if source == machine}


def path_of(tree, machine, rotation):
    path = tree.path(machine, rotation)
    return tuple(int(x[0]) for x in (path.root, path.parent, path.origin, path.passed))


def test_machines_send_equally_much_and_have_few_peers():
    """Over all rotations of a ring of 64, every machine passes a box on as often as the others."""
    tree, turns = RelayTree.over(64, 1), np.arange(64)
    sends = [sum(len(boxes) for boxes, _ in tree.children(machine, turns)) for machine in range(64)]
    assert sends == [63] * 64
    peers = {(to - 5) % 64 for _, to in tree.children(5, turns)}
    assert peers == {1, 2, 4, 8, 16, 32}
    assert tree.depth == 6
