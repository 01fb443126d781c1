"""Which guesses the target agrees with. Pure: tokens in, a walk out.

Under rule `match` a guess stands if and only if it is the target's own token at its place.
"""

from collections.abc import Sequence

from protos.messages import TreeNode


def tree_error(nodes: Sequence[TreeNode]) -> str:
    """Why these nodes are no tree, or nothing if they are one.

    Parents come before their children and no two children of a parent have the same token.
    """
    if any(not -1 <= node.parent < i for i, node in enumerate(nodes)):
        return "the parent of a node does not come before it"
    if len(set(nodes)) < len(nodes):
        return "two nodes have the same parent and token"
    return ""


def depths(nodes: Sequence[TreeNode]) -> list[int]:
    """How far below the root's children each node is."""
    found: list[int] = []
    for node in nodes:
        found.append(0 if node.parent < 0 else found[node.parent] + 1)
    return found


def is_path(nodes: Sequence[TreeNode], walk: Sequence[int]) -> bool:
    """True if `walk` goes from a child of the root down, node by node."""
    parents = (-1, *walk)
    return all(
        0 <= i < len(nodes) and nodes[i].parent == parent
        for i, parent in zip(walk, parents, strict=False)
    )


def walk(nodes: Sequence[TreeNode], chosen: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Down the tree by the target's own tokens: the nodes that stand, and `next_token`.

    `chosen[0]` is the target's token after the root, `chosen[1 + i]` the one after node i.
    """
    assert len(chosen) == len(nodes) + 1, "one token per row"
    index = {(node.parent, node.token): i for i, node in enumerate(nodes)}
    assert len(index) == len(nodes), "no two children of a parent have the same token"
    path: list[int] = []
    at = -1
    while (at := index.get((at, chosen[1 + at]), -1)) >= 0:
        path.append(at)
    return tuple(path), chosen[1 + (path[-1] if path else -1)]
