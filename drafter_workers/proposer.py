"""What a drafting method offers the grower. Sequences and nodes are named by integers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Expand:
    """Propose children of `node`, reached by `path` (ids from the root's child down to it).

    Node 0 is the root: its path is empty. Every id on the path but the last was expanded before.
    """

    seq: int
    node: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible next token and its log-probability in the drafter's own distribution.

    `belief` is the logarithm of the chance that it stands given its parent, where the method
    knows better than its distribution: a token that shared noise ranks first stands more often
    than its own probability says. `dist` is what it was drawn from, under rule `sampled`.
    """

    token: int
    logprob: float
    belief: float | None = None
    dist: bytes = b""

    @property
    def stands(self) -> float:
        """What growth goes by, as a logarithm."""
        return self.logprob if self.belief is None else self.belief


class Proposer(Protocol):
    """A drafting method: keeps the committed tokens of its sequences and what it computed on them.

    Ids of nodes are per sequence, given by the grower when it keeps a candidate, never reused.
    """

    max_context: int
    max_rows: int

    def open(self, seq: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Take a sequence; nothing is computed yet."""

    def name(self, seq: int, parent: int, id_: int, token: int) -> None:
        """The grower kept a candidate of `parent` as node `id_`."""

    def advance(self, seq: int, tokens: Sequence[int], walked: Sequence[int]) -> None:
        """Tokens were committed; the first len(walked) of them were these nodes, in order.

        Nodes that are not under the new root are gone. What was computed for walked and for
        surviving nodes is kept, not recomputed.
        """

    def close(self, seq: int) -> None: ...

    def pending(self, seq: int) -> int:
        """Committed rows before the root that are not computed yet."""

    def feed(self, seq: int, rows: int) -> None:
        """Compute up to `rows` pending rows: a bounded piece of catching up."""

    def propose(self, batch: Sequence[Expand], width: int) -> list[tuple[Candidate, ...]]:
        """Up to `width` candidates for each node, best first, in one forward of <= max_rows rows.

        A root may have pending rows; they are computed in the same forward. Under rule `sampled`
        there is one candidate, drawn, and it is believed to stand: nothing but credit and context
        decides how long such a chain grows.
        """

    def rows_held(self, seq: int) -> tuple[int, int]:
        """Committed rows computed, and cache slots in use by this sequence."""

    def slots(self) -> tuple[int, int]:
        """Cache slots in total, and free."""
