"""Settings that cannot work are named when they are made."""

import pytest

from drafter_workers.config import DrafterConfig, GrowthConfig


def test_the_defaults_are_consistent() -> None:
    assert DrafterConfig("folder").growth == GrowthConfig()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch", 0), ("width", 0), ("feed_rows", -1), ("report_every", 0), ("floor", 0.0)],
)
def test_growth_limits_are_checked(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=setting):
        GrowthConfig(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("rank", "best"), ("dtype", "int4"), ("num_slots", 0), ("max_rows", 100)],
)
def test_drafter_settings_are_checked(setting: str, value: str | int) -> None:
    with pytest.raises(ValueError, match=setting):
        DrafterConfig("folder", **{setting: value})  # type: ignore[arg-type]
