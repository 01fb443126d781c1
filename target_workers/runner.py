"""Runs the Extends of a step through the model; what fails in company or with its guesses is tried
again without.

Invariant: neither another sequence nor a guess changes what an Extend gives, not even its end.
"""

import logging
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from protos.messages import Extend, Sampling
from protos.worker import GroupBroken
from target_workers.acceptance import walk
from target_workers.model.run import Run
from target_workers.pages import Slots
from target_workers.rows import Draws, Layout

log = logging.getLogger(__name__)


class Forward(Protocol):
    """The model and its KV cache."""

    def move(self, source: Slots, target: Slots) -> None:
        """Copy rows between slots: all are read before one is written."""

    def choose(self, runs: Sequence[Run], draws: Draws) -> tuple[list[int], list[bool]]:
        """Compute all runs in one forward; per draw its token, and if the logits are finite."""


@dataclass(frozen=True, slots=True)
class Job:
    """An Extend, the slot of every row of its sequence, and how its token is drawn, if one is."""

    extend: Extend
    slots: Slots
    decides: Sampling | None

    @property
    def bare(self) -> "Job":
        """The same without guesses."""
        return replace(self, extend=replace(self.extend, nodes=()))


@dataclass(frozen=True, slots=True)
class Drawn:
    """The nodes that stand and the target's own token after them, or why there is none."""

    walk: tuple[int, ...] = ()
    next_token: int = -1
    error: str = ""


class Runner:
    """Computes on one Forward and counts what it does in `counts`."""

    def __init__(self, forward: Forward, counts: Tally[str]) -> None:
        self._forward = forward
        self._counts = counts

    def run(self, jobs: Sequence[Job]) -> list[Drawn]:
        """What each Extend led to, in order; nothing of a prefill chunk that went well.

        A guess whose row is not finite spoils the rows above it that share its call, since a masked
        key still counts 0 x NaN: where that could be, the Extend is computed without guesses.
        """
        drawn = self._attempt(jobs)
        again = [i for i, job in enumerate(jobs) if drawn[i].error and job.extend.nodes]
        if again:
            self._counts.update(bared=len(again))
            for i, second in zip(again, self._attempt([jobs[i].bare for i in again]), strict=True):
                drawn[i] = second
        return drawn

    def _attempt(self, jobs: Sequence[Job]) -> list[Drawn]:
        """All in one forward; if that raises, each in its own, and those that raise then fail."""
        try:
            return self._together(jobs)
        except GroupBroken:
            raise  # To go on alone would be to compute what the other ranks do not.
        except Exception as error:
            # Whatever it is ends the sequence it comes from: sent to another link it came again.
            log.exception("a forward of %d Extends failed", len(jobs))
            self._counts.update(["failed_forwards"])
            if len(jobs) > 1:
                return [drawn for job in jobs for drawn in self._attempt([job])]
            return [Drawn(error=f"its forward failed: {type(error).__name__}: {error}")]

    def _together(self, jobs: Sequence[Job]) -> list[Drawn]:
        layout = Layout()
        parts = [layout.add(job.extend, job.slots, job.decides) for job in jobs]
        tokens, finite = self._forward.choose(layout.runs, layout.draws)
        self._counts.update(forwards=1, rows=layout.num_rows, runs=len(layout.runs))
        return [
            _drawn(job.extend, tokens[part.start : part.stop], finite[part.start : part.stop])
            for job, part in zip(jobs, parts, strict=True)
        ]


def _drawn(extend: Extend, chosen: Sequence[int], finite: Sequence[bool]) -> Drawn:
    if not chosen:
        return Drawn()
    path, next_token = walk(extend.nodes, chosen)
    # Only what lies on the path counts: what a guess off it gives is nobody's token.
    for depth, i in enumerate((-1, *path)):
        if not finite[1 + i]:
            position = extend.start + len(extend.tokens) - 1 + depth
            return Drawn(error=f"the logits at position {position} are not finite")
    return Drawn(path, next_token)
