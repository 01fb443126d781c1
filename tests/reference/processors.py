"""What `protos.sampling.Processors` means, field by field: one row at a time, in float64.

It knows nothing of how a worker computes it.
"""

import math
from collections.abc import Sequence, Set

from protos.sampling import Processors, Sampling

NEVER = -math.inf


def reference(
    logits: list[float],
    sampling: Sampling,
    tokens: Sequence[int],
    path: Sequence[int],
    allowed: Set[int] | None = None,
) -> list[float]:
    """Scores before the division by the temperature; -inf is what cannot be chosen.

    `tokens` are committed, `path` are the guesses after them; `allowed`: by the grammar.
    """
    scores = changed(logits, sampling, [*tokens, *path], allowed)
    kept = best(scores, sampling)
    return [score if token in kept else NEVER for token, score in enumerate(scores)]


def changed(
    logits: list[float], sampling: Sampling, history: list[int], allowed: Set[int] | None = None
) -> list[float]:
    """All that is done before the division by the temperature."""
    processors = sampling.processors
    output = history[sampling.prompt_tokens :]
    never = forbidden(processors, history, len(output), range(len(logits)), allowed)
    scores = []
    for token, logit in enumerate(logits):
        score = logit
        if token in history:
            penalty = processors.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        if token in output:
            score = score - processors.presence_penalty
        score = score - processors.frequency_penalty * output.count(token)
        for bias in processors.bias:
            if bias.token == token:
                score = score + bias.value
        scores.append(NEVER if token in never else score)
    return scores


def forbidden(
    processors: Processors,
    history: list[int],
    num_output: int,
    vocabulary: range,
    allowed: Set[int] | None,
) -> set[int]:
    """The tokens that a mask excludes."""
    never: set[int] = set()
    if processors.allowed:
        never |= set(vocabulary) - set(processors.allowed)
    if num_output < processors.min_tokens:
        never |= set(processors.withheld)
    if processors.no_repeat_ngram:
        never |= repeating(history, processors.no_repeat_ngram)
    if allowed is not None:
        never |= set(vocabulary) - set(allowed)
    return never


def repeating(history: list[int], length: int) -> set[int]:
    """Tokens that would end the history with so many tokens that are in it already."""
    starts = range(len(history) - length + 1)
    seen = [tuple(history[start : start + length]) for start in starts]
    last = tuple(history[len(history) - (length - 1) :])
    return {ngram[-1] for ngram in seen if ngram[:-1] == last}


def best(scores: list[float], sampling: Sampling, slack: float = 0.0) -> list[int]:
    """The tokens that stay, best first; more `slack` keeps more: thresholds move by so much."""
    ranked = [token for token, score in enumerate(scores) if score > NEVER]
    ranked.sort(key=lambda token: (-scores[token], token))
    if sampling.temperature == 0 or not ranked:
        return ranked
    processors = sampling.processors
    if processors.top_k:
        ranked = ranked[: processors.top_k]
    likeliest = scores[ranked[0]]
    # So many times as likely as the likeliest.
    odds = {v: math.exp((scores[v] - likeliest) / sampling.temperature) for v in ranked}
    if processors.top_p < 1:
        ranked = fewest(ranked, odds, processors.top_p + slack)
    if processors.min_p:
        least = processors.min_p * (1 - slack)
        ranked = [token for token in ranked if odds[token] >= least] or ranked[:1]
    return ranked


def fewest(ranked: list[int], odds: dict[int, float], share: float) -> list[int]:
    """The shortest beginning of `ranked` that has this share of the whole."""
    whole, had = math.fsum(odds.values()), 0.0
    for count, token in enumerate(ranked, 1):
        had += odds[token]
        if had / whole >= share:
            return ranked[:count]
    return ranked
