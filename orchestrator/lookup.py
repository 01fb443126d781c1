"""Prompt lookup: continue as the context went on after its last occurrence of the same n-gram.

An index, not a scan: one dictionary entry per bigram, its occurrences chained backwards.
"""

from collections.abc import Sequence

SOURCE = "lookup"
LOGPROB = -0.7  # the stated score of a looked-up token: about even odds
MAX_NGRAM = 8  # longer matches are not told apart
MAX_CANDIDATES = 32  # occurrences compared per lookup, most recent first


class NgramIndex:
    """Occurrences of every bigram of one sequence's committed tokens."""

    __slots__ = ("_last", "_previous", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}
        self._previous: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take newly committed tokens; constant time each."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens) - 1
            bigram = (self._tokens[end - 1], token) if end else (-1, token)
            self._previous.append(self._last.get(bigram, -1))
            self._last[bigram] = end

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest, then latest, earlier match."""
        tokens, end = self._tokens, len(self._tokens) - 1
        best, best_length, seen = -1, 1, 0
        candidate = self._previous[end] if end > 0 else -1
        while candidate > 0 and seen < MAX_CANDIDATES and best_length < MAX_NGRAM:
            length = self._common_suffix(candidate, end)
            if length > best_length:
                best, best_length = candidate, length
            candidate, seen = self._previous[candidate], seen + 1
        if best < 0:
            return []
        # A match that overlaps the end goes on repeating itself.
        period = end - best
        return [tokens[best + 1 + i % period] for i in range(count)]

    def _common_suffix(self, a: int, b: int) -> int:
        length = 2
        while (
            length < MAX_NGRAM
            and a >= length
            and self._tokens[a - length] == (self._tokens[b - length])
        ):
            length += 1
        return length
