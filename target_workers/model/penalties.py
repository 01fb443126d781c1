"""What the penalties and the bias of one sequence do to its logits. Knows no tensors."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from protos.sampling import Processors

EFFECTS = 4  # a divisor, then what presence and frequency subtract, then what the bias adds
ROOM = 64  # tokens there is room for at first

Entries = tuple[NDArray[np.int64], NDArray[np.float64]]  # ids [n] and their effects [EFFECTS, n]


class Penalties:
    """The tokens whose logits change, and how. Ids from `vocab_size` on have no logits."""

    def __init__(self, processors: Processors, vocab_size: int) -> None:
        self._processors, self._vocab_size = processors, vocab_size
        self._counts: Counter[int] = Counter()
        self._bias: dict[int, float] = {}
        self._slots: dict[int, int] = {}
        self._ids = np.empty(ROOM, np.int64)
        self._effects = np.empty((EFFECTS, ROOM))
        for bias in processors.bias:
            self._bias[bias.token] = self._bias.get(bias.token, 0.0) + bias.value
        self._store(self._known(self._bias), is_seen=False)

    @property
    def entries(self) -> Entries:
        """Every token that is changed after what was committed."""
        size = len(self._slots)
        return self._ids[:size], self._effects[:, :size]

    def commit(self, tokens: Iterable[int], *, is_output: bool) -> None:
        """These are in the history from now on."""
        if not self._minds(is_output=is_output):
            return
        found = self._known(tokens)
        if is_output:
            self._counts.update(found)
        self._store(found, is_seen=True)

    def after(self, path: Sequence[int]) -> Entries:
        """The tokens of a path of guesses as they are at its end; they override `entries`."""
        found = self._known(path) if path and self._minds(is_output=True) else {}
        counts = [self._counts[token] + times for token, times in found.items()]
        return np.array([*found], np.int64), self._effects_of(found, counts, is_seen=True)

    def _minds(self, *, is_output: bool) -> bool:
        asked = self._processors
        if asked.repetition_penalty != 1:
            return True
        return is_output and (asked.presence_penalty != 0 or asked.frequency_penalty != 0)

    def _known(self, tokens: Iterable[int]) -> dict[int, int]:
        """How often each token is among these, without those that have no logits."""
        return {token: n for token, n in Counter(tokens).items() if token < self._vocab_size}

    def _store(self, tokens: Iterable[int], *, is_seen: bool) -> None:
        ids = list(tokens)
        slots = [self._slots.setdefault(token, len(self._slots)) for token in ids]
        missing = len(self._slots) - len(self._ids)
        if missing > 0:
            room = max(missing, len(self._ids))
            self._ids = np.pad(self._ids, (0, room))
            self._effects = np.pad(self._effects, ((0, 0), (0, room)))
        self._ids[slots] = ids
        counts = [self._counts[token] for token in ids]
        self._effects[:, slots] = self._effects_of(ids, counts, is_seen=is_seen)

    def _effects_of(
        self, tokens: Iterable[int], counts: Sequence[int], *, is_seen: bool
    ) -> NDArray[np.float64]:
        asked, times = self._processors, np.array(counts, np.float64)
        effects = np.empty((EFFECTS, len(counts)))
        effects[0] = asked.repetition_penalty if is_seen else 1.0
        effects[1] = asked.presence_penalty * (times > 0)
        effects[2] = asked.frequency_penalty * times
        effects[3] = [self._bias.get(token, 0.0) for token in tokens]
        return effects
