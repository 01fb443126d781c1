"""An ordinary decoder with the target's tokenizer as a drafter.

A row keeps its slot for life: the rows of walked nodes become committed rows where they are, so
that nothing is moved and nothing computed twice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter_workers.config import DrafterConfig
from drafter_workers.proposer import Candidate, Expand
from drafter_workers.student import read_borrowed
from protos.messages import Sampling
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import DTYPES, Part, load_decoder
from target_workers.model.noise import as_int64
from target_workers.model.run import IntArray, Run
from target_workers.model.sampling import Ranked, top_perturbed, top_tokens

# Until calibrated: how often the best token under shared noise is the target's too.
NOISE_CHANCE = 0.75


@dataclass(slots=True)
class _Node:
    """A guess; it has a slot once it was expanded."""

    parent: int
    token: int
    slot: int = -1


@dataclass(slots=True)
class _Sequence:
    """Committed tokens, the slots of the first `computed` of them, and the live nodes by id.

    A node under the root has parent 0, or the id that the root had as a node.
    """

    tokens: list[int]
    sampling: Sampling
    slots: IntArray
    computed: int = 0
    nodes: dict[int, _Node] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        return max(0, len(self.tokens) - 1 - self.computed)

    def used(self) -> list[int]:
        """Every slot of the sequence."""
        nodes = [node.slot for node in self.nodes.values() if node.slot >= 0]
        return [*self.slots[: self.computed].tolist(), *nodes]


class SmallModel:
    """A Proposer. Candidates are ids below `vocab_size`, the tokens shared with the target.

    `ids` are the tokens whose logits the decoder gives, in rising order (None: all).
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        config: DrafterConfig,
        ids: Tensor | None = None,
    ) -> None:
        self.max_context = min(config.max_context, decoder.config.max_context)
        self.max_rows = config.max_rows
        own = decoder.config.vocab_size
        self.vocab_size = min(config.vocab_size or own, own)
        self._ids = None if ids is None else ids[ids < self.vocab_size]
        self._by_noise = config.rank == "noise"
        self._decoder = decoder
        self._cache = cache
        self._free = list(range(cache.num_slots))
        self._sequences: dict[int, _Sequence] = {}

    def open(self, seq: int, tokens: Sequence[int], sampling: Sampling) -> None:
        slots = np.empty(self.max_context, np.int64)
        self._sequences[seq] = _Sequence(list(tokens), sampling, slots)

    def name(self, seq: int, parent: int, id_: int, token: int) -> None:
        self._sequences[seq].nodes[id_] = _Node(parent, token)

    def advance(self, seq: int, tokens: Sequence[int], walked: Sequence[int]) -> None:
        state = self._sequences[seq]
        before = dict(state.nodes)
        for id_ in walked:
            node = state.nodes.pop(id_)
            if node.slot >= 0:
                state.slots[state.computed] = node.slot
                state.computed += 1
        state.tokens.extend(tokens)
        root = walked[-1] if len(walked) == len(tokens) else None
        state.nodes = _below(root, state.nodes)
        gone = before.keys() - state.nodes.keys() - set(walked)
        self._free.extend(before[id_].slot for id_ in sorted(gone) if before[id_].slot >= 0)

    def close(self, seq: int) -> None:
        self._free.extend(self._sequences.pop(seq).used())

    def pending(self, seq: int) -> int:
        return self._sequences[seq].pending

    def feed(self, seq: int, rows: int) -> None:
        state = self._sequences[seq]
        assert 0 < rows <= state.pending, "only what is pending is fed"
        self._decoder.hidden(build_batch([self._commit(state, rows)]), self._cache)

    def propose(self, batch: Sequence[Expand], width: int) -> list[tuple[Candidate, ...]]:
        runs = [self._run(expand) for expand in batch]
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        last = np.cumsum([len(run.tokens) for run in runs]) - 1
        logits = self._decoder.logits(hidden[torch.from_numpy(last)])  # [batch, vocab]
        samplings = [self._sequences[expand.seq].sampling for expand in batch]
        known = self.vocab_size if self._ids is None else len(self._ids)
        ranked = self._rank(logits[:, :known], samplings, [run.end for run in runs], width)
        by_noise = [self._by_noise and s.temperature > 0 for s in samplings]
        return [_candidates(*row) for row in zip(*_lists(ranked), by_noise, strict=True)]

    def rows_held(self, seq: int) -> tuple[int, int]:
        state = self._sequences[seq]
        return state.computed, len(state.used())

    def slots(self) -> tuple[int, int]:
        return self._cache.num_slots, len(self._free)

    def _run(self, expand: Expand) -> Run:
        """The rows that give a node's children: for a root, with all that is pending before it."""
        state = self._sequences[expand.seq]
        if not expand.path:
            assert state.computed < len(state.tokens), "a root is expanded once"
            return self._commit(state, len(state.tokens) - state.computed)
        assert state.computed == len(state.tokens), "a node is under computed rows"
        path = [state.nodes[id_] for id_ in expand.path]
        node = path[-1]
        assert node.slot < 0, "a node is expanded once"
        above = np.array([ancestor.slot for ancestor in path[:-1]], np.int64)
        history = np.concatenate((state.slots[: state.computed], above))
        slots = self._take(1)
        node.slot = int(slots[0])
        return Run(np.array([node.token]), len(history), slots, history)

    def _commit(self, state: _Sequence, rows: int) -> Run:
        """The next committed rows, which take their slots."""
        start, end = state.computed, state.computed + rows
        state.slots[start:end] = self._take(rows)
        state.computed = end
        tokens = np.array(state.tokens[start:end])
        return Run(tokens, start, state.slots[start:end], state.slots[:start])

    def _take(self, count: int) -> IntArray:
        assert count <= len(self._free), "the grower asks only for what fits"
        taken = self._free[-count:]
        del self._free[-count:]
        return np.array(taken, np.int64)

    def _rank(
        self, logits: Tensor, samplings: list[Sampling], positions: list[int], width: int
    ) -> Ranked:
        temperatures = torch.tensor([s.temperature for s in samplings], dtype=torch.float64)
        if not self._by_noise or not bool(temperatures.any()):
            ranked = top_tokens(logits, temperatures, width)
            return ranked if self._ids is None else replace(ranked, tokens=self._ids[ranked.tokens])
        seeds = as_int64(s.seed for s in samplings)
        whole = self._whole(logits)  # the noise is that of the target's ids
        return top_perturbed(whole, temperatures, seeds, torch.tensor(positions), width)

    def _whole(self, logits: Tensor) -> Tensor:
        """Over the target's ids [n, vocab], without those that are not known."""
        if self._ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -math.inf).index_copy_(
            1, self._ids, logits
        )


