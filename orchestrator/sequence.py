"""One sequence being served: committed tokens, the draft tree after them, what is in flight."""

from dataclasses import dataclass, field

from orchestrator.lookup import NgramIndex
from orchestrator.request import FinishReason, Mode, PromptScored, Request, Stats, Stopper
from protos.draft_tree import DraftTree, Ids, Node
from protos.messages import PromptScores, Verdict
from protos.sampling import Score


@dataclass(frozen=True, slots=True)
class Flight:
    """What of a sequence is in the step now running: its frontier then, and the guesses.

    `pages` are what its table holds after the step.
    """

    step: int
    frontier: int
    end: int
    nodes: tuple[Node, ...]
    wanted: int
    clamp: str
    pages: int

    @property
    def is_prefill(self) -> bool:
        """True if the Extend stops short of the committed tokens and gets no verdict."""
        return self.end < self.frontier


@dataclass(slots=True)
class Drafting:
    """One opening of the sequence at a drafter, which has nothing to add at frontier `rests_at`."""

    drafter: int
    opening: int
    ids: Ids
    rests_at: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """What a verdict led to: the tokens that became visible, and whether they end the sequence.

    `scores` are the tokens', where they are asked for.
    """

    tokens: tuple[int, ...]
    scores: tuple[Score, ...]
    accepted: int
    hit: bool
    finish: FinishReason | None


@dataclass(slots=True)
class Sequence:
    """The owner of one sequence's state. Only the core and its desks call its methods.

    `cached` committed rows are in the target's cache once `keep`, the nodes of the last Extend
    that became committed, have been moved; its table there holds `pages`. `found` prompt tokens
    were in the prefix cache at first, those before `scored` need no score any more. `waiting_since`
    is when it last became runnable.
    """

    seq: int
    request: Request
    mode: Mode
    target: int
    stopper: Stopper
    tokens: list[int]
    limit: int
    tree: DraftTree
    deadline: float
    lookup: NgramIndex | None = None
    parent: "Sequence | None" = None
    ended: bool = False
    opened: bool = False
    cached: int = 0
    pages: int = 0
    found: int = 0
    scored: int = 1
    keep: tuple[int, ...] = ()
    flight: Flight | None = None
    drafting: Drafting | None = None
    openings: int = 0
    waiting_since: float = 0.0
    last_step: int = 0
    histogram: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    cut: int = 0
    wait_s: float = 0.0
    degraded: bool = False
    losses: int = 0

    @property
    def frontier(self) -> int:
        """Number of committed tokens; the root is at `frontier - 1`."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Committed rows the target has yet to compute, the root included."""
        return len(self.tokens) - self.cached

    @property
    def room(self) -> int:
        """Guesses that can still be of use: one token of the limit is the target's own."""
        return self.limit - len(self.tokens) - 1

    @property
    def awaits_parent(self) -> bool:
        """True while the rows it is to begin with are still being computed."""
        parent = self.parent
        if parent is None or parent.ended or self.opened or parent.target != self.target:
            return False
        return parent.cached < len(self.request.prompt)

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def most_pages(self) -> int:
        """What its table holds, the step now running included, whichever way that ends."""
        return self.pages if self.flight is None else max(self.pages, self.flight.pages)

    def take_up(self, cached: int, pages: int) -> None:
        """The target has opened it and found so much of it cached."""
        self.cached, self.pages = cached, pages
        if self.last_step == 0:
            self.found = min(cached, len(self.request.prompt))

    def take_scores(self, told: PromptScores) -> PromptScored | None:
        """The scores of prompt tokens that are new: what is computed again says them again."""
        new = told.scores[max(0, self.scored - told.start) :]
        if not new:
            return None
        start = told.start + len(told.scores) - len(new)
        self.scored = start + len(new)
        return PromptScored(start, new)

    def end_chunk(self) -> None:
        """A prefill chunk has been computed."""
        assert self.flight is not None and self.flight.is_prefill, "a chunk was in flight"
        self.cached, self.pages, self.flight = self.flight.end, self.flight.pages, None

    def reconcile(self, verdict: Verdict) -> Committed:
        """Commit what the verdict decided, up to a stop, and move the root of the tree."""
        flight = self.flight
        assert flight is not None and verdict.start == flight.frontier, "a verdict fits its flight"
        walk = [flight.nodes[i] for i in verdict.walk]
        tokens, finish = self._until_stop([n.token for n in walk] + [verdict.next_token])
        kept = min(len(walk), len(tokens))
        below = walk[-1].children if walk else self.tree.children
        hit = kept == len(walk) and len(tokens) > kept and verdict.next_token in below
        self._commit(tokens)
        self.keep = verdict.walk[:kept]
        self.cached = flight.frontier + kept
        self.pages = flight.pages
        self.flight = None
        self.losses = 0
        self._record(len(flight.nodes), kept, hit)
        self.cut += kept + 1 - len(tokens)
        scores = verdict.scores[: len(tokens)]
        return Committed(tuple(tokens), scores, kept, hit, finish)

    def stats(self) -> Stats:
        """The account of this sequence up to now."""
        return Stats(
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            hits=self.hits,
            cut=self.cut,
            histogram=tuple(self.histogram),
            wait_s=self.wait_s,
            degraded=self.degraded,
            cached=self.found,
        )

    def forget_target(self) -> None:
        """The target lost all it held: open anew, compute every committed row again.

        `losses` counts how often that happened while it was being computed, since it got on.
        """
        self.losses += self.flight is not None
        self.opened, self.cached, self.pages, self.keep, self.flight = False, 0, 0, (), None

    def _until_stop(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        if len(self.tokens) >= self.limit:  # only the prompt is scored
            return [], FinishReason.LENGTH
        for count, token in enumerate(tokens, start=1):
            if self.stopper.push(token):
                return tokens[:count], FinishReason.STOP
            if len(self.tokens) + count >= self.limit:
                return tokens[:count], FinishReason.LENGTH
        return tokens, None

    def _commit(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self.tree.advance(tokens)
        if self.drafting is not None:
            self.drafting.ids.reconcile(self.tree)
        if self.lookup is not None:
            self.lookup.extend(tokens)

    def _record(self, drafted: int, accepted: int, hit: bool) -> None:
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1
        self.drafted += drafted
        self.accepted += accepted
        self.hits += hit
