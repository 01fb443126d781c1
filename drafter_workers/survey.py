"""Looks over all drafted sequences before a forward: who is behind, who may grow, who is stuck.

Changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from drafter_workers.config import GrowthConfig
from drafter_workers.growth import Growth, Option
from drafter_workers.proposer import Proposer
from protos.sampling import Sampling


@dataclass(slots=True, eq=False)
class Drafted:
    """One opening of a sequence; not `proposing` if the proposer cannot draft it.

    `resigned` once the other end was told that nothing more will come before the next Advance.
    """

    seq: int
    opening: int
    tokens: list[int]
    sampling: Sampling
    growth: Growth
    proposing: bool = False
    resigned: bool = False


@dataclass(frozen=True, slots=True)
class Pick:
    """A leaf that may be expanded by the next forward."""

    drafted: Drafted
    leaf: Option

    @property
    def rank(self) -> tuple[float, int]:
        """Most likely first; among equals the one next to its root, so that none starves."""
        return -self.leaf.reach, self.leaf.depth


@dataclass(slots=True)
class Survey:
    """Sequences too far behind to grow, the leaves of those that are not, and those with credit
    that get nothing, each with the name of the cause."""

    behind: list[Drafted] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    stuck: list[tuple[Drafted, str]] = field(default_factory=list)


def survey(sequences: Iterable[Drafted], proposer: Proposer, config: GrowthConfig) -> Survey:
    """What there is to do. A leaf needs a slot, and one for each row that its root waits for."""
    found = Survey()
    for drafted in sequences:
        leaves = list(drafted.growth.leaves()) if drafted.proposing else []
        if not leaves:
            if drafted.growth.has_room and drafted.tokens:
                found.stuck.append((drafted, "exhausted"))
            continue
        pending = proposer.pending(drafted.seq)
        if pending + 1 > proposer.slots()[1]:
            found.stuck.append((drafted, "no_slots"))
        elif pending < config.feed_rows:
            found.picks.extend(Pick(drafted, leaf) for leaf in leaves)
        else:
            found.behind.append(drafted)
    return found


def choose(picks: Iterable[Pick], proposer: Proposer, most: int) -> list[Pick]:
    """The `most` likely leaves at most, as many as fit into one forward and into the cache."""
    chosen: list[Pick] = []
    used = 0
    free = min(proposer.max_rows, proposer.slots()[1])
    for pick in sorted(picks, key=lambda pick: pick.rank):
        if len(chosen) == most:
            break
        rows = 1
        if pick.leaf.node is None:
            rows += proposer.pending(pick.drafted.seq)
        if used + rows <= free:
            chosen.append(pick)
            used += rows
    return chosen
