"""Which tokens would repeat a run of the history. Knows no tensors."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice


class Ngrams:
    """The runs of `length` tokens in one sequence, found by their first `length - 1`."""

    def __init__(self, length: int) -> None:
        self._before = length - 1
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        self._tail: tuple[int, ...] = ()  # what the next run begins with

    def commit(self, tokens: Sequence[int]) -> None:
        """These are in the history from now on."""
        line = (*self._tail, *tokens)
        for start, last in enumerate(islice(line, self._before, None)):
            self._followers[line[start : start + self._before]].add(last)
        self._tail = self._end_of(line)

    def repeats(self, path: Sequence[int]) -> set[int]:
        """What would complete a run, after a path of guesses, that was there before."""
        line = (*self._tail, *path)
        end = self._end_of(line)
        guessed = {
            last
            for start, last in enumerate(islice(line, self._before, None))
            if line[start : start + self._before] == end
        }
        return guessed | self._followers.get(end, set())

    def _end_of(self, line: tuple[int, ...]) -> tuple[int, ...]:
        return line[max(len(line) - self._before, 0) :]
