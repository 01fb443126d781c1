"""Requests over every field that decides tokens, at random from a seed."""

from dataclasses import replace

import numpy as np

from orchestrator.request import Mode, Request
from protos.sampling import PLAIN, Bias, Processors, Sampling, Scoring

FIRST = 10  # below are special tokens


class Requests:
    """A stream of requests over a vocabulary; `grammars` are tried now and then."""

    def __init__(self, seed: int, vocab: int, grammars: tuple[str, ...] = ()) -> None:
        self._chance = np.random.default_rng(seed)
        self._vocab = vocab
        self._grammars = grammars

    def next(self, name: str) -> Request:
        """One more, to be answered without speculation."""
        prompt = self._ids(int(self._chance.integers(1, 40)))
        if self._often(0.3):  # begins like others, to be found in the prefix cache
            prompt = (*range(FIRST, FIRST + 32), *prompt)
        temperature = float(self._chance.choice([0.0, 1e-6, 0.3, 0.8, 1.0, 2.0, 10.0]))
        stops = self._ids(2)
        processors = self._processors(stops) if self._often(0.85) else PLAIN
        return Request(
            name,
            prompt,
            int(self._chance.integers(1, 28)),
            Sampling(
                temperature, int(self._chance.integers(2**63)), "match", processors, len(prompt)
            ),
            stop_token_ids=stops,
            mode=Mode.OFF,
            prefix_cache=self._often(0.7),
            scoring=self._scoring(),
        )

    def speculated(self, request: Request, answer: tuple[int, ...]) -> Request:
        """The same with speculation, resumed somewhere in its answer or not at all."""
        resumed = int(self._chance.integers(len(answer))) if answer and self._often(0.3) else 0
        mode = Mode.SYNC if self._often(0.4) else Mode.ASYNC
        return replace(
            request,
            request_id=f"{request.request_id} speculated",
            mode=mode,
            k=int(self._chance.integers(0, 9)),
            resumed=answer[:resumed],
            prefix_cache=self._often(0.7),
        )

    def _processors(self, stops: tuple[int, ...]) -> Processors:
        every = Processors(
            repetition_penalty=float(self._chance.choice([0.8, 1.2, 2.0])),
            presence_penalty=float(self._chance.uniform(-2, 2)),
            frequency_penalty=float(self._chance.uniform(-2, 2)),
            bias=tuple(Bias(id_, float(self._chance.uniform(-9, 9))) for id_ in self._ids(3)),
            allowed=self._ids(40),
            withheld=stops,
            min_tokens=int(self._chance.integers(1, 12)),
            no_repeat_ngram=int(self._chance.integers(1, 4)),
            grammar=str(self._chance.choice(self._grammars)) if self._grammars else "",
            top_k=int(self._chance.choice([1, 2, 5, 50])),
            top_p=float(self._chance.choice([0.1, 0.5, 0.9, 0.999])),
            min_p=float(self._chance.choice([0.01, 0.1, 0.5])),
        )
        kept = {
            field: getattr(every, field)
            for field in Processors.__dataclass_fields__
            if self._often(0.1 if field == "grammar" else 0.25)
        }
        if "grammar" in kept:  # together they may leave nothing to choose
            kept = {field: kept[field] for field in kept if field not in ("allowed", "withheld")}
            kept.pop("no_repeat_ngram", None)
        return Processors(**kept)

    def _scoring(self) -> Scoring:
        if self._often(0.6):
            return Scoring()
        return Scoring(int(self._chance.integers(0, 4)), processed=self._often(0.5))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(int(i) for i in self._chance.integers(FIRST, self._vocab, count))

    def _often(self, share: float) -> bool:
        return bool(self._chance.random() < share)
