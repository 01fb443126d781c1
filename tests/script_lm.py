"""A toy language model without torch, and a target made of it: the engine is the real one.

Rows of its cache hold what they were computed from, so a wrong keep, a stale row or a row of
another sequence changes the output, as it would in a real cache.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protos.messages import PROTOCOL, Hello
from protos.sampling import GREEDY, Sampling
from target_workers.drawn import Decided, Drawn, by_match
from target_workers.engine import TargetEngine
from target_workers.model.chooser import Choosers
from target_workers.model.run import Run
from target_workers.pages import Slots
from target_workers.rows import Block, Draws
from target_workers.runner import Forward

_MASK = 2**64 - 1


def _hash(*values: int) -> int:
    """Splitmix64 over a few integers."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def _unit(*values: int) -> float:
    """Uniform in (0, 1)."""
    return ((_hash(*values) >> 11) + 0.5) * 2.0**-53


class ScriptLM:
    """Scores are a fixed function of the last `order` tokens.

    Two models of one seed agree but for a share of `flaw` of all contexts: a fair drafter.
    """

    def __init__(self, vocab: int = 32, seed: int = 0, order: int = 3, flaw: float = 0.0) -> None:
        self.vocab = vocab
        self._seed = seed
        self._order = order
        self._flaw = flaw
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def scores(self, prefix: Sequence[int]) -> tuple[float, ...]:
        """The logits of the token after a prefix."""
        context = tuple(prefix[-self._order :])
        scores = self._known.get(context)
        if scores is None:
            scores = tuple(8.0 * _unit(self._seed, v, *context) for v in range(self.vocab))
            if _unit(self._seed, -1 & _MASK, *context) < self._flaw:
                scores = scores[1:] + scores[:1]
            self._known[context] = scores
        return scores

    def ranked(
        self, prefix: Sequence[int], sampling: Sampling, position: int | None = None
    ) -> list[int]:
        """All tokens by their score with the noise of their position; ties to the lowest id."""
        scores = self.scores(prefix)
        if sampling.temperature > 0.0:
            at = len(prefix) if position is None else position
            scores = tuple(
                score / sampling.temperature - math.log(-math.log(_unit(sampling.seed, at, v)))
                for v, score in enumerate(scores)
            )
        return sorted(range(self.vocab), key=lambda v: (-scores[v], v))

    def choose(self, prefix: Sequence[int], sampling: Sampling = GREEDY) -> int:
        """The model's own next token."""
        return self.ranked(prefix, sampling)[0]

    def logprob(self, prefix: Sequence[int], sampling: Sampling, token: int) -> float:
        """Of the softmax at the temperature; at temperature 0 of the plain one."""
        temperature = sampling.temperature or 1.0
        scores = [score / temperature for score in self.scores(prefix)]
        return scores[token] - math.log(sum(map(math.exp, scores)))


def ref_decode(
    lm: ScriptLM,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling = GREEDY,
    stop_ids: Iterable[int] = (),
) -> list[int]:
    """Plain decoding, one token at a time; the token that stops is the last."""
    stops = set(stop_ids)
    output: list[int] = []
    while len(output) < n and not (output and output[-1] in stops):
        output.append(lm.choose([*prompt, *output], sampling))
    return output


@dataclass(frozen=True, slots=True)
class Row:
    """What a slot of the cache was computed from; `digest` stands for the whole path."""

    position: int
    token: int
    digest: int


class ScriptForward:
    """The model behind a TargetEngine. After a token of `broken` the logits are not finite.

    So are those of every row of its run, as in attention, where masked keys count 0 x NaN.
    """

    def __init__(self, lm: ScriptLM, num_slots: int, broken: Iterable[int] = ()) -> None:
        self._lm = lm
        self._broken = frozenset(broken)
        self._rows: list[Row | None] = [None] * num_slots

    def move(self, source: Slots, target: Slots) -> None:
        rows = self._held(source.tolist())
        for slot, row in zip(target.tolist(), rows, strict=True):
            self._rows[slot] = row

    def set_cores(self, count: int) -> None:
        return

    def decide(self, runs: Sequence[Run], draws: Draws) -> Decided:
        paths = [path for run in runs for path in self._write(run)]
        sound = [self._broken.isdisjoint(run.tokens.tolist()) for run in runs for _ in run.tokens]
        return Decided([self._drawn(block, draws, paths, sound) for block in draws.blocks])

    def _drawn(
        self,
        block: Block,
        draws: Draws,
        paths: Sequence[tuple[tuple[int, ...], bool]],
        sound: Sequence[bool],
    ) -> Drawn:
        tokens: list[int] = []
        for i in block.draws:
            path, intact = paths[draws.rows[i]]
            token = self._lm.ranked(path, block.chooser.sampling, draws.positions[i])[0]
            tokens.append(token if intact else (token + 1) % self._lm.vocab)
        return by_match(block, tokens, [sound[draws.rows[i]] for i in block.draws])

    def _held(self, slots: list[int]) -> list[Row | None]:
        return [self._rows[slot] for slot in slots]

    def _hold(self, slot: int, row: Row) -> None:
        self._rows[slot] = row

    def _write(self, run: Run) -> list[tuple[list[int], bool]]:
        """Write the rows of a run; each row's path as the cache has it, and if it is intact."""
        path, digest, intact = self._read(run.history.tolist())
        intact = intact and len(path) == run.start
        found: list[tuple[list[int], bool]] = []
        for token, slot in zip(run.tokens.tolist(), run.slots.tolist(), strict=True):
            digest = _hash(digest, token, intact)
            self._hold(slot, Row(len(path), token, digest))
            path = [*path, token]
            found.append((path, intact))
        return found

    def _read(self, slots: list[int]) -> tuple[list[int], int, bool]:
        path: list[int] = []
        digest, intact = 0, True
        for position, row in enumerate(self._held(slots)):
            if row is None:
                return path, digest, False
            digest = _hash(digest, row.token, True)
            intact = intact and (row.position, row.digest) == (position, digest)
            path.append(row.token)
        return path, digest, intact


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a scripted worker."""

    max_context: int = 128
    page_size: int = 4
    num_pages: int = 256
    max_rows: int = 256
    incarnation: int = 1

    @property
    def num_slots(self) -> int:
        return self.page_size * self.num_pages

    def hello(self, role: str, lm: ScriptLM) -> Hello:
        return Hello(
            PROTOCOL,
            role,
            self.incarnation,
            "script",
            "script",
            lm.vocab,
            self.max_context,
            self.page_size,
            self.num_pages,
            self.max_rows,
        )


def script_target(
    lm: ScriptLM,
    shape: Shape = Shape(),
    broken: Iterable[int] = (),
    forward: Callable[[ScriptLM, int, Iterable[int]], Forward] = ScriptForward,
) -> TargetEngine:
    """The real target engine over a scripted model."""
    model = forward(lm, shape.num_slots, broken)
    return TargetEngine(shape.hello("target", lm), model, Choosers(lm.vocab), lambda: 0.0)
