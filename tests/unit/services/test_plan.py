"""Seats and sizes: every core has its use, and one core is shared by saying so."""

import pytest

from services.config import MAX_K, Config, DrafterConfig, SpeculationConfig, TargetConfig
from services.errors import ConfigError
from services.plan import Plan, Room, guesses_per_sequence, share_out


def plan(cores: int, *drafters: DrafterConfig, target: tuple[int, ...] = (), tp: int = 1) -> Plan:
    config = Config(target=TargetConfig(cores=target, tp=tp), drafter=drafters)
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


def test_drafters_together_get_a_quarter_of_many_cores() -> None:
    found = plan(16, DrafterConfig(path="d", replicas=2))
    assert [seat.cores for seat in found.drafters] == [(12, 13), (14, 15)]
    assert found.cores_shared == 12
    assert [seat.name for seat in found.processes] == ["target", "drafter-0", "drafter-1"]


def test_one_core_makes_the_drafter_share_the_process() -> None:
    found = plan(1, DrafterConfig(path="d"))
    assert found.drafters[0].in_process
    assert found.processes == (found.target,)
    assert (found.target.cores, found.cores_shared) == ((0,), 1)


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
    assert (found.target.cores, found.drafters[0].cores) == ((40, 41), ())
    assert not found.drafters[0].in_process


def test_no_drafter_is_seated_if_drafters_are_no_source() -> None:
    config = Config(
        drafter=(DrafterConfig(path="d"),), speculation=SpeculationConfig(sources=("lookup",))
    )
    assert share_out(config, range(2)).drafters == ()


def test_a_sequence_has_room_for_its_guesses() -> None:
    assert guesses_per_sequence(Config(speculation=SpeculationConfig(credit=300))) == 300
    assert guesses_per_sequence(Config()) == MAX_K


def test_a_worker_on_a_gpu_asks_ray_for_one() -> None:
    assert Room(2).bundle == {"CPU": 2.0}
    assert Room(1, num_gpus=1).bundle == {"CPU": 1.0, "GPU": 1.0}


def rank_cores(found: Plan) -> list[tuple[int, ...]]:
    assert [seat.name for seat in found.ranks] == [
        f"target rank {i}" for i in range(len(found.ranks))
    ]
    assert [seat.rank for seat in found.ranks] == [*range(len(found.ranks))]
    return [seat.cores for seat in found.ranks]


def test_a_target_in_one_piece_has_one_seat() -> None:
    found = plan(2)
    assert found.ranks == ()
    assert found.target_seats == (found.target,)


def test_ranks_share_out_the_targets_cores() -> None:
    found = plan(4, tp=2)
    assert rank_cores(found) == [(0, 1), (2, 3)]
    assert (found.cores_alone, found.cores_shared) == (2, 2)
    assert found.processes == found.ranks


def test_every_rank_gives_a_core_to_the_drafter_while_it_drafts() -> None:
    found = plan(8, DrafterConfig(path="d"), tp=2)
    assert found.drafters[0].cores == (6, 7)
    assert rank_cores(found) == [(0, 1, 2, 6), (3, 4, 5, 7)]
    assert (found.cores_alone, found.cores_shared) == (4, 3)


def test_an_odd_core_is_left_to_the_rank_that_can_use_it() -> None:
    found = plan(5, tp=2)
    assert rank_cores(found) == [(0, 1), (2, 3, 4)]
    assert (found.cores_alone, found.cores_shared) == (2, 2)


@pytest.mark.parametrize(
    ("cores", "drafters", "expected"),
    [
        (2, 1, [(0,), (1,)]),
        (2, 0, [(0,), (1,)]),
        (1, 0, [(0,), (0,)]),
        (3, 1, [(0,), (1, 2)]),
    ],
)
def test_every_rank_has_a_core_however_few_there_are(
    cores: int, drafters: int, expected: list[tuple[int, ...]]
) -> None:
    found = plan(cores, *[DrafterConfig(path="d")] * drafters, tp=2)
    assert rank_cores(found) == expected
    assert (found.cores_alone, found.cores_shared) == (1, 1)


def test_ranks_elsewhere_have_no_cores_of_ours() -> None:
    found = share_out(Config(target=TargetConfig(tp=3)), ())
    assert rank_cores(found) == [(), (), ()]
    assert found.cores_alone == 0
