"""Prompt lookup against a plain scan."""

import random

import pytest

from orchestrator.lookup import MAX_NGRAM, NgramIndex


def scan(tokens: list[int], count: int) -> list[int]:
    """The continuation of the longest, then latest, earlier match of at least two tokens."""
    for n in range(min(MAX_NGRAM, len(tokens) - 1), 1, -1):
        tail = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tail:
                grown = list(tokens)
                for i in range(count):
                    grown.append(grown[start + n + i])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(200))
def test_it_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
    index = NgramIndex(tokens[:1])
    index.extend(tokens[1:])
    assert index.continuation(5) == scan(tokens, 5)


def test_nothing_is_proposed_for_a_text_without_repetition() -> None:
    assert NgramIndex(range(50)).continuation(4) == []


def test_a_repeated_word_is_continued() -> None:
    assert NgramIndex([5, 5, 5]).continuation(3) == [5, 5, 5]
