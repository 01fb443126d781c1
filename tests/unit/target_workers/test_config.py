"""Settings that cannot work are named when they are made."""

import pytest

from target_workers.config import TargetConfig


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("page_size", 0),
        ("num_pages", 0),
        ("max_rows", -1),
        ("max_context", 0),
        ("dtype", "int4"),
        ("kv_dtype", "fp8"),
        ("vocab_size", -1),
        ("threads", (2, 0)),
    ],
)
def test_settings_are_checked(setting: str, value: str | int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=setting):
        TargetConfig("folder", **{setting: value})  # type: ignore[arg-type]
