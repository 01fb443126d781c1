"""The draft tree of one opening and what may grow on it next, best reach first.

Invariant: a node is added only while fewer than `credit` live. Reach is kept as a sum of
log-probabilities from a fixed point above the root, so moving the root reorders nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drafter_workers.config import GrowthConfig
from drafter_workers.proposer import Candidate
from protos.draft_tree import DraftTree, Node, State
from protos.messages import Guess

SOURCE = "drafter"


@dataclass(frozen=True, slots=True)
class Option:
    """Something to grow: a candidate to send under `node`, or `node` itself to expand.

    `node` of None is the root; `reach` is logarithmic, from the root.
    """

    node: Node | None
    reach: float
    depth: int
    candidate: Candidate | None = None


class Growth:
    """Gives ids in the order nodes are sent, from `next_id` on."""

    def __init__(
        self, frontier: int, credit: int, config: GrowthConfig, max_context: int, next_id: int = 1
    ) -> None:
        self.tree = DraftTree(frontier)
        self.credit = credit
        self.next_id = next_id
        self._config = config
        self._max_context = max_context
        self._log_floor = math.log(config.floor)
        self._ids: dict[Node, int] = {}
        self._totals: dict[Node | None, float] = {None: 0.0}
        self._leaves: dict[Node | None, None] = {None: None}
        self._held: dict[tuple[Node | None, int], Candidate] = {}

    @property
    def has_room(self) -> bool:
        """True while fewer nodes live than the credit allows."""
        return self.tree.size < self.credit

    def path(self, node: Node | None) -> tuple[int, ...]:
        """The ids from the root's child down to the node."""
        ids: list[int] = []
        while node is not None:
            ids.append(self._ids[node])
            node = node.parent
        return tuple(reversed(ids))

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Move the root over newly committed tokens; the ids of the nodes walked, in order."""
        if not tokens:
            return []
        walked = self.tree.advance(tokens)
        ids = [self._ids[node] for node in walked]
        root = walked[-1] if len(walked) == len(tokens) else None
        # Where the walk left the tree nothing lives below, and the new root is unexpanded.
        total, unexpanded = 0.0, True
        if root is not None:
            total, unexpanded = self._totals[root], root in self._leaves
        self._held = {
            (None if parent is root else parent, token): candidate
            for (parent, token), candidate in self._held.items()
            if parent is not None and (parent is root or parent.state is State.LIVE)
        }
        self._ids = {n: id_ for n, id_ in self._ids.items() if n.state is State.LIVE}
        self._totals = {None: total} | {n: self._totals[n] for n in self._ids}
        leaves: dict[Node | None, None] = {None: None} if unexpanded else {}
        self._leaves = leaves | {n: None for n in self._ids if n in self._leaves}
        return ids

    def expand(self, node: Node | None, candidates: Sequence[Candidate]) -> None:
        """Take what was proposed under a leaf; `send` says when it becomes nodes."""
        del self._leaves[node]
        for candidate in candidates:
            self._held[node, candidate.token] = candidate

    def leaves(self) -> Iterator[Option]:
        """The leaves to expand within credit, best first."""
        return (option for option in self._plan() if option.candidate is None)

    def send(self) -> tuple[tuple[Guess, ...], tuple[bytes, ...]]:
        """Turn the candidates that are due into nodes, best first; and what they were drawn from,
        if they were."""
        due = [option for option in self._plan() if option.candidate is not None]
        dists = tuple(option.candidate.dist for option in due if option.candidate)
        return tuple(self._add(option) for option in due), dists if any(dists) else ()

    def _add(self, option: Option) -> Guess:
        parent, candidate = option.node, option.candidate
        assert candidate is not None, "only a candidate becomes a node"
        del self._held[parent, candidate.token]
        node = self.tree.add(parent, candidate.token)
        node.scores[SOURCE] = candidate.logprob
        id_ = self._ids[node] = self.next_id
        self.next_id += 1
        self._totals[node] = self._totals[parent] + candidate.stands
        self._leaves[node] = None
        above = 0 if parent is None else self._ids[parent]
        return Guess(id_, above, candidate.token, candidate.logprob)

    def _plan(self) -> list[Option]:
        """Leaves and candidates above the floor, best first, as far as credit goes.

        A leaf takes the credit its children will need, lest less likely candidates use it up.
        """
        room = self.credit - self.tree.size
        if room <= 0:
            return []
        options = sorted(self._options(), key=lambda option: (-option.reach, option.depth))
        plan: list[Option] = []
        for option in options:
            plan.append(option)
            room -= self._config.width if option.candidate is None else 1
            if room <= 0:
                break
        return plan

    def _options(self) -> Iterator[Option]:
        base = self._totals[None]
        for node in self._leaves:
            depth = self._depth(node)
            if self.tree.frontier + depth < self._max_context:
                yield Option(node, self._totals[node] - base, depth)
        for (node, _), candidate in self._held.items():
            reach = self._totals[node] - base + candidate.stands
            if reach >= self._log_floor:
                yield Option(node, reach, self._depth(node) + 1, candidate)

    def _depth(self, node: Node | None) -> int:
        return 0 if node is None else node.position - self.tree.frontier + 1
