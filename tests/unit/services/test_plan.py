"""Seats and sizes: every core has its use, and one core is shared by saying so."""

import pytest

from services.config import Config, DrafterConfig, LimitsConfig, SpeculationConfig, TargetConfig
from services.errors import ConfigError
from services.plan import Plan, Room, cache_tokens, share_out, tokens_per_sequence


def plan(cores: int, *drafters: DrafterConfig, target: tuple[int, ...] = ()) -> Plan:
    config = Config(target=TargetConfig(cores=target), drafter=drafters)
    return share_out(config, range(cores))


def test_without_a_drafter_the_target_has_every_core() -> None:
    found = plan(4)
    assert found.target.cores == (0, 1, 2, 3)
    assert (found.cores_alone, found.cores_shared) == (4, 4)
    assert found.drafters == ()


def test_a_drafter_gets_the_last_core_and_the_target_rests_it_while_it_drafts() -> None:
    found = plan(2, DrafterConfig(path="d"))
    assert found.target.cores == (0, 1)
    assert found.drafters[0].cores == (1,)
    assert (found.cores_alone, found.cores_shared) == (2, 1)
    assert found.own == (0,), "the orchestrator keeps off the drafter's core"


def test_drafters_together_get_a_quarter_of_many_cores() -> None:
    found = plan(16, DrafterConfig(path="d", replicas=2))
    assert [seat.cores for seat in found.drafters] == [(12, 13), (14, 15)]
    assert found.cores_shared == 12
    assert [seat.name for seat in found.processes] == ["target", "drafter-0", "drafter-1"]


def test_one_core_makes_the_drafter_share_the_process() -> None:
    found = plan(1, DrafterConfig(path="d"))
    assert found.drafters[0].in_process
    assert found.processes == (found.target,)
    assert (found.target.cores, found.cores_shared, found.own) == ((0,), 1, (0,))


def test_more_drafters_than_cores_share_what_the_target_leaves() -> None:
    found = plan(2, DrafterConfig(path="d", replicas=3))
    assert [seat.cores for seat in found.drafters] == [(1,), (1,), (1,)]
    assert found.cores_shared == 1


def test_named_cores_are_kept() -> None:
    named = DrafterConfig(path="d", cores=(0,))
    found = plan(4, named, DrafterConfig(path="e"), target=(1, 2))
    assert [seat.cores for seat in found.drafters] == [(0,), (3,)]
    assert (found.target.cores, found.cores_alone, found.cores_shared) == ((1, 2), 2, 2)


def test_a_drafter_that_names_its_core_is_a_process_even_on_one() -> None:
    found = plan(1, DrafterConfig(path="d", cores=(0,)))
    assert not found.drafters[0].in_process
    assert found.cores_shared == 1


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(target=TargetConfig(cores=(0, 9))), "target.cores"),
        (Config(drafter=(DrafterConfig(path="d", cores=(9,)),)), "drafter.0.cores"),
    ],
)
def test_a_core_that_does_not_exist_is_refused(config: Config, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: this process has no core 9"):
        share_out(config, range(2))


def test_on_other_machines_only_named_cores_are_set() -> None:
    config = Config(target=TargetConfig(cores=(40, 41)), drafter=(DrafterConfig(path="d"),))
    found = share_out(config, ())
    assert (found.target.cores, found.drafters[0].cores, found.own) == ((40, 41), (), ())
    assert not found.drafters[0].in_process


def test_no_drafter_is_seated_if_drafters_are_no_source() -> None:
    config = Config(
        drafter=(DrafterConfig(path="d"),), speculation=SpeculationConfig(sources=("lookup",))
    )
    assert share_out(config, range(2)).drafters == ()


def test_caches_get_what_is_wanted_if_it_fits_and_else_what_fits() -> None:
    assert cache_tokens(1000, 100, token_bytes=10, free_bytes=1 << 20) == 1000
    assert cache_tokens(1000, 100, token_bytes=10, free_bytes=10_000) == 500


@pytest.mark.parametrize("free_bytes", [1999, -5])
def test_a_cache_too_small_for_one_sequence_is_refused(free_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"limits\.max_context: a cache of 100 tokens"):
        cache_tokens(1000, 100, token_bytes=10, free_bytes=free_bytes)


def test_a_sequence_has_room_for_its_guesses() -> None:
    config = Config(limits=LimitsConfig(max_context=100), speculation=SpeculationConfig(credit=300))
    assert tokens_per_sequence(config, 100) == 400


def test_a_worker_on_a_gpu_asks_ray_for_one() -> None:
    assert Room(2).bundle == {"CPU": 2.0}
    assert Room(1, num_gpus=1).bundle == {"CPU": 1.0, "GPU": 1.0}
