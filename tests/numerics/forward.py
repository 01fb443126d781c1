"""One sequence run through a decoder in pieces of the test's choosing, over scattered slots."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from protos.messages import Extend, TreeNode
from protos.sampling import GREEDY
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.run import IntArray, Run
from target_workers.rows import Layout

NUM_SLOTS = 2048


class Path:
    """Tokens of one sequence and the scattered slots of its positions."""

    def __init__(self, tokens: IntArray, seed: int, *, pool: IntArray | None = None) -> None:
        pool = np.arange(NUM_SLOTS) if pool is None else pool
        self.tokens = tokens
        self.slots = np.random.default_rng(seed).permutation(pool)

    def run(self, start: int, end: int) -> Run:
        """Positions [start, end) as a run over all before."""
        here = slice(start, end)
        return Run(self.tokens[here], start, self.slots[here], self.slots[:start])


def random_tokens(count: int, seed: int, vocab: int = 512) -> IntArray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def new_cache(decoder: Decoder, kv: torch.dtype | None = None) -> KVCache:
    return KVCache(decoder.config, NUM_SLOTS, kv or decoder.dtype)


def logits_of(decoder: Decoder, cache: KVCache, runs: Iterable[Run]) -> Tensor:
    """Logits of every row of one forward: [rows, vocab]."""
    return decoder.logits(decoder.hidden(build_batch(list(runs)), cache))


def in_chunks(
    decoder: Decoder, path: Path, sizes: Iterable[int], kv: torch.dtype | None = None
) -> Tensor:
    """Logits of all positions, a forward for each chunk; the last size goes on to the end."""
    cache, rows, start = new_cache(decoder, kv), [], 0
    for size in [*sizes, len(path.tokens)]:
        end = min(start + size, len(path.tokens))
        if start < end:
            rows.append(logits_of(decoder, cache, [path.run(start, end)]))
        start = end
    return torch.cat(rows)


def random_sizes(total: int, seed: int) -> list[int]:
    """Chunk sizes with many ones and a few long ones."""
    generator = np.random.default_rng(seed)
    sizes = generator.choice([1, 1, 2, 3, 7, 8, 9, 31, 130, 200], total)
    return [int(size) for size in sizes]


def random_parents(count: int, seed: int) -> list[int]:
    """A tree in which a node mostly goes on from the one before it."""
    generator = np.random.default_rng(seed)
    return [
        node - 1 if generator.random() < 0.6 else int(generator.integers(-1, node))
        for node in range(count)
    ]


def tree_logits(
    decoder: Decoder,
    path: Path,
    tokens: IntArray,
    parents: Sequence[int],
    *,
    trunk: int = 1,
    kv: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits of the last `trunk` positions of a path and of a tree under it, in one forward."""
    cache, end = new_cache(decoder, kv), len(path.tokens)
    if end > trunk:
        logits_of(decoder, cache, [path.run(0, end - trunk)])
    nodes = tuple(map(TreeNode, parents, tokens.tolist()))
    layout = Layout()
    layout.add(Extend(1, end - trunk, tuple(path.tokens[end - trunk :]), nodes), path.slots, GREEDY)
    logits = logits_of(decoder, cache, layout.runs)
    return logits[:trunk], logits[layout.draws.rows[1:]]


def node_paths(path: Path, tokens: IntArray, parents: Sequence[int]) -> list[Path]:
    """For each node, the path's tokens and then the node's ancestors and itself."""
    below: list[list[int]] = []
    for node, parent in enumerate(parents):
        below.append([*(below[parent] if parent >= 0 else []), node])
    return [Path(np.concatenate((path.tokens, tokens[nodes])), seed=7) for nodes in below]
