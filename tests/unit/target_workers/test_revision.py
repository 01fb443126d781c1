"""What a client is told of the model changes whenever its tokens may."""

from dataclasses import replace
from pathlib import Path

from target_workers.config import TargetConfig
from target_workers.forward import revision
from tests.tiny import make_tiny_llama


def test_a_revision_is_of_the_weights_and_of_every_type(tmp_path: Path) -> None:
    config = TargetConfig(str(make_tiny_llama(tmp_path / "a", 1)))
    other = make_tiny_llama(tmp_path / "b", 2)
    configs = [
        config,
        replace(config, path=str(other)),
        replace(config, dtype="fp32"),
        replace(config, weight_dtype="int8"),
        replace(config, kv_dtype="int8"),
    ]
    assert len({revision(each) for each in configs}) == len(configs)
    same = [replace(config, kv_dtype="bf16"), replace(config, num_pages=7, max_rows=3)]
    assert {revision(each) for each in same} == {revision(config)}
