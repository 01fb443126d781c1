"""Which guesses to verify: a connected part of the draft tree, best reach first."""

import heapq
from collections.abc import Mapping

from protos.draft_tree import DraftTree, Node


def score(node: Node) -> float:
    """The node's log-probability given its parent, by the source that is surest of it."""
    return max(node.scores.values())


def select(tree: DraftTree, k: int, shape: str) -> tuple[Node, ...]:
    """At most `k` nodes, parents before children; a chain, or the best of the whole tree."""
    return _best_chain(tree, k) if shape == "chain" else _best_nodes(tree, k)


def _best_chain(tree: DraftTree, k: int) -> tuple[Node, ...]:
    chain: list[Node] = []
    children: Mapping[int, Node] = tree.children
    while children and len(chain) < k:
        best = max(children.values(), key=lambda node: (score(node), -node.token))
        chain.append(best)
        children = best.children
    return tuple(chain)


def _best_nodes(tree: DraftTree, k: int) -> tuple[Node, ...]:
    # Reach never grows along a path, so the best unselected node is always on the boundary.
    boundary = [
        (-score(n), n.position, n.token, i, n) for i, n in enumerate(tree.children.values())
    ]
    heapq.heapify(boundary)
    chosen: list[Node] = []
    count = len(boundary)
    while boundary and len(chosen) < k:
        cost, _, _, _, node = heapq.heappop(boundary)
        chosen.append(node)
        for child in node.children.values():
            heapq.heappush(
                boundary, (cost - score(child), child.position, child.token, count, child)
            )
            count += 1
    return tuple(chosen)
