"""Samples of streams and what follows from them; knows no transport, so any client can use it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One completed stream: times in seconds since the request was sent, counts of tokens.

    `rounds`, `accepted`, `hits` and `drafted` are the server's own account of the speculation.
    """

    tokens: tuple[int, ...]
    first_s: float
    total_s: float
    rounds: int
    accepted: int
    hits: int
    drafted: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of streams amounts to. Ratios are of sums."""

    tokens: int
    seconds: float
    first_s: float
    accepted_length: float
    acceptance: float
    hit_rate: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def summarise(samples: Sequence[Sample]) -> Summary:
    """The sums over streams served one after the other; `first_s` is their median."""
    rounds = max(1, sum(s.rounds for s in samples))
    return Summary(
        tokens=sum(len(s.tokens) for s in samples),
        seconds=sum(s.total_s for s in samples),
        first_s=percentile([s.first_s for s in samples], 50),
        accepted_length=1 + sum(s.accepted for s in samples) / rounds,
        acceptance=sum(s.accepted for s in samples) / max(1, sum(s.drafted for s in samples)),
        hit_rate=sum(s.hits for s in samples) / rounds,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the samples lie, interpolated; 0 without samples."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
