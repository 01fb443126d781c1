"""A drafter's reduced vocabulary: the tokens that a corpus uses most."""

from collections.abc import Iterable, Sequence

import numpy as np

from drafter_workers.training.corpus import Corpus


def most_used(corpora: Sequence[Corpus], size: int, always: Iterable[int]) -> tuple[int, ...]:
    """`size` target ids in rising order: those of `always`, then by how often answers use them."""
    counts = np.zeros(corpora[0].origin.vocab_size, np.int64)
    for corpus in corpora:
        for shard in corpus.shards:
            counts += np.bincount(shard.tokens[shard.answers], minlength=len(counts))
    first = list(dict.fromkeys(always))
    counts[first] = counts.max() + 1
    best = np.argsort(-counts, kind="stable")[:size]
    return tuple(sorted(best.tolist()))
