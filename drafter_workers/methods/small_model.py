"""An ordinary decoder with the target's tokenizer as a drafter.

A row keeps its slot for life: the rows of walked nodes become committed rows where they are, so
that nothing is moved and nothing computed twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter_workers.config import DrafterConfig
from drafter_workers.proposer import Candidate, Expand
from drafter_workers.ranking import Place, Ranking
from drafter_workers.student import read_borrowed
from protos.sampling import Sampling
from target_workers.model.batch import build_batch
from target_workers.model.chooser import Chooser, Choosers, Grammars, grammars_of
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import DTYPES, Part, load_decoder
from target_workers.model.processors import Context
from target_workers.model.run import IntArray, Run


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
    chooser: Chooser
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
        grammars: Grammars | None = None,
    ) -> None:
        self.max_context = min(config.max_context, decoder.config.max_context)
        self.max_rows = config.max_rows
        self.vocab_size = _shared_ids(config, decoder)
        shared = None if ids is None else ids[ids < self.vocab_size]
        self._ranking = Ranking(self.vocab_size, shared, config.rank == "noise")
        self._choosers = Choosers(self.vocab_size, grammars)
        self._decoder = decoder
        self._cache = cache
        self._free = list(range(cache.num_slots))
        self._sequences: dict[int, _Sequence] = {}

    def open(self, seq: int, tokens: Sequence[int], sampling: Sampling) -> None:
        slots = np.empty(self.max_context, np.int64)
        chooser = self._choosers.open(sampling, tokens)
        self._sequences[seq] = _Sequence(list(tokens), chooser, slots)

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
        state.chooser.commit(tokens)
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
        places = [self._place(e, run.end) for e, run in zip(batch, runs, strict=True)]
        return self._ranking.candidates(logits, places, width)

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

    def _place(self, expand: Expand, position: int) -> Place:
        state = self._sequences[expand.seq]
        history, context = state.chooser.history, None
        if history is not None:
            context = Context(history, tuple(state.nodes[id_].token for id_ in expand.path))
        return Place(position, state.chooser.sampling, context)

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
    grammars = grammars_of(Path(config.lender or config.path), _shared_ids(config, decoder))
    return SmallModel(decoder, cache, config, ids, grammars)


def _shared_ids(config: DrafterConfig, decoder: Decoder) -> int:
    """How many of the first ids it has in common with the target."""
    own = decoder.config.vocab_size
    return min(config.vocab_size or own, own)


def _below(root: int | None, nodes: dict[int, _Node]) -> dict[int, _Node]:
    """The nodes under a node that is now the root; ids grow along every path."""
    found: dict[int, _Node] = {}
    for id_, node in sorted(nodes.items()):
        if node.parent == root or node.parent in found:
            found[id_] = node
    return found
