"""Measures of drafting from hits alone, against a simulation of the rounds."""

import numpy as np
import pytest

from drafter_workers.training.acceptance import accepted_length, by_depth, run_lengths


def rounds(hits: list[bool], depth: int) -> int:
    """Verifications of chains of `depth` along a text: each gives what stands and one token."""
    place = count = 0
    while place < len(hits):
        stood = 0
        while stood < depth and place + stood < len(hits) and hits[place + stood]:
            stood += 1
        place += stood + 1
        count += 1
    return count


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_accepted_length_is_tokens_per_round(seed: int, depth: int) -> None:
    hits = np.random.default_rng(seed).random(200) < 0.6
    assert accepted_length(hits, depth) == 200 / rounds(hits.tolist(), depth)


def test_runs_are_counted_to_their_end_and_to_the_depth() -> None:
    hits = np.array([True, True, True, False, True])
    assert run_lengths(hits, 8).tolist() == [3, 2, 1, 0, 1]
    assert run_lengths(hits, 2).tolist() == [2, 2, 1, 0, 1]
    assert accepted_length(np.array([], bool), 4) == 1.0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_chances_by_depth_are_those_of_chains_from_every_place(depth: int) -> None:
    chance = np.random.default_rng(depth)
    texts = [chance.random(size) < 0.7 for size in (50, 3, 0, 1, 20)]
    tried, stood = [0] * depth, [0] * depth
    for hits in texts:
        for start in range(len(hits)):
            for d, hit in enumerate(hits[start : start + depth]):
                tried[d] += 1
                stood[d] += bool(hit)
                if not hit:
                    break
    assert by_depth(texts, depth) == [s / t for s, t in zip(stood, tried, strict=True)]


def test_chances_by_depth_are_conditional() -> None:
    hits = np.array([True, True, False, True, False])
    assert by_depth([hits], 3) == [3 / 5, 1 / 3, 0.0]
    assert by_depth([hits, hits[:2]], 2) == [5 / 7, 2 / 4], "no guess beyond the end of a text"
    assert np.isnan(by_depth([np.array([False])], 2)[1])
