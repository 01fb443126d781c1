"""Every message between the orchestrator and its workers: frozen values of plain types.

New fields go last, with a default. Positions are absolute token indices, times are seconds.
"""

from dataclasses import dataclass

from protos.sampling import UNSCORED, Sampling, Score, Scoring

PROTOCOL = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first frame: who it is and what it holds.

    `incarnation` is new at every start, `vocab_hash` identifies the tokenizer's entries. `needs` is
    what a drafter wants ("nothing" or "features"), `group_port` where a rank listens (0: alone).
    """

    protocol: int
    role: str
    incarnation: int
    model_hash: str
    vocab_hash: str
    vocab_size: int
    max_context: int
    page_size: int
    num_pages: int
    max_rows: int
    needs: str = "nothing"
    group_port: int = 0


# Orchestrator to drafter


@dataclass(frozen=True, slots=True)
class Open:
    """Begin drafting a sequence over its committed `tokens`, with at most `credit` live nodes."""

    seq: int
    opening: int
    tokens: tuple[int, ...]
    sampling: Sampling
    credit: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Committed tokens from position `start`; the same message after a hit and after a miss."""

    seq: int
    opening: int
    start: int
    tokens: tuple[int, ...]
    credit: int


@dataclass(frozen=True, slots=True)
class Close:
    """End one opening of a sequence at a drafter."""

    seq: int
    opening: int


# Drafter to orchestrator


@dataclass(frozen=True, slots=True)
class Guess:
    """One new node: ids run on from 1 per opening, parent 0 is position `frontier - 1` of the Grow.

    `logprob` is the token's log-probability given its parent, in the drafter's own distribution.
    """

    id: int
    parent: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Grow:
    """New nodes of a draft tree, grown while the drafter's frontier was `frontier`.

    Without nodes: nothing more is to be expected at this `frontier` before the next Advance, though
    there is credit. Said once per Advance.
    """

    seq: int
    opening: int
    frontier: int
    nodes: tuple[Guess, ...]
    dists: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """The drafter lacks committed tokens from position `start` on."""

    seq: int
    opening: int
    start: int


@dataclass(frozen=True, slots=True)
class Report:
    """A drafter's load and the mean time of its latest forwards."""

    live_nodes: int
    forward_s: float
    forwards: int


# Orchestrator to target


@dataclass(frozen=True, slots=True)
class StepOpen:
    """A sequence the shards must know from this step on, with its committed tokens.

    Without an Extend in the same step it takes what whole pages of its tokens are cached under its
    salt (`prefix_cache` False: it takes and gives none), then what the open sequence `parent` has
    computed of them (-1: there is none), to the row: of the last page it gets a copy if a page is
    free. Its first Extend starts where that ends.
    """

    seq: int
    tokens: tuple[int, ...]
    sampling: Sampling
    cache_salt: str = ""
    prefix_cache: bool = True
    parent: int = -1
    scoring: Scoring = UNSCORED


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A guess to verify: `parent` indexes the same Extend's nodes, -1 is its last token."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Extend:
    """One row group over what is cached: prefill chunk, plain decode and verification alike.

    `tokens` are committed tokens at positions from `start`; `keep` lists the nodes of this
    sequence's previous Extend that became committed, in order. Under rule `sampled`, `dists` has
    what each node was drawn from.
    """

    seq: int
    start: int
    tokens: tuple[int, ...]
    nodes: tuple[TreeNode, ...] = ()
    keep: tuple[int, ...] = ()
    dists: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StepClose:
    """End a sequence on every shard, keeping the rows of `keep` for the prefix cache."""

    seq: int
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward, sent with the same bytes to every shard.

    Closes come before opens, opens before Extends; without Extends there is no forward. `cores`
    asks for that many CPU threads (0: as before).
    """

    step: int
    row_hash: int
    opens: tuple[StepOpen, ...] = ()
    extends: tuple[Extend, ...] = ()
    closes: tuple[StepClose, ...] = ()
    cores: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """Form a group of ranks, which know each other by `key` and listen at `peers`, by rank."""

    generation: int
    rank: int
    peers: tuple[str, ...]
    key: str


# Target (shard 0) to orchestrator


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer for one Extend that reached the end of the committed tokens.

    `start` is the position of the first token it decides; `walk` the accepted nodes, in order;
    `next_token` the target's own token after them, `scores` of both if asked for. A non-empty
    `error` ends this sequence only.
    """

    seq: int
    start: int
    walk: tuple[int, ...]
    next_token: int
    scores: tuple[Score, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of prompt tokens from position `start` on: what one Extend gave of them."""

    seq: int
    start: int
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step gave. `cached` has, per open, how many tokens were found instead of computed.

    `free_pages` are those in no table after it, cached ones included; `forward_s` is the forward's
    time, `idle_s` the worker's wait before it.
    """

    step: int
    verdicts: tuple[Verdict, ...]
    cached: tuple[int, ...]
    free_pages: int
    forward_s: float
    idle_s: float = 0.0
    prompts: tuple[PromptScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank is connected with all others of its group: the answer to Join."""

    generation: int


# Any worker


@dataclass(frozen=True, slots=True)
class Audit:
    """Ask a worker to account for its memory; AuditReply has the same `nonce`."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Held:
    """One sequence as a worker holds it: committed rows in its cache and pages (slots) in use."""

    seq: int
    length: int
    pages: int


@dataclass(frozen=True, slots=True)
class Counter:
    """How often something named has happened since the worker started."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class AuditReply:
    """A worker's account: free, cached and held pages make the total.

    Cached pages are those in no table; `shared_pages` are what `held` counts more than once,
    `tables_hash` is of the tables themselves.
    """

    nonce: int
    total_pages: int
    free_pages: int
    cached_pages: int
    held: tuple[Held, ...] = ()
    counters: tuple[Counter, ...] = ()
    shared_pages: int = 0
    tables_hash: int = 0


ToDrafter = Open | Advance | Close | Audit
FromDrafter = Hello | Grow | Need | Report | AuditReply
ToTarget = Step | Audit | Join
FromTarget = Hello | Stepped | AuditReply | Joined
Message = ToDrafter | FromDrafter | ToTarget | FromTarget
