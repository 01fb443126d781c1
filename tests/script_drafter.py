"""Toy drafters without torch: what they guess is scripted, the engine around them is real."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafter_workers.config import GrowthConfig
from drafter_workers.engine import DraftEngine
from drafter_workers.proposer import Candidate, Expand, Proposer
from protos.sampling import Sampling
from tests.script_lm import ScriptLM, Shape

CHAINS = GrowthConfig()
SLOTS = Shape(page_size=1, num_pages=1024)


def script_drafter(
    lm: ScriptLM,
    proposer: Proposer,
    growth: GrowthConfig = CHAINS,
    shape: Shape = SLOTS,
) -> DraftEngine:
    """The real drafter engine over a scripted proposer."""
    return DraftEngine(shape.hello("drafter", lm), proposer, growth, lambda: 0.0)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where children are wanted: `prefix` includes the path. The tree last began anew for the
    `restarts`-th time, at `restart` committed tokens."""

    prefix: list[int]
    sampling: Sampling
    restart: int
    restarts: int


Guesser = Callable[[Spot, int], list[Candidate]]


def perfect(lm: ScriptLM, confidence: float = 0.99) -> Guesser:
    """The target's own tokens, and sure of them."""
    return lambda spot, width: _stated(lm.ranked(spot.prefix, spot.sampling)[:width], confidence)


def honest(lm: ScriptLM) -> Guesser:
    """The model's tokens by the shared noise, with the log-probabilities they have."""

    def guess(spot: Spot, width: int) -> list[Candidate]:
        tokens = lm.ranked(spot.prefix, spot.sampling)[:width]
        return [Candidate(t, lm.logprob(spot.prefix, spot.sampling, t)) for t in tokens]

    return guess


def worst(lm: ScriptLM, confidence: float = 0.9) -> Guesser:
    """Never the target's token, and sure of it."""

    def guess(spot: Spot, width: int) -> list[Candidate]:
        return _stated(lm.ranked(spot.prefix, spot.sampling)[:0:-1][:width], confidence)

    return guess


def pattern(lm: ScriptLM, rights: Sequence[int]) -> Guesser:
    """In round i the first rights[i] guesses are right and the next is wrong, over and over.

    A round is from one miss to the next: one verdict if all these guesses are verified at once.
    """
    right, wrong = perfect(lm), worst(lm)

    def guess(spot: Spot, width: int) -> list[Candidate]:
        goal = rights[spot.restarts % len(rights)]
        return (right if len(spot.prefix) - spot.restart < goal else wrong)(spot, width)

    return guess


def _stated(tokens: Sequence[int], confidence: float) -> list[Candidate]:
    """Geometric: each token takes that share of what is left."""
    return [
        Candidate(token, math.log(confidence) + rank * math.log1p(-confidence))
        for rank, token in enumerate(tokens)
    ]


@dataclass(slots=True)
class _Drafted:
    """A sequence at a TokenProposer. `nodes` has the parent and token of every live node."""

    tokens: list[int]
    sampling: Sampling
    restart: int
    restarts: int = 0
    computed: int = 0
    root: int = 0
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)


class TokenProposer:
    """A proposer that computes from token lists and checks that it is used as it must be."""

    def __init__(self, guesser: Guesser, shape: Shape = SLOTS) -> None:
        self.max_context = shape.max_context
        self.max_rows = shape.max_rows
        self._guesser = guesser
        self._total = shape.num_slots
        self._sequences: dict[int, _Drafted] = {}

    def open(self, seq: int, tokens: Sequence[int], sampling: Sampling) -> None:
        assert seq not in self._sequences, "opened twice"
        assert 0 < len(tokens) < self.max_context, "a sequence must fit"
        self._sequences[seq] = _Drafted(list(tokens), sampling, restart=len(tokens))

    def name(self, seq: int, parent: int, id_: int, token: int) -> None:
        state = self._sequences[seq]
        assert id_ not in state.nodes, "an id is given once"
        if parent == 0:
            assert state.computed == len(state.tokens), "children of a root that was not expanded"
        else:
            assert parent in state.expanded, "children of a node that was not expanded"
        state.nodes[id_] = (parent, token)

    def advance(self, seq: int, tokens: Sequence[int], walked: Sequence[int]) -> None:
        state = self._sequences[seq]
        assert not walked or state.computed == len(state.tokens), "a tree under no row"
        above: tuple[int, ...] = (0, state.root)
        for id_, token in zip(walked, tokens, strict=False):
            parent, known = state.nodes[id_]
            assert parent in above, "the walk is no path"
            assert known == token, "the walk is not what was committed"
            state.computed += id_ in state.expanded
            above = (id_,)
        state.tokens.extend(tokens)
        self._reroot(state, walked[-1] if len(walked) == len(tokens) else 0)

    def close(self, seq: int) -> None:
        del self._sequences[seq]

    def pending(self, seq: int) -> int:
        state = self._sequences[seq]
        return max(0, len(state.tokens) - 1 - state.computed)

    def feed(self, seq: int, rows: int) -> None:
        assert 0 < rows <= min(self.pending(seq), self.max_rows), "fed more than there is"
        self._sequences[seq].computed += rows
        assert self.slots()[1] >= 0, "out of slots"

    def propose(self, batch: Sequence[Expand], width: int) -> list[tuple[Candidate, ...]]:
        assert len(set(batch)) == len(batch) > 0, "a node is expanded once"
        rows = sum(1 if expand.node else 1 + self.pending(expand.seq) for expand in batch)
        assert rows <= self.max_rows, "too many rows"
        return [self._propose(expand, width) for expand in batch]

    def rows_held(self, seq: int) -> tuple[int, int]:
        state = self._sequences[seq]
        return state.computed, state.computed + len(state.expanded)

    def slots(self) -> tuple[int, int]:
        used = sum(self.rows_held(seq)[1] for seq in self._sequences)
        return self._total, self._total - used

    def _reroot(self, state: _Drafted, root: int) -> None:
        if root == 0:
            state.restart, state.restarts = len(state.tokens), state.restarts + 1
            state.nodes.clear()
        before, state.root = state.nodes, root
        state.nodes = {}
        for id_, (parent, token) in sorted(before.items()):
            if parent == root or parent in state.nodes:
                state.nodes[id_] = (parent, token)
        state.expanded &= state.nodes.keys()

    def _propose(self, expand: Expand, width: int) -> tuple[Candidate, ...]:
        state = self._sequences[expand.seq]
        above: tuple[int, ...] = (0, state.root)
        for id_ in expand.path:
            assert state.nodes[id_][0] in above, "the path is no path"
            above = (id_,)
        if expand.node == 0:
            assert not expand.path, "the root has no path"
            assert state.computed < len(state.tokens), "the root is expanded once"
            state.computed = len(state.tokens)
        else:
            assert expand.path[-1] == expand.node, "the path leads to the node"
            assert expand.node not in state.expanded, "a node is expanded once"
            assert state.expanded.issuperset(expand.path[:-1]), "a row above is missing"
            state.expanded.add(expand.node)
        assert self.slots()[1] >= 0, "out of slots"
        prefix = state.tokens + [state.nodes[id_][1] for id_ in expand.path]
        assert len(prefix) < self.max_context, "children beyond the context"
        spot = Spot(prefix, state.sampling, state.restart, state.restarts)
        return tuple(self._guesser(spot, width))
