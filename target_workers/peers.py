"""The other ranks of a target, as its engine sees them; knows neither torch nor a network."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from protos.messages import Join, Stepped
from protos.worker import ProtocolError


class Peers(Protocol):
    """What an engine needs of its group. Everything but `leave` raises GroupBroken."""

    @property
    def is_first(self) -> bool:
        """True for the rank that answers for all."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What the present group has cost, by name."""

    def join(self, join: Join) -> None:
        """Form a group with the other ranks, after leaving the one before."""

    def leave(self) -> None:
        """End the group, if there is one: the others notice."""

    def agree(self, *words: int) -> None:
        """Until all ranks are here with these words and the same answers to all steps before."""

    def answered(self, stepped: Stepped) -> None:
        """What this rank made of a step: part of what the next `agree` compares."""


class Alone:
    """The Peers of a target in one piece."""

    is_first = True
    counts: Mapping[str, int] = MappingProxyType({})

    def join(self, join: Join) -> None:
        raise ProtocolError(f"this target is in one piece and joins no group of {len(join.peers)}")

    def leave(self) -> None:
        return

    def agree(self, *words: int) -> None:
        return

    def answered(self, stepped: Stepped) -> None:
        return


ALONE = Alone()
