"""What a client asked, and what it is told: immutable values between services and the core."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from protos.sampling import GREEDY, UNSCORED, Sampling, Score, Scoring


class Mode(Enum):
    """How a request is speculated on: not at all, one block at a time, or running ahead."""

    OFF = "off"
    SYNC = "sync"
    ASYNC = "async"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One choice to generate. Checked by services; the core trusts every field.

    `resumed` are output tokens the client already has: they count for limits and stops and are
    not sent again. `mode` and `k` of None leave the choice to the server. `max_tokens` counts
    output tokens, `resumed` included; 0 only scores the prompt. Requests of different `cache_salt`
    share no computed state; without `prefix_cache` a request shares none at all, but for the live
    request named as its `parent`, whose prompt it has too and whose rows it begins with.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    resumed: tuple[int, ...] = ()
    mode: Mode | None = None
    k: int | None = None
    cache_salt: str = ""
    prefix_cache: bool = True
    scoring: Scoring = UNSCORED
    parent: str = ""


class Stopper(Protocol):
    """Decides, token by token and in order, whether an output token ends the sequence.

    Made anew per sequence by services; it sees every output token once, before commit.
    Length limits are not its business.
    """

    def push(self, token: int) -> bool:
        """Take the next output token; True if the sequence ends with it."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What one sequence cost: `rounds` verdicts, guesses verified and accepted, roots hit.

    `histogram[a]` counts the rounds with `a` accepted guesses; `wait_s` is the time in the queue.
    `cached` prompt tokens were found in the target's prefix cache. The completion has accepted +
    rounds tokens, less what a stop cut off (`cut`).
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    cut: int = 0
    histogram: tuple[int, ...] = ()
    wait_s: float = 0.0
    degraded: bool = False
    cached: int = 0


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The scores of prompt tokens from position `start` on, in order over all of them."""

    start: int
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly committed output tokens, at least one, with a score each if asked for."""

    tokens: tuple[int, ...]
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last word on a request that was admitted."""

    reason: FinishReason
    stats: Stats
    error: str = ""


class Refusal(Enum):
    """Why a request was not taken."""

    QUEUE_FULL = "queue full"
    DUPLICATE = "duplicate request id"
    NO_TARGET = "no target"
    TOO_LARGE = "too large"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a request that was not taken; try again after `retry_s` if it is positive."""

    refusal: Refusal
    detail: str
    retry_s: float = 0.0


Update = PromptScored | Delta | Finished | Refused
