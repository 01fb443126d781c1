"""What a target is made to write: conversations planned as turns. Pure; knows ids, no text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens given, then up to `limit` that the target writes at a temperature."""

    given: tuple[int, ...]
    limit: int
    temperature: float
    is_answer: bool

    def __post_init__(self) -> None:
        assert self.limit > 0, "the target writes a token of every turn at least"


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversation: its number in the corpus, the seed of its noise, its turns."""

    number: int
    seed: int
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        assert self.turns and self.turns[0].given, "the target goes on from something"


@dataclass(slots=True)
class Writing:
    """A conversation while it is written, of at most `max_length` tokens.

    `computed` tokens have been through the target; `written` are its own in this turn.
    """

    plan: Plan
    max_length: int
    tokens: list[int] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    computed: int = 0
    turn: int = 0
    written: int = 0

    def __post_init__(self) -> None:
        self._begin_turn()

    @property
    def temperature(self) -> float:
        return self.plan.turns[self.turn].temperature

    @property
    def is_over(self) -> bool:
        return self.turn == len(self.plan.turns)

    @property
    def num_pending(self) -> int:
        """How many tokens are to go through the target next."""
        return len(self.tokens) - self.computed

    def pending(self) -> NDArray[np.int64]:
        """The tokens that are to go through the target next."""
        return np.array(self.tokens[self.computed :], np.int64)

    def write(self, token: int, ends: frozenset[int]) -> None:
        """Take the target's next token; a turn ends with a token of `ends`, or at its limit."""
        turn = self.plan.turns[self.turn]
        self.tokens.append(token)
        self.answers.append(turn.is_answer)
        self.written += 1
        if len(self.tokens) == self.max_length:
            self._end()
        elif token in ends or self.written == turn.limit:
            self.turn += 1
            self.written = 0
            if not self.is_over:
                self._begin_turn()

    def _begin_turn(self) -> None:
        """Append what the turn is given, but not an end that was just written once more.

        Without room for it and a token of the target's, the conversation is over as it is.
        """
        given: Sequence[int] = self.plan.turns[self.turn].given
        if self.tokens and given and self.tokens[-1] == given[0]:
            given = given[1:]
        if len(self.tokens) + len(given) >= self.max_length:
            self._end()
            return
        self.tokens.extend(given)
        self.answers.extend([False] * len(given))

    def _end(self) -> None:
        self.turn = len(self.plan.turns)
