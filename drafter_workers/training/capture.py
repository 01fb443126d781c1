"""Runs a target over planned conversations, many at once, and keeps what it wrote and thought."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafter_workers.training.conversation import Plan, Writing
from drafter_workers.training.corpus import CorpusError, Document, Kept
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.noise import as_int64
from target_workers.model.run import Run
from target_workers.model.sampling import choose, only_known


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """`batch` conversations at once, of at most `max_length` tokens each."""

    vocab_size: int
    ends: frozenset[int]
    batch: int = 48
    max_length: int = 768
    kept: Kept = field(default_factory=Kept)


@dataclass(slots=True)
class _Seat:
    """A conversation and its own slots of the cache."""

    writing: Writing
    first_slot: int
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


def use_threads(count: int) -> None:
    """Compute with so many threads. Processes of one thread each suffer least from company."""
    torch.set_num_threads(count)


class Capture:
    """Writes conversations one token a step each; a free seat takes the next plan."""

    def __init__(self, decoder: Decoder, config: CaptureConfig, kv_dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._config = config
        slots = config.batch * config.max_length
        self._cache = KVCache(decoder.config, slots, kv_dtype)
        self._slots = np.arange(slots)

    def run(self, plans: Iterator[Plan], done: Callable[[Document], None]) -> None:
        """Write them all. What a conversation becomes does not depend on its company in exact mode.

        Raises CorpusError for a target whose logits are not finite.
        """
        free = [i * self._config.max_length for i in range(self._config.batch)]
        seats: list[_Seat] = []
        while True:
            while free and (plan := next(plans, None)) is not None:
                seats.append(_Seat(Writing(plan), free.pop()))
            if not seats:
                return
            self._step(seats)
            for seat in [each for each in seats if each.writing.is_over]:
                seats.remove(seat)
                free.append(seat.first_slot)
                done(_document(seat))

    def _step(self, seats: Sequence[_Seat]) -> None:
        runs = [self._run(seat) for seat in seats]
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        ends = np.cumsum([len(run.tokens) for run in runs])
        logits = self._decoder.logits(hidden[torch.from_numpy(ends - 1)])
        only_known(logits, self._config.vocab_size)
        self._keep(seats, runs, hidden)
        choice = choose(
            logits,
            torch.tensor([seat.writing.temperature for seat in seats], dtype=torch.float64),
            as_int64(seat.writing.plan.seed for seat in seats),
            torch.tensor([run.end for run in runs]),
        )
        if not bool(choice.finite.all()):
            raise CorpusError("the target's logits are not finite; check its weights and type")
        for seat, run, token in zip(seats, runs, choice.tokens.tolist(), strict=True):
            seat.writing.computed = run.end
            seat.writing.write(token, self._config.ends, self._config.max_length)

    def _run(self, seat: _Seat) -> Run:
        tokens, start = seat.writing.pending(), seat.writing.computed
        slots = self._slots[seat.first_slot : seat.first_slot + start + len(tokens)]
        return Run(tokens, start, slots[start:], slots[:start])

    def _keep(self, seats: Sequence[_Seat], runs: Sequence[Run], hidden: Tensor) -> None:
        """Remember what is kept of each row, with its conversation."""
        kept = self._config.kept
        parts: dict[str, Tensor] = {}
        if kept.state_size:
            parts["states"] = hidden.bfloat16()
        if kept.top:
            parts |= self._best(self._decoder.logits(hidden), kept.top)
        for name, rows in parts.items():
            pieces = rows.split([len(run.tokens) for run in runs])
            for seat, piece in zip(seats, pieces, strict=True):
                seat.parts.setdefault(name, []).append(piece)

    def _best(self, logits: Tensor, count: int) -> dict[str, Tensor]:
        best = only_known(logits, self._config.vocab_size).topk(count)
        return {
            "top_ids": best.indices.int(),
            "top_logits": best.values.half(),
            "log_sums": logits.logsumexp(-1),
        }


def _document(seat: _Seat) -> Document:
    """A finished conversation; its last token never went through the target, and has zeros."""
    tokens = np.array(seat.writing.tokens, np.int64)
    parts = {}
    for name, pieces in seat.parts.items():
        rows = torch.cat(pieces)
        missing = len(tokens) - len(rows)
        parts[name] = torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))
    return Document(seat.writing.plan.number, tokens, np.array(seat.writing.answers), parts)
