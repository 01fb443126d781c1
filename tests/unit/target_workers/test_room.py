"""A cache that does not fit on its device is refused with what would."""

from dataclasses import replace

import pytest

from target_workers.config import TargetConfig
from target_workers.model.config import ModelConfig, ModelError
from target_workers.model.shard import Shard
from target_workers.room import check_room, free_bytes
from tests.tiny import make_tiny

CONFIG = TargetConfig("folder", device="cuda", page_size=16, num_pages=1000, max_context=4000)
PAGE = 16 * 2 * 2 * 2 * 16 * 2  # tokens, keys and values, layers, heads, head_dim, bf16


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), 1, "Llama", tie_word_embeddings=False)
    return ModelConfig.from_folder(folder)


def refusal(config: TargetConfig, shape: ModelConfig, pages: int) -> str:
    """What is said when so many pages of the configured type fit."""
    with pytest.raises(ModelError) as caught:
        check_room(config, shape, int(pages * PAGE / 0.9) + 1)
    return str(caught.value)


def test_a_cache_that_fits_is_taken(shape: ModelConfig) -> None:
    check_room(CONFIG, shape, int(1000 * PAGE / 0.9) + 1)
    check_room(CONFIG, shape, None)
    assert free_bytes("cpu") is None


@pytest.mark.parametrize(
    ("pages", "remedies"),
    [
        (999, "target.num_pages to 999, or target.kv_dtype to int8, or target.tp to 2"),
        (600, "target.num_pages to 600, or target.tp to 2"),
        (250, "limits.max_context below 4000, or target.tp to 4"),
        (0, "target.tp higher"),
    ],
)
def test_one_that_does_not_names_what_would(shape: ModelConfig, pages: int, remedies: str) -> None:
    said = refusal(CONFIG, shape, pages)
    assert f"MiB of cuda are left for it; set {remedies}" in said
    assert said.startswith(f"the cache takes {1000 * PAGE >> 20} MiB")


def test_more_ranks_are_asked_for_than_there_are(shape: ModelConfig) -> None:
    part = replace(CONFIG, shard=Shard(0, 2))
    assert "target.tp to 4" in refusal(part, shape, 500)
