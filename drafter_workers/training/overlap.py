"""Keeps benchmark prompts out of training: what shares a long run of words with one is named."""

import re
import unicodedata
from collections.abc import Iterable

RUN = 10  # words


def words(text: str) -> list[str]:
    """Words as the check compares them: whatever their case, marks and spelling in Unicode."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


class KeptOut:
    """The texts that no document may share RUN consecutive words with.

    A text of fewer words must not appear as a whole.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            own = words(text)
            if own:
                self._runs.update(_runs(own, min(RUN, len(own))))
        self._sizes = sorted({len(run) for run in self._runs}, reverse=True)

    def overlap(self, text: str) -> str:
        """The first words shared with a text that is kept out; empty if there are none."""
        own = words(text)
        for size in self._sizes:
            for run in _runs(own, size):
                if run in self._runs:
                    return " ".join(run)
        return ""


def _runs(all_words: list[str], size: int) -> Iterable[tuple[str, ...]]:
    """Every `size` words that follow each other."""
    return zip(*(all_words[i:] for i in range(size)), strict=False)
