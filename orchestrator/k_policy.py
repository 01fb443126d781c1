"""How many guesses to verify in a round. K is fixed within a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class KPolicy(Protocol):
    """Chooses K for a sequence's next round."""

    def k(self, seq: int, round_number: int) -> int: ...


@dataclass(frozen=True, slots=True)
class FixedK:
    """The same K in every round."""

    value: int

    def k(self, seq: int, round_number: int) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class ScriptedK:
    """A K for every round, the last one repeated: for experiments and tests."""

    values: Sequence[int]

    def k(self, seq: int, round_number: int) -> int:
        return self.values[min(round_number, len(self.values) - 1)]