def build(config: DrafterConfig) -> SmallModel:
    """Load a model folder as a drafter. Raises ModelError."""
    dtype = DTYPES[config.dtype]
    borrowed = read_borrowed(Path(config.path))
    decoder = load_decoder(
        config.path,
        dtype=dtype,
        device=config.device,
        part=Part() if borrowed is None else Part(loan=borrowed.loan(Path(config.lender))),
        int8=config.weight_dtype == "int8",
    )
    decoder.compile(dtype)
    cache = KVCache(decoder.config, config.num_slots, dtype, config.device)
    ids = None if borrowed is None or borrowed.ids is None else torch.tensor(borrowed.ids)
    return SmallModel(decoder, cache, config, ids)


def _below(root: int | None, nodes: dict[int, _Node]) -> dict[int, _Node]:
    """The nodes under a node that is now the root; ids grow along every path."""
    found: dict[int, _Node] = {}
    for id_, node in sorted(nodes.items()):
        if node.parent == root or node.parent in found:
            found[id_] = node
    return found


def _lists(ranked: Ranked) -> tuple[list[list[int]], list[list[float]]]:
    return ranked.tokens.tolist(), ranked.log_probs.tolist()


def _candidates(tokens: list[int], log_probs: list[float], by_noise: bool) -> tuple[Candidate, ...]:
    """Of a row whose logits are not finite, none."""
    return tuple(
        Candidate(token, log_prob, _noise_belief(rank) if by_noise else None)
        for rank, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True))
        if math.isfinite(log_prob)
    )


def _noise_belief(rank: int) -> float:
    """Each candidate, best first, stands with NOISE_CHANCE of what those before it left."""
    return math.log(NOISE_CHANCE) + rank * math.log1p(-NOISE_CHANCE)
