"""From a drafter's logits to candidates: by probability, by the target's noise, or drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafter_workers.proposer import Candidate
from protos.sampling import Sampling
from target_workers.model import dist
from target_workers.model.noise import as_int64
from target_workers.model.processors import Context, process
from target_workers.model.sampling import Ranked, top_perturbed, top_tokens

# Until calibrated: how often the best token under shared noise is the target's too.
NOISE_CHANCE = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a candidate is asked for: the position of its token, and what is chosen by there."""

    position: int
    sampling: Sampling
    context: Context | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Candidates are ids below `vocab_size`; `ids` are those the logits are of (None: all).

    With `by_noise`, at temperature > 0, they are ordered by the noise the target draws with.
    """

    vocab_size: int
    ids: Tensor | None = None
    by_noise: bool = True

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, places: Sequence[Place], width: int
    ) -> list[tuple[Candidate, ...]]:
        """Up to `width` of each row of logits [n, own vocab], best first; one where it is drawn."""
        known = logits[:, : self.vocab_size if self.ids is None else len(self.ids)]
        if self.ids is not None and not any(map(self._needs_ids, places)):
            ranked = top_tokens(known, _temperatures(places), width)
            return self._stated(replace(ranked, tokens=self.ids[ranked.tokens]), places)
        whole = self._whole(known)
        contexts = [place.context for place in places]
        if any(contexts):
            whole = whole.clone() if whole is known else whole
            process(whole, contexts)
        found = self._stated(self._ranked(whole, places, width), places)
        for i, place in enumerate(places):
            if place.sampling.needs_dists:
                found[i] = _drawn(whole[i], place)
        return found

    def _needs_ids(self, place: Place) -> bool:
        """True if it matters which of the target's ids a logit is of: to noise and processors."""
        is_noisy = self._goes_by_noise(place) or place.sampling.needs_dists
        return is_noisy or place.context is not None

    def _goes_by_noise(self, place: Place) -> bool:
        is_match = place.sampling.rule == "match"  # no other rule draws by this noise
        return self.by_noise and is_match and place.sampling.temperature > 0

    def _ranked(self, logits: Tensor, places: Sequence[Place], width: int) -> Ranked:
        temperatures = _temperatures(places)
        if not any(map(self._goes_by_noise, places)):
            return top_tokens(logits, temperatures, width)
        seeds = as_int64(place.sampling.seed for place in places)
        positions = torch.tensor([place.position for place in places])
        return top_perturbed(logits, temperatures, seeds, positions, width)

    def _whole(self, logits: Tensor) -> Tensor:
        """Over the target's ids [n, vocab_size], without those that are not known."""
        if self.ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -math.inf).index_copy_(
            1, self.ids, logits
        )

    def _stated(self, ranked: Ranked, places: Sequence[Place]) -> list[tuple[Candidate, ...]]:
        """Of a row whose logits are not finite, none."""
        rows = zip(places, ranked.tokens.tolist(), ranked.log_probs.tolist(), strict=True)
        return [
            tuple(
                Candidate(token, log_prob, _noise_belief(i) if self._goes_by_noise(place) else None)
                for i, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True))
                if math.isfinite(log_prob)
            )
            for place, tokens, log_probs in rows
        ]


def _temperatures(places: Sequence[Place]) -> Tensor:
    return torch.tensor([place.sampling.temperature for place in places], dtype=torch.float64)


def _drawn(logits: Tensor, place: Place) -> tuple[Candidate, ...]:
    """One candidate, drawn from logits [vocab] as rule `sampled` wants it; none of no finite ones.

    It is believed to stand, lest what was drawn decides how far a chain grows.
    """
    if not bool(logits.amax().isfinite()):
        return ()
    sampling = place.sampling
    token, drawn_from = dist.draw(logits, sampling.temperature, sampling.seed, place.position)
    ids, probs = dist.read(drawn_from)
    logprob = math.log(float(probs[ids == token][0]))
    return (Candidate(token, logprob, 0.0, drawn_from),)


def _noise_belief(rank: int) -> float:
    """Each candidate, best first, stands with NOISE_CHANCE of what those before it left."""
    return math.log(NOISE_CHANCE) + rank * math.log1p(-NOISE_CHANCE)
