"""The drafter's side of a link: follows committed tokens and grows the draft trees it serves.

Invariant: after the same messages both ends hold the same tree. Between two forwards every message
is taken; nothing here waits.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence

from drafter_workers.config import GrowthConfig
from drafter_workers.growth import Growth
from drafter_workers.proposer import Expand, Proposer
from drafter_workers.survey import Drafted, Pick, choose, survey
from protos.draft_tree import DraftTree
from protos.messages import (
    Advance,
    Audit,
    AuditReply,
    Close,
    Counter,
    Grow,
    Held,
    Hello,
    Message,
    Need,
    Open,
    Report,
)
from protos.worker import ProtocolError


class DraftEngine:
    """An Engine over one proposer; `hello` says what it is."""

    def __init__(
        self,
        hello: Hello,
        proposer: Proposer,
        config: GrowthConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._hello = hello
        self._proposer = proposer
        self._config = config
        self._clock = clock
        self._sequences: dict[int, Drafted] = {}
        self._counts: Tally[str] = Tally()
        self._fed_last = False
        self._window_s = 0.0

    def hello(self) -> Hello:
        return self._hello

    def tree(self, seq: int) -> DraftTree:
        """The draft tree of an open sequence, to look at."""
        return self._sequences[seq].growth.tree

    def reset(self) -> None:
        for drafted in self._sequences.values():
            self._stop(drafted)
        self._sequences.clear()

    def handle(self, message: Message) -> list[Message]:
        match message:
            case Open():
                self._open(message)
                return []
            case Advance():
                drafted = self._known(message.seq, message.opening)
                return [] if drafted is None else self._advance(drafted, message)
            case Close():
                drafted = self._known(message.seq, message.opening)
                if drafted is not None:
                    self._stop(drafted)
                    del self._sequences[message.seq]
                return []
            case Audit():
                return [self._audit(message)]
        raise ProtocolError(f"a drafter takes no {type(message).__name__}")

    def work(self) -> list[Message] | None:
        """One forward: a piece of catching up, or growth; by turns if both are due.

        Before it, whatever will get nothing is named, so that nobody waits for it.
        """
        found = survey(self._sequences.values(), self._proposer, self._config)
        stuck = [(drafted, cause) for drafted, cause in found.stuck if not drafted.resigned]
        if stuck:
            return [self._resign(drafted, cause) for drafted, cause in stuck]
        picks = choose(found.picks, self._proposer, self._config.batch)
        if found.behind and not (picks and self._fed_last):
            self._feed(min(found.behind, key=lambda drafted: self._proposer.pending(drafted.seq)))
            return []
        self._fed_last = False
        return self._grow(picks) if picks else None

    def _known(self, seq: int, opening: int) -> Drafted | None:
        """The sequence, if this is its opening now; a message of another one is of the past."""
        drafted = self._sequences.get(seq)
        if drafted is None or drafted.opening != opening:
            self._counts.update(["unknown" if drafted is None else "stale"])
            return None
        return drafted

    def _open(self, message: Open) -> None:
        known = self._sequences.get(message.seq)
        if known is not None:
            if message.opening <= known.opening:
                self._counts.update(["stale"])
                return
            self._stop(known)
        tokens = list(message.tokens)
        growth = self._new_growth(len(tokens), message.credit, next_id=1)
        drafted = Drafted(message.seq, message.opening, tokens, message.sampling, growth)
        self._sequences[message.seq] = drafted
        self._counts.update(["openings"])
        self._start(drafted)

    def _advance(self, drafted: Drafted, message: Advance) -> list[Message]:
        have = len(drafted.tokens)
        if message.start < 0:
            raise ProtocolError(f"an Advance from position {message.start}")
        if message.start > have:
            self._counts.update(["needs"])
            return [Need(message.seq, message.opening, have)]
        overlap = drafted.tokens[message.start : message.start + len(message.tokens)]
        if list(message.tokens[: len(overlap)]) != overlap:
            self._counts.update(["faults"])
            self._forget(drafted)
            return [Need(message.seq, message.opening, 0)]
        drafted.growth.credit = message.credit
        drafted.resigned = False
        self._commit(drafted, message.tokens[len(overlap) :])
        return self._send(drafted)

    def _commit(self, drafted: Drafted, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        fresh = not drafted.tokens
        drafted.tokens.extend(tokens)
        walked = drafted.growth.advance(tokens)
        if fresh:
            self._start(drafted)
        elif drafted.proposing and self._can_draft(len(drafted.tokens), tokens):
            self._proposer.advance(drafted.seq, tokens, walked)
        else:
            self._stop(drafted)

    def _forget(self, drafted: Drafted) -> None:
        """Drop all that was committed; ids go on, since the other end has seen them."""
        self._stop(drafted)
        drafted.tokens.clear()
        drafted.growth = self._new_growth(0, drafted.growth.credit, next_id=drafted.growth.next_id)

    def _start(self, drafted: Drafted) -> None:
        if drafted.tokens and self._can_draft(len(drafted.tokens), drafted.tokens):
            self._proposer.open(drafted.seq, drafted.tokens, drafted.sampling)
            drafted.proposing = True

    def _stop(self, drafted: Drafted) -> None:
        if drafted.proposing:
            self._proposer.close(drafted.seq)
            drafted.proposing = False

    def _can_draft(self, length: int, tokens: Sequence[int]) -> bool:
        """False for a sequence that leaves the drafter's context or vocabulary."""
        if length >= self._proposer.max_context:
            self._counts.update(["too_long"])
            return False
        if max(tokens) >= self._hello.vocab_size:
            self._counts.update(["foreign"])
            return False
        return True

    def _new_growth(self, frontier: int, credit: int, next_id: int) -> Growth:
        return Growth(frontier, credit, self._config, self._proposer.max_context, next_id)

    def _resign(self, drafted: Drafted, cause: str) -> Grow:
        drafted.resigned = True
        self._counts.update([cause])
        return Grow(drafted.seq, drafted.opening, len(drafted.tokens), ())

    def _feed(self, drafted: Drafted) -> None:
        self._fed_last = True
        rows = min(self._config.feed_rows, self._proposer.pending(drafted.seq))
        self._proposer.feed(drafted.seq, rows)
        self._counts.update(fed_rows=rows)

    def _grow(self, picks: list[Pick]) -> list[Message]:
        """Expand leaves in one forward; one Grow for each sequence that got nodes."""
        batch = []
        for pick in picks:
            path = pick.drafted.growth.path(pick.leaf.node)
            batch.append(Expand(pick.drafted.seq, path[-1] if path else 0, path))
        started = self._clock()
        proposals = self._proposer.propose(batch, self._config.width)
        self._window_s += self._clock() - started
        self._counts.update(forwards=1, expanded=len(batch))
        for pick, candidates in zip(picks, proposals, strict=True):
            pick.drafted.growth.expand(pick.leaf.node, candidates)
        grown = {pick.drafted.seq: pick.drafted for pick in picks}
        messages = [message for drafted in grown.values() for message in self._send(drafted)]
        return messages + self._report()

    def _send(self, drafted: Drafted) -> list[Message]:
        """The candidates that are due, as nodes."""
        guesses, dists = drafted.growth.send() if drafted.proposing else ((), ())
        if not guesses:
            return []
        for guess in guesses:
            self._proposer.name(drafted.seq, guess.parent, guess.id, guess.token)
        self._counts.update(nodes=len(guesses))
        return [Grow(drafted.seq, drafted.opening, len(drafted.tokens), guesses, dists)]

    def _report(self) -> list[Message]:
        forwards = self._counts["forwards"]
        if forwards % self._config.report_every:
            return []
        mean_s = self._window_s / self._config.report_every
        self._window_s = 0.0
        live = sum(drafted.growth.tree.size for drafted in self._sequences.values())
        return [Report(live, mean_s, forwards)]

    def _audit(self, audit: Audit) -> AuditReply:
        total, free = self._proposer.slots()
        held = tuple(
            Held(seq, *(self._proposer.rows_held(seq) if drafted.proposing else (0, 0)))
            for seq, drafted in sorted(self._sequences.items())
        )
        assert free + sum(h.pages for h in held) == total, "a cache slot is lost"
        counters = tuple(Counter(name, value) for name, value in sorted(self._counts.items()))
        return AuditReply(audit.nonce, total, free, 0, held, counters)
