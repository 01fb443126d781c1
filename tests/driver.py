"""Sends a target engine the steps that a test asks for, one by one."""

from collections.abc import Sequence

from protos.messages import Extend, StepClose, StepOpen, Stepped, Verdict
from protos.sampling import GREEDY, Sampling
from target_workers.engine import TargetEngine
from tests.duo import audit, step


class Driver:
    """Numbers the steps, and has the engine account for its memory after each."""

    def __init__(self, engine: TargetEngine) -> None:
        self.engine = engine
        self._step = 0

    def send(
        self,
        opens: Sequence[StepOpen] = (),
        extends: Sequence[Extend] = (),
        closes: Sequence[StepClose] = (),
    ) -> Stepped:
        self._step += 1
        (stepped,) = self.engine.handle(step(self._step, opens, extends, closes))
        assert isinstance(stepped, Stepped)
        audit(self.engine)
        return stepped

    def open(
        self, seq: int, tokens: Sequence[int], sampling: Sampling = GREEDY, **fields: object
    ) -> int:
        """Open a sequence by itself; how many tokens were found."""
        (found,) = self.send([StepOpen(seq, tuple(tokens), sampling, **fields)]).cached
        return found

    def extend(self, seq: int, start: int, tokens: Sequence[int], nodes=(), keep=()) -> Verdict:
        (verdict,) = self.send([], [Extend(seq, start, tuple(tokens), nodes, keep)]).verdicts
        return verdict

    def decode(self, seq: int, tokens: list[int], start: int, count: int) -> list[int]:
        """Compute `tokens` from `start` on and then one token a step; all `count` new ones.

        They are appended to `tokens`.
        """
        new: list[int] = []
        for _ in range(count):
            verdict = self.extend(seq, start, tokens[start:])
            assert verdict.error == ""
            start = len(tokens)
            tokens.append(verdict.next_token)
            new.append(verdict.next_token)
        return new

    def close(self, *seqs: int) -> Stepped:
        return self.send(closes=[StepClose(seq) for seq in seqs])

    def reset(self) -> None:
        """Begin anew, as over another link."""
        self.engine.reset()
        self._step = 0
