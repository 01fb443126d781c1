"""Faults of a link by plan: what befalls each message, and when it therefore arrives.

A plan is a pure function of direction, index and message, so the same plan plays the same faults.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from protos.messages import Advance, Close, Grow, Message, Need, Open

Direction = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What befalls one message. `stall_s` holds its whole direction; no copies: it is dropped."""

    delay_s: float = 0.0
    copies: int = 1
    stall_s: float = 0.0
    cut: bool = False


Plan = Callable[[Direction, int, Message], Fate]


def calm(_direction: Direction, _index: int, _message: Message) -> Fate:
    """No faults."""
    return Fate()


def scripted(script: Mapping[tuple[Direction, int], Fate]) -> Plan:
    """Named messages, counted from 0 in each direction, meet their fate; the others none."""
    return lambda direction, index, _message: script.get((direction, index), Fate())


def seeded(seed: int, *, max_delay_s: float, again: float = 0.0, stall: float = 0.0) -> Plan:
    """Every message is late by chance; some come twice, some stall their direction tenfold."""

    def plan(direction: Direction, index: int, _message: Message) -> Fate:
        draw = random.Random(f"{seed} {direction} {index}")
        delay_s = draw.uniform(0.0, max_delay_s)
        copies = 1 + (draw.random() < again)
        stalls = draw.random() < stall
        return Fate(delay_s, copies, stall_s=10 * max_delay_s if stalls else 0.0)

    return plan


class Lane:
    """One direction of a link: when each message arrives. Order is kept within a sequence.

    A message of no sequence (a Step, a Hello) keeps its place among all.
    """

    def __init__(self, direction: Direction, plan: Plan) -> None:
        self._direction: Direction = direction
        self._plan = plan
        self._index = 0
        self._of_seq: dict[int, float] = {}
        self._barrier = 0.0
        self._latest = 0.0

    def arrivals(self, now: float, message: Message) -> list[float] | None:
        """The time of each copy's arrival; None if the link is cut instead."""
        fate = self._plan(self._direction, self._index, message)
        self._index += 1
        if fate.cut:
            return None
        if fate.stall_s:
            self.stall(now + fate.stall_s)
        due = max(now + fate.delay_s, self._barrier)
        if isinstance(message, Open | Advance | Close | Grow | Need):
            due = self._of_seq[message.seq] = max(due, self._of_seq.get(message.seq, 0.0))
        else:
            due = self._barrier = max(due, self._latest)
        self._latest = max(self._latest, due)
        return [due] * fate.copies

    def stall(self, until: float) -> None:
        """Nothing sent from now on arrives before `until`."""
        self._barrier = max(self._barrier, until)
