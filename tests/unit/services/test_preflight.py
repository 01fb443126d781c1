"""What cannot work is refused by name, before anything is started."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services import preflight
from services.config import (
    ClusterConfig,
    Config,
    DrafterConfig,
    ModelConfig,
    ServerConfig,
    SpeculationConfig,
    TargetConfig,
)
from services.errors import ConfigError
from services.preflight import check, memory_bytes
from tests.unit.services.tiny_folder import byte_level_folder, sentencepiece_folder

METHODS = ("small_model",)


def with_weights(folder: Path) -> Path:
    """The folder with one tensor of 16 bytes."""
    save_file({"w": np.zeros(4, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights(byte_level_folder(tmp_path_factory.mktemp("weighted")))


@pytest.fixture
def good(folder: Path) -> Config:
    server = ServerConfig(grpc="127.0.0.1:0", health="127.0.0.1:0", http="", metrics="")
    return Config(
        model=ModelConfig(path=str(folder)),
        drafter=(DrafterConfig(path=str(folder)),),
        server=server,
    )


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, METHODS)


def test_a_good_configuration_gives_folders_and_tokenizer(good: Config, folder: Path) -> None:
    models = check(good, METHODS)
    assert (models.target, models.drafters) == (folder, (folder,))
    assert models.tokenizer.vocab_size > 256


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def shard_that_is_missing(folder: Path) -> None:
    index = {"weight_map": {"w": "model-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (cut, "cut short"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
        (shard_that_is_missing, "lacks model-00001.safetensors"),
        (index_that_is_none, "cut short or no safetensors"),
    ],
)
def test_weights_that_are_missing_or_cut(
    good: Config, tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    bad = with_weights(byte_level_folder(tmp_path))
    harm(bad)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{re.escape(says)}"):
        check(replace(good, model=ModelConfig(path=str(bad))), METHODS)
    with pytest.raises(ConfigError, match=rf"drafter\.0\.path: .*{re.escape(says)}"):
        check(replace(good, drafter=(DrafterConfig(path=str(bad)),)), METHODS)


def test_a_model_that_is_not_there(good: Config) -> None:
    refused(replace(good, model=ModelConfig(path="/nowhere")), "model.path: no model /nowhere")


def test_a_drafter_that_is_not_there(good: Config) -> None:
    config = replace(good, drafter=(DrafterConfig(path="/nowhere"),))
    refused(config, "drafter.0.path: no model /nowhere")


def test_a_folder_without_a_tokenizer(good: Config, tmp_path: Path) -> None:
    refused(replace(good, model=ModelConfig(path=str(tmp_path))), "model.path: ")


def test_a_drafter_with_another_tokenizer(good: Config, tmp_path: Path) -> None:
    config = replace(good, drafter=(DrafterConfig(path=str(sentencepiece_folder(tmp_path))),))
    refused(config, "drafter.0.path: its tokenizer is not the target's (id 0 is ")


def test_a_drafter_is_not_looked_at_if_drafters_are_no_source(
    good: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        good,
        drafter=(DrafterConfig(path="/nowhere", device="cuda"),),
        speculation=SpeculationConfig(sources=("lookup",)),
    )
    monkeypatch.setattr(preflight, "GPU_SIGNS", ())
    assert check(config, METHODS).drafters == ()


def test_a_method_that_is_not_known(good: Config) -> None:
    config = replace(good, drafter=(DrafterConfig(path="d", method="magic"),))
    refused(config, "drafter.0.method is 'magic'; known are small_model")


def test_exact_mode_on_a_gpu(good: Config) -> None:
    refused(replace(good, target=TargetConfig(device="cuda", exact=True)), "target.exact: ")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_that_is_not_there_is_refused(
    good: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool
) -> None:
    sign = tmp_path / "nvidiactl"
    monkeypatch.setattr(preflight, "GPU_SIGNS", (sign,))
    if has_gpu:
        sign.touch()
    drafter = replace(good.drafter[0], device="cuda")
    for config, key in (
        (replace(good, target=TargetConfig(device="cuda", exact=False)), "target.device"),
        (replace(good, drafter=(drafter,)), "drafter.0.device"),
    ):
        if has_gpu:
            check(config, METHODS)
        else:
            refused(config, f"{key} is cuda")


def test_what_comes_with_a_later_release_is_refused_if_it_was_asked_for(good: Config) -> None:
    later = "comes with a later release"
    for sources in (("suffix",), ("lookup", "suffix")):
        config = replace(good, speculation=SpeculationConfig(sources=sources))
        refused(config, f"speculation.sources: suffix {later}")
    lossy = SpeculationConfig(allow_lossy=True)
    refused(replace(good, speculation=lossy), f"speculation.allow_lossy {later}")
    for key, address in (("http", "127.0.0.1:8001"), ("metrics", "127.0.0.1:9401")):
        server = replace(good.server, **{key: address})
        refused(replace(good, server=server), f"server.{key} {later}")
    defaults = ServerConfig()
    server = replace(good.server, http=defaults.http, metrics=defaults.metrics)
    check(replace(good, server=server), METHODS)


@pytest.mark.parametrize("key", ["grpc", "health"])
def test_an_address_that_is_taken(good: Config, taken: int, key: str) -> None:
    address = f"127.0.0.1:{taken}"
    one = replace(good.server, grpc=address)
    server = one if key == "grpc" else replace(good.server, health=address)
    refused(replace(good, server=server), f"server.{key}: cannot listen on 127.0.0.1:{taken}")


def test_an_address_of_another_machine(good: Config) -> None:
    server = replace(good.server, grpc="203.0.113.1:50051")
    refused(replace(good, server=server), "server.grpc: cannot listen on 203.0.113.1:50051")


def test_a_cluster_that_does_not_answer(good: Config) -> None:
    config = replace(good, cluster=ClusterConfig(address="127.0.0.1:1"))
    refused(config, "cluster.address: nothing answers at 127.0.0.1:1")


def test_a_cluster_that_answers(good: Config, taken: int) -> None:
    check(replace(good, cluster=ClusterConfig(address=f"127.0.0.1:{taken}")), METHODS)


def test_the_memory_of_this_machine_is_known() -> None:
    assert memory_bytes() > 1 << 27
