"""Every message between the orchestrator and its workers: frozen values of plain types.

On the wire a message is `[tag, *fields]` (see codec.py). New fields go last, with a default.
Positions are absolute token indices, ranges are half-open, times are seconds.
"""

from dataclasses import dataclass

PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a worker needs to choose tokens. Temperature 0 is greedy; stops never reach a worker."""

    temperature: float = 0.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first frame: who it is and what it holds.

    `incarnation` is new at every start of the worker. `vocab_hash` identifies the tokenizer's
    entries, `needs` what a drafter wants from the target ("nothing" or "features"), `group_port`
    where a rank listens for the others (0: the worker is in one piece).
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

    Without nodes: though there is credit, nothing more is to be expected at this `frontier` before
    the next Advance (context, vocabulary, memory, or nothing likely enough). Said once per Advance.
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
    grammar: str = ""
    cache_salt: str = ""
    prefix_cache: bool = True
    parent: int = -1


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A guess to verify: `parent` indexes the same Extend's nodes, -1 is its last token."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Extend:
    """One row group over what is cached: prefill chunk, plain decode and verification alike.

    `tokens` are committed tokens at positions from `start`; `keep` lists the nodes of this
    sequence's previous Extend that became committed, in order.
    """

    seq: int
    start: int
    tokens: tuple[int, ...]
    nodes: tuple[TreeNode, ...] = ()
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepClose:
    """End a sequence on every shard, keeping the rows of `keep` for the prefix cache."""

    seq: int
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward, sent with the same bytes to every shard.

    Closes come before opens and opens before Extends; without Extends there is no forward. `cores`
    asks for that many CPU threads (0: leave as it is).
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
    `next_token` the target's own token after them. A non-empty `error` ends this sequence only.
    """

    seq: int
    start: int
    walk: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step gave. `cached` has, per open, how many tokens were found instead of computed.

    `free_pages` are those in no table after it, cached ones included. `forward_s` is the time of
    the forward, `idle_s` the worker's wait before this step.
    """

    step: int
    verdicts: tuple[Verdict, ...]
    cached: tuple[int, ...]
    free_pages: int
    forward_s: float
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank is connected with all others of its group: the answer to Join."""

    generation: int


# Any worker


@dataclass(frozen=True, slots=True)
class Audit:
    """Ask a worker to account for its memory; answered by AuditReply with the same `nonce`."""

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
