"""Runs the Extends of a step through the model; what fails in company or with its guesses is tried
again without.

Invariant: neither another sequence nor a guess changes what an Extend gives, not even its end.
"""

import logging
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from protos.messages import Extend
from protos.worker import GroupBroken
from target_workers.drawn import Decided, Drawn
from target_workers.model.chooser import Chooser
from target_workers.model.run import Run
from target_workers.pages import Slots
from target_workers.rows import Draws, Layout

log = logging.getLogger(__name__)


class Forward(Protocol):
    """The model and its KV cache."""

    def move(self, source: Slots, target: Slots) -> None:
        """Copy rows between slots: all are read before one is written."""

    def set_cores(self, count: int) -> None:
        """Compute with so many threads from now on, if that changes no bits."""

    def decide(self, runs: Sequence[Run], draws: Draws) -> Decided:
        """Compute all runs in one forward; what each block and each prompt of the draws gives."""


@dataclass(frozen=True, slots=True)
class Job:
    """An Extend, the slot of every row of its sequence, and how its token is chosen, if one is.

    `prompt` are the tokens after its rows that are to be scored, with the `best` at their places.
    """

    extend: Extend
    slots: Slots
    decides: Chooser | None
    prompt: tuple[int, ...] = ()
    best: int = 0

    @property
    def bare(self) -> "Job":
        """The same without guesses."""
        return replace(self, extend=replace(self.extend, nodes=(), dists=()))


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
        for job in jobs:
            if job.prompt:
                layout.score(job.prompt, job.best)
            layout.add(job.extend, job.slots, job.decides)
        decided = self._forward.decide(layout.runs, layout.draws)
        self._counts.update(forwards=1, rows=layout.num_rows, runs=len(layout.runs))
        drawn, prompts = iter(decided.drawn), iter(decided.prompts)
        return [
            replace(
                Drawn() if job.decides is None else next(drawn),
                prompt=next(prompts) if job.prompt else (),
            )
            for job in jobs
        ]
