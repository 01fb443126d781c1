"""The draft tree and its walking rule, shared by both ends so that they hold the same tree.

A tree hangs under its root, the last committed token at position `frontier - 1`. Nodes are joined
by (parent, token), whatever source proposed them. Pure: no clock, no I/O.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum

from protos.messages import Guess

Source = str


class State(IntEnum):
    """What a node stands for now."""

    LIVE = 0
    COMMITTED = 1
    GONE = 2


class Node:
    """A guess that the token at `position` is `token`, given the path to its parent.

    `dist` is what it was drawn from, under rule `sampled`.
    """

    __slots__ = ("children", "dist", "parent", "position", "scores", "state", "token")

    def __init__(self, parent: "Node | None", position: int, token: int) -> None:
        self.parent = parent
        self.position = position
        self.token = token
        self.children: dict[int, Node] = {}
        self.scores: dict[Source, float] = {}
        self.dist = b""
        self.state = State.LIVE


class DraftTree:
    """All live guesses after position `frontier - 1` of one sequence."""

    __slots__ = ("children", "frontier", "size")

    def __init__(self, frontier: int) -> None:
        self.frontier = frontier
        self.children: dict[int, Node] = {}
        self.size = 0

    def add(self, parent: Node | None, token: int) -> Node:
        """The child of `parent` (None: the root) with this token, made if it is not there."""
        assert parent is None or parent.state is State.LIVE, "a node grows only under a live node"
        children = self.children if parent is None else parent.children
        node = children.get(token)
        if node is None:
            position = self.frontier if parent is None else parent.position + 1
            node = children[token] = Node(parent, position, token)
            self.size += 1
        return node

    def advance(self, tokens: Sequence[int]) -> list[Node]:
        """Move the root over newly committed tokens; the nodes walked, in order.

        Nodes off the walk are gone. Where the walk leaves the tree, the tree is empty.
        """
        walked: list[Node] = []
        for token in tokens:
            self.frontier += 1
            node = self.children.pop(token, None)
            self._drop(self.children)
            self.children = {}
            if node is None:
                continue
            node.state = State.COMMITTED
            self.children = node.children
            self.size -= 1
            for child in self.children.values():
                child.parent = None
            walked.append(node)
        return walked

    def drop_source(self, source: Source) -> None:
        """Forget what a source alone proposed, unless another source goes on from it."""
        for node in [*self.walk()][::-1]:  # children before their parents
            if len(node.scores) > 1:
                node.scores.pop(source, None)
            elif source in node.scores and not node.children:
                siblings = self.children if node.parent is None else node.parent.children
                del siblings[node.token]
                node.state = State.GONE
                self.size -= 1

    def walk(self) -> Iterator[Node]:
        """Every live node, parents before children."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _drop(self, children: dict[int, Node]) -> None:
        stack = list(children.values())
        while stack:
            node = stack.pop()
            node.state = State.GONE
            self.size -= 1
            stack.extend(node.children.values())


class Ids:
    """What every node id of one (source, opening) stands for, by the walking rule.

    Ids run on from 1. Nodes that are gone are forgotten, committed ones remembered for
    `memory` positions: a drafter with that many nodes of credit cannot refer further back.
    """

    __slots__ = ("_memory", "_nodes", "live", "next_id", "source")

    def __init__(self, source: Source, memory: int) -> None:
        self.source = source
        self.next_id = 1
        self.live = 0
        self._memory = memory
        self._nodes: dict[int, Node | int] = {}

    def place(
        self, tree: DraftTree, committed: Sequence[int], frontier: int, guess: Guess
    ) -> Node | None:
        """Take the guess with id `next_id`, sent at `frontier`; its live node, or None."""
        assert guess.id == self.next_id, "ids are taken in order"
        self.next_id += 1
        parent = frontier - 1 if guess.parent == 0 else self._stands_for(guess.parent)
        if parent is None:
            return None
        if isinstance(parent, int) and parent < tree.frontier - 1:
            if committed[parent + 1] == guess.token:
                self._nodes[guess.id] = parent + 1
            return None
        node = tree.add(None if isinstance(parent, int) else parent, guess.token)
        self.live += self.source not in node.scores
        node.scores[self.source] = guess.logprob
        self._nodes[guess.id] = node
        return node

    def skip(self) -> None:
        """Let the next id stand for nothing; so will all below it."""
        self.next_id += 1

    def reconcile(self, tree: DraftTree) -> None:
        """After the tree advanced: forget what is gone and what is too long ago."""
        oldest = tree.frontier - 1 - self._memory
        kept: dict[int, Node | int] = {}
        live = 0
        for id_, place in self._nodes.items():
            if isinstance(place, int) or place.state is State.COMMITTED:
                position = place if isinstance(place, int) else place.position
                if position >= oldest:
                    kept[id_] = position
            elif place.state is State.LIVE:
                kept[id_] = place
                live += 1
        self._nodes = kept
        self.live = live

    def _stands_for(self, id_: int) -> Node | int | None:
        place = self._nodes.get(id_)
        if isinstance(place, Node) and place.state is not State.LIVE:
            return place.position if place.state is State.COMMITTED else None
        return place
