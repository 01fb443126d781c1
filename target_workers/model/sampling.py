"""From logits to tokens: the target's choice under rule `match`, and ranked tokens for drafters.

Ties go to the lowest id everywhere. Perturbed scores are logits / temperature + gumbel in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from target_workers.model.noise import gumbel_of, hash_bound, hashes, ids_above, row_keys

LEADERS = 64  # tokens with the best logits get their noise at once
ANY_NOISE = -100.0  # below all noise
SLACK = 1e-6  # covers the rounding of scores, far above float64's


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One token a row; where a row is not `finite` (NaN, +inf or nothing to choose), it is -1."""

    tokens: Tensor  # [n] int64
    finite: Tensor  # [n] bool


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Tokens of each row, best first, with their log-probabilities at the temperature."""

    tokens: Tensor  # [n, count] int64
    log_probs: Tensor  # [n, count] float32


@torch.inference_mode()
def only_known(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [n, rows of the head], in place, without ids from `vocab_size` on.

    A head is often padded beyond the tokenizer's entries; such an id must never be chosen.
    """
    logits[:, vocab_size:] = float("-inf")
    return logits


@torch.inference_mode()
def choose(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Choice:
    """Choose from float32 logits [n, vocab]; `positions` are those of the tokens being drawn.

    Temperature 0 is greedy. Equal to perturbing the whole row, at a fraction of the cost.
    """
    finite = logits.amax(-1).isfinite()
    tokens = torch.full((len(logits),), -1)
    greedy = (finite & (temperatures == 0)).nonzero()[:, 0]
    drawn = (finite & (temperatures != 0)).nonzero()[:, 0]
    if len(greedy):
        tokens[greedy] = _rows(logits, greedy).argmax(-1)
    if len(drawn):
        keys = row_keys(seeds[drawn], positions[drawn])
        picked = _perturbed(_rows(logits, drawn), temperatures[drawn].double(), keys, 1)
        tokens[drawn] = picked[:, 0]
    return Choice(tokens, finite)


@torch.inference_mode()
def top_tokens(logits: Tensor, temperatures: Tensor, count: int) -> Ranked:
    """The `count` most likely tokens of each row; temperature 0 is taken as 1."""
    vocab = logits.shape[-1]
    values, tokens = logits.topk(min(count + 1, vocab))
    last = values[:, count - 1]
    tokens = _sort_rows(values, tokens)[:, :count]
    is_tied = (last == values[:, -1]) & last.isfinite()  # of what cannot be, any will do
    tied = is_tied.nonzero()[:, 0] if count < vocab else last.new_empty(0)
    if len(tied):  # topk takes any of those that tie for the last place
        row, ids = (logits[tied] >= last[tied, None]).nonzero(as_tuple=True)
        tokens[tied] = _first_of_rows(row, ids, logits[tied[row], ids], count)
    return _ranked(logits, temperatures, tokens)


@torch.inference_mode()
def top_perturbed(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, count: int
) -> Ranked:
    """The `count` best tokens of each row by perturbed score; the first is what `choose` draws."""
    drawn = (temperatures != 0).nonzero()[:, 0]
    ranked = top_tokens(logits, temperatures, count)
    if not len(drawn):
        return ranked
    keys = row_keys(seeds[drawn], positions[drawn])
    ranked.tokens[drawn] = _perturbed(logits[drawn], temperatures[drawn].double(), keys, count)
    return _ranked(logits, temperatures, ranked.tokens)


def _perturbed(logits: Tensor, temperatures: Tensor, keys: Tensor, count: int) -> Tensor:
    """The `count` ids of each row with the best perturbed scores: [n, count].

    A token outside the leaders has at most the worst leader's logit, so to be among the best it
    needs noise above a bound, and noise grows with the hash: only hashes are computed for all.
    """
    num_rows, vocab = logits.shape
    values, ids = logits.topk(min(max(LEADERS, count), vocab))
    leaders = _scores(values, temperatures[:, None], hashes(keys[:, None], ids))
    to_beat = leaders.topk(count).values[:, -1]
    noise = to_beat - values[:, -1].double() / temperatures - SLACK
    bounds = hash_bound(noise.nan_to_num(nan=ANY_NOISE))  # -inf - -inf: all are masked but a few
    row, lucky = ids_above(keys, bounds, vocab)
    places = torch.arange(num_rows)[:, None] * vocab + ids
    places = torch.unique(torch.cat((places.view(-1), row * vocab + lucky)))
    row, ids = places // vocab, places % vocab
    scores = _scores(logits.view(-1)[places], temperatures[row], hashes(keys[row], ids))
    return _first_of_rows(row, ids, scores, count)


def _scores(logits: Tensor, temperatures: Tensor, hashed: Tensor) -> Tensor:
    return logits.double() / temperatures + gumbel_of(hashed)


def _first_of_rows(row: Tensor, ids: Tensor, scores: Tensor, count: int) -> Tensor:
    """The best ids of each row from entries sorted by (row, id): [rows, count]."""
    order = scores.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    starts = torch.searchsorted(row, torch.arange(int(row[-1]) + 1))
    return ids[order[starts[:, None] + torch.arange(count)]]


def _sort_rows(values: Tensor, tokens: Tensor) -> Tensor:
    """Tokens by descending value, equal values by ascending id."""
    tokens, order = tokens.sort(-1)
    best_first = values.gather(-1, order).argsort(dim=-1, descending=True, stable=True)
    return tokens.gather(-1, best_first)


def _ranked(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Ranked:
    scale = torch.where(temperatures == 0, 1.0, temperatures).float()[:, None]
    scaled = logits / scale
    return Ranked(tokens, scaled.gather(-1, tokens) - scaled.logsumexp(-1, keepdim=True))


def _rows(logits: Tensor, rows: Tensor) -> Tensor:
    """logits[rows], without a copy when that is all of them."""
    return logits if len(rows) == len(logits) else logits[rows]
