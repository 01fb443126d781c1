"""What a configuration comes to before anything is started."""

from dataclasses import replace
from pathlib import Path

import pytest

import services.launch
from drafter_workers.planting import plant
from drafter_workers.student import Borrowed
from services import preflight
from services.config import (
    ClusterConfig,
    Config,
    DrafterConfig,
    LimitsConfig,
    ModelConfig,
    ServerConfig,
)
from services.config import TargetConfig as Target
from services.errors import ConfigError
from services.launch import launched, prepare
from services.preflight import LaunchError
from target_workers.model.files import ends_hash
from target_workers.model.shard import Shard
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import byte_level_folder

TOKEN = 2 * 2 * 2 * 16  # keys and values, layers, heads, head_dim


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = byte_level_folder(tmp_path_factory.mktemp("whole"))
    make_tiny_llama(folder, 1)
    return Config(
        model=ModelConfig(path=str(folder)),
        drafter=(DrafterConfig(path=str(folder)),),
        limits=LimitsConfig(max_sequences=2, max_context=200, step_rows=32),
        server=ServerConfig(grpc="127.0.0.1:0", health="127.0.0.1:0", http="", metrics=""),
    )


def test_workers_get_the_pages_and_types_of_the_plan(config: Config) -> None:
    prepared = prepare(replace(config, target=Target(kv_dtype="int8", page_size=8)))
    assert [holder.name for holder in prepared.memory.holders] == ["target", "drafter-0"]
    target, drafter = (holder.footprint for holder in prepared.memory.holders)
    assert (target.kv_bytes, drafter.kv_bytes) == (TOKEN + TOKEN // 16 * 4, 2 * TOKEN)
    settings = [prepared.recipe(seat).options["config"] for seat in prepared.plan.processes]
    assert (settings[0].kv_dtype, settings[0].num_pages) == ("int8", 2 * 33)
    assert settings[1].num_slots == 2 * 33 * 8


def test_every_rank_of_the_target_keeps_its_part(config: Config) -> None:
    one, two = (prepare(replace(config, target=Target(tp=tp), drafter=())) for tp in (1, 2))
    assert [holder.name for holder in two.memory.holders] == ["target rank 0", "target rank 1"]
    (whole,), parts = ([h.footprint for h in each.memory.holders] for each in (one, two))
    assert sum(part.kv_bytes for part in parts) == whole.kv_bytes
    assert all(
        whole.weights_bytes // 2 < part.weights_bytes < whole.weights_bytes for part in parts
    )
    with pytest.raises(ConfigError, match=r"target\.tp"):
        prepare(replace(config, target=Target(tp=5), drafter=()))


def test_memory_elsewhere_is_not_planned_with_what_is_here(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.launch, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"limits\.max_context: weights and work take"):
        prepare(config)
    monkeypatch.setattr(preflight, "GPU_SIGNS", (Path("/"),))
    cuda = replace(config, target=Target(device="cuda"), drafter=())
    assert prepare(cuda).memory.lines()[0].endswith(" of its device")


def test_every_rank_is_told_its_part_and_where_to_listen(config: Config) -> None:
    there = ClusterConfig(address="auto", rank_timeout_s=3.0)
    for cluster, host in ((ClusterConfig(rank_timeout_s=3.0), "127.0.0.1"), (there, "")):
        prepared = prepare(replace(config, target=Target(tp=2), drafter=(), cluster=cluster))
        settings = [prepared.recipe(seat).options["config"] for seat in prepared.plan.processes]
        assert [each.shard for each in settings] == [Shard(0, 2), Shard(1, 2)]
        assert {(each.host, each.rank_timeout_s) for each in settings} == {(host, 3.0)}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(dtype="fp64"), "target.exact: exact mode needs a CPU, bf16 or fp32"),
        (Target(dtype="fp16", exact=False, weight_dtype="int8"), "target.weight_dtype: int8 needs"),
    ],
)
def test_what_no_kernel_gives_is_refused(config: Config, target: Target, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(replace(config, target=target))


def test_without_kernels_torch_serves(config: Config) -> None:
    prepared = prepare(replace(config, target=Target(dtype="fp64", exact=False)))
    assert not prepared.memory.holders[0].footprint.has_kernels


async def heard(config: Config) -> list[str]:
    """What the user hears of kernels before any worker starts."""
    said: list[str] = []
    with pytest.raises(LaunchError, match="planted"):
        async with launched(config, said.append):
            pass
    return [line for line in said if line.startswith("kernels")]


async def test_the_user_hears_that_kernels_are_not_kept(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def no_workers(*_: object) -> None:
        raise LaunchError("planted")

    monkeypatch.setattr(services.launch, "_start_workers", no_workers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert await heard(config) == []
    (tmp_path / "file").write_text("no folder can be made below a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (line,) = await heard(config)
    assert "cannot be kept" in line and str(tmp_path / "file") in line
    without = replace(config, target=Target(dtype="fp64", exact=False))
    for other in (without, replace(config, cluster=ClusterConfig(address="auto"))):
        assert await heard(other) == []


def test_a_student_needs_no_tokenizer_and_its_own_target(config: Config, tmp_path: Path) -> None:
    target = Path(config.model.path)
    plant(target, tmp_path, (0,), Borrowed(ends_hash(target), tuple(range(16))))
    students = replace(config, drafter=(DrafterConfig(path=str(tmp_path), weight_dtype="int8"),))
    prepared = prepare(students)
    (seat,) = prepared.plan.drafters
    settings = prepared.recipe(seat).options["config"]
    assert (settings.lender, settings.weight_dtype) == (str(target), "int8")
    whole, small = (holder.footprint.weights_bytes for holder in prepared.memory.holders)
    assert small < whole
    (tmp_path / "other").mkdir()
    other = byte_level_folder(tmp_path / "other")
    make_tiny_llama(other, 2)
    with pytest.raises(ConfigError, match=r"drafter\.0\.path.*student of another model"):
        prepare(replace(students, model=ModelConfig(path=str(other))))
