"""Forwards of every kind over scattered slots, for one way to attend against another."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from protos.messages import Extend, TreeNode
from protos.sampling import GREEDY
from target_workers.model.attention import Attention, Setting
from target_workers.model.batch import build_batch
from target_workers.model.decoder import TorchDecoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.run import Run
from target_workers.rows import Layout
from tests.numerics.forward import NUM_SLOTS, Path, random_parents, random_tokens

Forwards: TypeAlias = Sequence[Sequence[Run]]


def attending(decoder: TorchDecoder, attention: Attention) -> TorchDecoder:
    """The same decoder, with this attention over every cache."""
    return TorchDecoder(
        decoder.config,
        decoder.embedding,
        list(decoder.blocks),
        decoder.norm,
        decoder.head,
        choose=lambda _setting, _kv_dtype: attention,
    ).to(decoder.embedding.device)


def setting_of(decoder: TorchDecoder) -> Setting:
    return Setting(decoder.config, decoder.dtype, decoder.embedding.device)


def new_cache(decoder: TorchDecoder) -> KVCache:
    """A cache on the decoder's device."""
    return KVCache(decoder.config, NUM_SLOTS, decoder.dtype, str(decoder.embedding.device))


def states_of(decoder: TorchDecoder, forwards: Forwards, cache: KVCache | None = None) -> Tensor:
    """Normed hidden states of all rows of all forwards, over one cache, on the CPU."""
    cache = new_cache(decoder) if cache is None else cache
    return torch.cat([decoder.hidden(build_batch(runs), cache).cpu() for runs in forwards])


def sequences(count: int, length: int) -> list[Path]:
    """Sequences in slots of their own."""
    pools = np.array_split(np.random.default_rng(count).permutation(NUM_SLOTS), count)
    return [Path(random_tokens(length, i), i, pool=pool) for i, pool in enumerate(pools)]


def prompts(paths: Sequence[Path], ends: Sequence[int]) -> Forwards:
    """One forward for each prompt."""
    return [[path.run(0, end)] for path, end in zip(paths, ends, strict=True)]


def decode(paths: Sequence[Path], starts: Sequence[int], steps: int) -> Forwards:
    """Steps of one row for each sequence, in a forward each."""
    return [
        [path.run(at + step, at + step + 1) for path, at in zip(paths, starts, strict=True)]
        for step in range(steps)
    ]


def tree(path: Path, end: int, count: int) -> Sequence[Run]:
    """The last of `end` committed rows with a tree of guesses under it, in one forward."""
    tokens = random_tokens(count, 5)
    nodes = tuple(map(TreeNode, random_parents(count, seed=end), tokens.tolist()))
    layout = Layout()
    layout.add(Extend(1, end - 1, tuple(path.tokens[end - 1 : end]), nodes), path.slots, GREEDY)
    return layout.runs


def _all_at_once() -> Forwards:
    """A chunk of a prompt, a tree and two decode rows of sequences of other lengths."""
    paths = sequences(4, 300)
    return [
        *prompts(paths, [100, 129, 1, 250]),
        [
            paths[0].run(100, 170),
            *tree(paths[1], 130, 9),
            paths[2].run(1, 2),
            paths[3].run(250, 251),
        ],
    ]


def of_many(count: int, steps: int, longest: int = 30) -> Forwards:
    """Prompts of all lengths, then steps of a row each."""
    paths = sequences(count, longest + steps)
    starts = [1 + 7 * i % longest for i in range(count)]
    return [*prompts(paths, starts), *decode(paths, starts, steps)]


def leaving() -> Forwards:
    """Decode steps of fewer and fewer sequences in changing order, then of more again."""
    paths = sequences(6, 60)
    forwards = list(prompts(paths, [20, 3, 30, 11, 1, 25]))
    at = [20, 3, 30, 11, 1, 25]
    for alive in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0], [3, 1, 0], [1], [1, 3], [0, 4, 2, 5, 3]):
        forwards.append([paths[i].run(at[i], at[i] + 1) for i in alive])
        for i in alive:
            at[i] += 1
    return forwards


def short_then_long() -> Forwards:
    """Decode steps of sequences of a few tokens, then of some of hundreds."""
    paths = sequences(6, 300)
    short, long = paths[:3], paths[3:]
    return [
        *prompts(paths, [1, 5, 3, 290, 150, 257]),
        *decode(short, [1, 5, 3], 3),
        *decode(long, [290, 150, 257], 3),
        *decode(short, [4, 8, 6], 2),
    ]


ONE = Path(random_tokens(300, 1), 1)
SCENES: dict[str, Forwards] = {
    "a prompt": [[ONE.run(0, 300)]],
    "chunks": [[ONE.run(0, 7)], [ONE.run(7, 150)], [ONE.run(150, 151)], [ONE.run(151, 300)]],
    "decode": [
        *prompts(sequences(3, 200), [1, 60, 150]),
        *decode(sequences(3, 200), [1, 60, 150], 4),
    ],
    "rows that see each other": [
        [ONE.run(0, 40)],
        [ONE.run(at, at + 1) for at in (42, 40, 41)],
        [ONE.run(at, at + 1) for at in (43, 45, 44)],
    ],
    "a tree": [[ONE.run(0, 40)], tree(ONE, 41, 14)],
    "a tree at the start": [tree(ONE, 1, 14)],
    "all at once": _all_at_once(),
}
