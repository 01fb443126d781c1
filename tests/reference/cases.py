"""Random rows, sequences and processors for whatever is held against the reference."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.sampling import Bias, Processors, Sampling
from tests.reference.processors import NEVER

Rng = np.random.Generator
TEMPERATURES = (0.0, 1e-6, 1e-4, 0.05, 0.5, 0.8, 1.0, 2.0, 10.0)
ENDS = (0.0, 100.0, -100.0)


class Rota:
    """A grammar of sorts: a third of the vocabulary may follow, other ones after other outputs."""

    def __init__(self, vocab_size: int, output: list[int]) -> None:
        self.vocab_size = vocab_size
        self.output = list(output)

    def allowed(self, path: tuple[int, ...]) -> NDArray[np.bool_]:
        so_far = [*self.output, *path]
        turn = len(so_far) + 2 * sum(so_far)
        return np.arange(self.vocab_size) % 3 == turn % 3

    def commit(self, tokens: list[int]) -> None:
        self.output.extend(tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One batch: whose row each is, and what it holds."""

    logits: Tensor  # [rows, vocabulary + padding]
    vocab_size: int
    samplings: list[Sampling]  # of each row
    tokens: list[list[int]]
    paths: list[tuple[int, ...]]
    plain: list[bool]  # no context: the row must be left alone


def pick(rng: Rng, *options: float) -> float:
    return float(options[rng.integers(len(options))])


def some_tokens(rng: Rng, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(int(v) for v in rng.choice(vocab_size, min(count, vocab_size), replace=False))


def some_processors(rng: Rng, vocab_size: int, *, on_grid: bool) -> Processors:
    """Each field is off in about half of all cases."""

    def on() -> bool:
        return bool(rng.random() < 0.5)

    def value(scale: float) -> float:
        drawn = float(rng.uniform(-scale, scale))
        return round(drawn * 4) / 4 if on_grid else drawn

    def biases() -> tuple[Bias, ...]:
        tokens = some_tokens(rng, vocab_size, int(rng.integers(1, 12)))
        return tuple(Bias(v, value(100) if on() else pick(rng, *ENDS)) for v in tokens)

    free = float(np.exp(rng.uniform(math.log(0.05), math.log(20))))
    repetition = pick(rng, 0.25, 0.5, 2.0, 4.0) if on_grid else free
    return Processors(
        repetition_penalty=repetition if on() else 1.0,
        presence_penalty=value(pick(rng, 2, 100)) if on() else 0.0,
        frequency_penalty=value(pick(rng, 2, 100)) if on() else 0.0,
        bias=biases() if on() else (),
        allowed=some_tokens(rng, vocab_size, int(rng.integers(1, vocab_size + 1))) if on() else (),
        withheld=some_tokens(rng, vocab_size, int(rng.integers(1, 5))) if on() else (),
        min_tokens=int(rng.integers(0, 14)) if on() else 0,
        no_repeat_ngram=int(rng.integers(1, 5)) if on() else 0,
        grammar="rota" if rng.random() < 0.2 else "",
        top_k=int(pick(rng, 1, 2, 5, 40, vocab_size - 1, vocab_size, 5000)) if on() else 0,
        top_p=pick(rng, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, rng.random()) if on() else 1.0,
        min_p=pick(rng, 1e-12, 1e-3, 0.05, 0.3, 1.0, rng.random()) if on() else 0.0,
    )


def some_row(rng: Rng, vocab_size: int, *, on_grid: bool) -> NDArray[np.float32]:
    """Flat, few-valued, wide or peaked; now and then with tokens that cannot be chosen."""
    row = rng.normal(size=vocab_size) * pick(rng, 0.0, 0.01, 1, 3, 12, 12)
    if on_grid:
        row = np.round(row * 2) / 2
    if rng.random() < 0.2:
        row[rng.integers(vocab_size)] += 40
    if rng.random() < 0.2:
        row[rng.random(vocab_size) < 0.3] = NEVER
    return row.astype(np.float32)


def some_case(seed: int, vocab_size: int, *, on_grid: bool) -> Case:
    """1 to 12 rows of 1 to 4 sequences, of little variety of tokens so that n-grams repeat."""
    rng = np.random.default_rng((seed, vocab_size, on_grid))
    lead = min(vocab_size, int(pick(rng, 3, 6, 600)))
    padding = int(pick(rng, 0, 0, 7))

    def walk(low: int, high: int) -> list[int]:
        return [int(v) for v in rng.integers(0, lead, rng.integers(low, high))]

    owners = []
    for _ in range(rng.integers(1, 5)):
        tokens = walk(1, 40)
        sampling = Sampling(
            temperature=pick(rng, *TEMPERATURES),
            processors=some_processors(rng, vocab_size, on_grid=on_grid),
            prompt_tokens=int(rng.integers(0, len(tokens) + 1)),
        )
        owners.append((sampling, tokens))
    chosen = [owners[i] for i in rng.integers(0, len(owners), rng.integers(1, 13))]
    rows = [some_row(rng, vocab_size, on_grid=on_grid) for _ in chosen]
    logits = np.pad(rows, ((0, 0), (0, padding)), constant_values=np.float32(NEVER))
    return Case(
        logits=torch.from_numpy(logits),
        vocab_size=vocab_size,
        samplings=[sampling for sampling, _ in chosen],
        tokens=[tokens for _, tokens in chosen],
        paths=[tuple(walk(0, 7)) for _ in chosen],
        plain=[bool(rng.random() < 0.1) for _ in chosen],
    )
