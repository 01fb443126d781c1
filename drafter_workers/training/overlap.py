"""Keeps benchmark prompts out of training: what shares a long run of words with one is named."""

import re
from collections.abc import Iterable

RUN = 10  # words


def words(text: str) -> list[str]:
    """Words as the check compares them."""
    return re.findall(r"\w+", text.lower())


class KeptOut:
    """The texts that no document may share RUN consecutive words with.

    A text of fewer words must not appear as a whole.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs: set[tuple[str, ...]] = set()
        self._lengths: set[int] = set()
        for text in texts:
            own = words(text)
            size = min(RUN, len(own))
            if size:
                self._lengths.add(size)
                self._runs.update(_runs(own, size))

    def overlap(self, text: str) -> str:
        """The first words shared with a text that is kept out; empty if there are none."""
        own = words(text)
        for size in sorted(self._lengths, reverse=True):
            for run in _runs(own, size):
                if run in self._runs:
                    return " ".join(run)
        return ""


def _runs(all_words: list[str], size: int) -> Iterable[tuple[str, ...]]:
    return zip(*(all_words[i:] for i in range(size)), strict=False)
