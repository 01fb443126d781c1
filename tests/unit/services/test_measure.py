"""Figures are sums over streams."""

import pytest

from services.measure import Sample, percentile, summarise


def test_ratios_are_of_sums() -> None:
    samples = [
        Sample((1, 2, 3), first_s=0.1, total_s=1.0, rounds=1, accepted=2, hits=1, drafted=5),
        Sample((4,), first_s=0.3, total_s=1.0, rounds=1, accepted=0, hits=0, drafted=3),
    ]
    total = summarise(samples)
    assert (total.tokens, total.tokens_per_s) == (4, 2.0)
    assert (total.accepted_length, total.hit_rate) == (2.0, 0.5)
    assert total.acceptance == 0.25
    assert total.first_s == pytest.approx(0.2)


def test_nothing_measured_gives_zeros() -> None:
    total = summarise([])
    assert (total.tokens, total.tokens_per_s, total.hit_rate) == (0, 0.0, 0.0)


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0)])
def test_percentiles_are_interpolated(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value
