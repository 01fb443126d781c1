"""Requests served by one target alone or together, with the bits behind each of their tokens."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile

from torch import Tensor

from protos.messages import Extend, StepClose, StepOpen, TreeNode, Verdict
from protos.sampling import Sampling
from target_workers.engine import TargetEngine
from target_workers.model.batch import RowBatch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from tests.driver import Driver

MOST = 8  # sequences at once
CHUNKS = (1, 2, 7, 8, 9, 31, 130, 200)
COUNTS = (0, 1, 2, 4, 4, 8)  # of guesses in a round
SHARES = (0.0, 0.5, 0.85, 1.0)  # of these, right ones


class Recorder:
    """A decoder that keeps a digest of every row of logits that it gave."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._digests: list[bytes] = []

    def hidden(self, batch: RowBatch, cache: KVCache) -> Tensor:
        return self.decoder.hidden(batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.logits(hidden)
        self._digests += digests(logits)
        return logits

    def take(self) -> list[bytes]:
        """The digests since this was last asked for."""
        taken, self._digests = self._digests, []
        return taken


def digests(logits: Tensor) -> list[bytes]:
    """Of each row."""
    return [blake2b(row, digest_size=16).digest() for row in logits.numpy()]


@dataclass(frozen=True, slots=True)
class Server:
    """A target, and what its decoder gave."""

    engine: TargetEngine
    recorder: Recorder

    @property
    def vocab_size(self) -> int:
        return self.engine.hello().vocab_size

    @property
    def page_size(self) -> int:
        return self.engine.hello().page_size

    @property
    def num_pages(self) -> int:
        return self.engine.hello().num_pages

    def driver(self) -> Driver:
        """Of the engine, which holds nothing any more."""
        driver = Driver(self.engine)
        driver.reset()
        self.recorder.take()
        return driver


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for `count` tokens."""

    prompt: tuple[int, ...]
    sampling: Sampling
    count: int


@dataclass(slots=True)
class Line:
    """A request as it is served: its tokens so far, and of each that it was given the logits' bits.

    `cached` of the tokens are in the cache once `keep` of the last guesses are moved.
    """

    index: int
    asked: Asked
    tokens: list[int]
    bits: list[bytes] = field(default_factory=list)
    seq: int = 0
    cached: int = 0
    keep: tuple[int, ...] = ()

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.asked.prompt) :][: self.asked.count]


def serve_alone(server: Server, asked: Sequence[Asked]) -> list[Line]:
    """Plain decoding: one after the other, a prompt at once, a token a step, nothing shared."""
    driver, lines = server.driver(), []
    for i, each in enumerate(asked):
        line = Line(i, each, list(each.prompt), seq=i + 1)
        driver.open(line.seq, each.prompt, each.sampling, prefix_cache=False)
        driver.decode(line.seq, line.tokens, 0, each.count)
        driver.close(line.seq)
        line.bits = server.recorder.take()
        lines.append(line)
    return lines


class Crowd:
    """Requests served together: some guess, some are prefilled, some wait for pages.

    Which do hangs on `seed`, not on the answers. `right` are the same served alone: guesses are
    made of their outputs. A sequence that finds no page is closed, and opened anew with what it has
    as its prompt. `counts` says how many were so `paused`, how many were given a copy of a part of
    a page, and in how many steps guesses were `mixed` with chunks of prompts.
    """

    def __init__(self, server: Server, right: Sequence[Line], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._server, self._driver = server, server.driver()
        self._draw = random.Random(seed)
        self._right = right
        self._lines = [Line(i.index, i.asked, list(i.asked.prompt)) for i in right]
        self._waiting = list(self._lines)
        self._running: dict[int, Line] = {}
        self._closes: list[StepClose] = []
        self._seq, self._free = 0, server.num_pages

    def serve(self) -> list[Line]:
        """All of them, in the order of the requests."""
        for _ in range(100 * len(self._lines)):
            if not self._waiting and not self._running:
                self._driver.send(closes=self._closes)
                return self._lines
            self._step()
        raise AssertionError(f"{len(self._waiting)} wait and {len(self._running)} run for ever")

    def _step(self) -> None:
        extends = [self._extend(i) for i in self._running.values() if self._draw.random() < 0.8]
        opened = self._admit()
        opens = [
            StepOpen(i.seq, tuple(i.tokens), i.asked.sampling, parent=self._parent(i))
            for i in opened
        ]
        closes, self._closes = self._closes, []
        stepped = self._driver.send(opens, extends, closes)
        self._free = stepped.free_pages
        for line, found in zip(opened, stepped.cached, strict=True):
            line.cached = found
            self.counts["copied"] += found % self._server.page_size > 0
            self._running[line.seq] = line
        verdicts, bits = {v.seq: v for v in stepped.verdicts}, iter(self._server.recorder.take())
        for extend in extends:
            self._take(extend, verdicts.get(extend.seq), bits)
        assert next(bits, None) is None, "a row was drawn from that no verdict is of"
        has_chunk = any(len(extend.tokens) > 1 for extend in extends)
        self.counts["mixed"] += has_chunk and any(extend.nodes for extend in extends)

    def _admit(self) -> list[Line]:
        """Those that come next, while a page is free; each with a sequence id of its own."""
        count = min(self._draw.randrange(4), MOST - len(self._running)) if self._free else 0
        admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        for line in admitted:
            self._seq += 1
            line.seq, line.keep = self._seq, ()
        return admitted

    def _parent(self, line: Line) -> int:
        """The one that runs with the most of its first tokens."""
        return max(self._running, key=lambda seq: _shared(self._running[seq], line), default=-1)

    def _extend(self, line: Line) -> Extend:
        """The next of its tokens, and guesses if those are the last ones."""
        tokens = line.tokens[line.cached :][: self._draw.choice(CHUNKS)]
        is_whole = line.cached + len(tokens) == len(line.tokens)
        right = self._right[line.index].output[len(line.output) :]
        nodes = make_guesses(self._draw, right, self._server.vocab_size) if is_whole else ()
        return Extend(line.seq, line.cached, tuple(tokens), nodes, line.keep)

    def _take(self, extend: Extend, verdict: Verdict | None, bits: Iterator[bytes]) -> None:
        line = self._running[extend.seq]
        line.cached, line.keep = extend.start + len(extend.tokens), ()
        if verdict is None:
            return
        if verdict.error:
            assert "out of pages" in verdict.error
            self.counts["paused"] += 1
            self._waiting.append(line)
            self._close(line)
            return
        assert verdict.start == len(line.tokens)
        rows = list(islice(bits, 1 + len(extend.nodes)))
        line.bits += [rows[1 + i] for i in (-1, *verdict.walk)]
        line.tokens += [*(extend.nodes[i].token for i in verdict.walk), verdict.next_token]
        line.cached, line.keep = line.cached + len(verdict.walk), verdict.walk
        if len(line.output) == line.asked.count:
            self._close(line)

    def _close(self, line: Line) -> None:
        self._closes.append(StepClose(line.seq, line.keep))
        del self._running[line.seq]


def _shared(one: Line, other: Line) -> int:
    """How many tokens two begin with alike."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def make_guesses(draw: random.Random, right: Sequence[int], vocab: int) -> tuple[TreeNode, ...]:
    """A chain or a tree; at each depth the right token by chance, under whatever parent."""
    share, is_chain = draw.choice(SHARES), draw.random() < 0.5
    nodes: dict[TreeNode, int] = {}  # and their depths
    for i in range(draw.choice(COUNTS)):
        parent = i - 1 if is_chain or draw.random() < 0.6 else draw.randrange(-1, i)
        depth = [*nodes.values()][parent] + 1 if parent >= 0 else 0
        is_right = depth < len(right) and draw.random() < share
        node = TreeNode(parent, right[depth] if is_right else draw.randrange(vocab))
        while node in nodes:
            node = TreeNode(parent, draw.randrange(vocab))
        nodes[node] = depth
    return tuple(nodes)
