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

STEP_ROWS = 2048  # of a forward, where one conversation has no more: long questions take turns
HEAD_ROWS = 256  # whose logits over the whole vocabulary are in memory at once


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """`batch` conversations at once, of at most `max_length` tokens each."""

    vocab_size: int
    ends: frozenset[int]
    batch: int = 48
    max_length: int = 768
    kept: Kept = field(default_factory=Kept)

    @property
    def num_slots(self) -> int:
        """Tokens that the cache has room for."""
        return self.batch * self.max_length


@dataclass(slots=True, eq=False)
class _Seat:
    """A conversation, its own slots of the cache, and what is kept of it by name."""

    writing: Writing
    first_slot: int
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def run(self) -> Run:
        """What is to go through the target next."""
        tokens, start = self.writing.pending(), self.writing.computed
        slots = np.arange(self.first_slot, self.first_slot + start + len(tokens))
        return Run(tokens, start, slots[start:], slots[:start])


def use_threads(count: int) -> None:
    """Compute with so many threads. Processes of one thread each suffer least from company."""
    torch.set_num_threads(count)


class Capture:
    """Writes conversations one token a step each; a free seat takes the next plan."""

    def __init__(self, decoder: Decoder, config: CaptureConfig, kv_dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._config = config
        self._cache = KVCache(decoder.config, config.num_slots, kv_dtype)

    def run(self, plans: Iterator[Plan], done: Callable[[Document], None]) -> None:
        """Write them all. What a conversation becomes does not depend on its company in exact mode.

        Raises CorpusError for a target whose logits are not finite, and for a plan that begins
        with more than a conversation may have.
        """
        free = list(range(0, self._config.num_slots, self._config.max_length))
        seats: list[_Seat] = []
        while True:
            while free and (plan := next(plans, None)) is not None:
                seats.append(self._seat(plan, free.pop()))
            if not seats:
                return
            self._step(_of_one_step(seats))
            over = [seat for seat in seats if seat.writing.is_over]
            seats = [seat for seat in seats if not seat.writing.is_over]
            for seat in over:
                free.append(seat.first_slot)
                done(_document(seat))

    def _seat(self, plan: Plan, first_slot: int) -> _Seat:
        writing = Writing(plan, self._config.max_length)
        if writing.is_over:
            raise CorpusError(
                f"conversation {plan.number} begins with {len(plan.turns[0].given)} tokens and may "
                f"have {self._config.max_length}; allow longer ones, or leave it out"
            )
        return _Seat(writing, first_slot)

    def _step(self, seats: Sequence[_Seat]) -> None:
        runs = [seat.run() for seat in seats]
        hidden = self._decoder.hidden(build_batch(runs), self._cache)  # [rows, hidden]
        ends = np.cumsum([len(run.tokens) for run in runs])
        logits = self._logits(hidden[torch.from_numpy(ends - 1)])
        choice = choose(
            logits,
            torch.tensor([seat.writing.temperature for seat in seats], dtype=torch.float64),
            as_int64(seat.writing.plan.seed for seat in seats),
            torch.tensor([run.end for run in runs]),
        )
        for seat, is_finite in zip(seats, choice.finite.tolist(), strict=True):
            if not is_finite:
                raise CorpusError(
                    f"the target's logits are not finite in conversation "
                    f"{seat.writing.plan.number}; fetch its weights again, or capture another model"
                )
        self._keep(seats, hidden, logits)
        for seat, run, token in zip(seats, runs, choice.tokens.tolist(), strict=True):
            seat.writing.computed = run.end
            seat.writing.write(token, self._config.ends)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [n, hidden]: float32 [n, vocab], without ids that mean nothing."""
        return only_known(self._decoder.logits(hidden), self._config.vocab_size)

    def _keep(self, seats: Sequence[_Seat], hidden: Tensor, logits: Tensor) -> None:
        """Remember what is kept of each row, with its conversation.

        `logits` are those of each conversation's last row.
        """
        kept = self._config.kept
        parts: dict[str, Tensor] = {}
        if kept.state_size:
            parts["states"] = hidden.bfloat16()
        if kept.top:
            parts |= self._best(hidden, logits)
        for name, rows in parts.items():
            pieces = rows.split([seat.writing.num_pending for seat in seats])
            for seat, piece in zip(seats, pieces, strict=True):
                seat.parts.setdefault(name, []).append(piece)

    def _best(self, hidden: Tensor, logits: Tensor) -> dict[str, Tensor]:
        """The best tokens of every row, from its logits where they are there already."""
        count = self._config.kept.top
        if len(logits) == len(hidden):
            return _best_of(logits, count)
        pieces = [_best_of(self._logits(rows), count) for rows in hidden.split(HEAD_ROWS)]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _of_one_step(seats: Sequence[_Seat]) -> Sequence[_Seat]:
    """The first seats, as many as STEP_ROWS has room for, one at least: the others wait a step."""
    rows = np.cumsum([seat.writing.num_pending for seat in seats])
    return seats[: max(1, int((rows <= STEP_ROWS).sum()))]


def _best_of(logits: Tensor, count: int) -> dict[str, Tensor]:
    best = logits.topk(count)
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
        assert len(rows) == len(tokens) - 1, "all but the last token went through the target"
        parts[name] = torch.cat((rows, rows.new_zeros((1, *rows.shape[1:]))))
    return Document(seat.writing.plan.number, tokens, np.array(seat.writing.answers), parts)
