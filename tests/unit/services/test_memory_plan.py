"""Memory is shared out before anything is started, and what cannot fit names its remedy."""

import re
from dataclasses import dataclass, replace

import pytest

from services.config import Config, LimitsConfig, TargetConfig
from services.decisions import decisions
from services.errors import ConfigError
from services.memory_plan import PROCESS_BYTES, Demand, Holder, human, plan_memory
from services.plan import Plan, Seat

MIB = 1 << 20


@dataclass(frozen=True)
class Part:
    """A worker's part of a model; work is a fixed sum and something per row and token."""

    weights_bytes: int = 100 * MIB
    kv_bytes: int = 4000
    int8_bytes: int = 2100
    copy_bytes: int = 96
    feature_bytes: int = 0
    dtype: str = "bf16"

    def work_bytes(self, rows: int, context: int) -> int:
        return rows * 1000 + context * 100


DEMAND = Demand(max_sequences=4, max_context=936, guesses=64, step_rows=100, page_size=16)
FIXED = 100 * MIB + PROCESS_BYTES + 100 * 1000 + 1000 * 100
TARGET = Holder("target", Part(), target=True)
DRAFTER = Holder("drafter-0", Part(kv_bytes=904, int8_bytes=500))
PAGE = 16 * 4096  # of the target alone


def host(pages: int, holders: int = 1, page: int = PAGE) -> int:
    """Memory that leaves room for so many pages: caches get half of what is left."""
    return holders * FIXED + 2 * pages * page


def refusal(*holders: Holder, memory: int, demand: Demand = DEMAND) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_memory(holders, demand, memory)
    return str(caught.value)


def test_a_sequence_takes_whole_pages_with_its_guesses() -> None:
    assert DEMAND.sequence_pages == 63
    assert replace(DEMAND, max_context=944).sequence_pages == 63
    assert replace(DEMAND, max_context=945).sequence_pages == 64


@pytest.mark.parametrize(("fits", "pages"), [(1000, 252), (252, 252), (251, 251), (63, 63)])
def test_caches_get_what_all_sequences_take_or_what_fits(fits: int, pages: int) -> None:
    assert plan_memory([TARGET], DEMAND, host(fits)).num_pages == pages


def test_all_who_share_the_memory_get_as_many_pages() -> None:
    both = 16 * (4096 + 1000)
    plan = plan_memory([TARGET, DRAFTER], DEMAND, host(100, 2, both))
    assert (plan.num_pages, plan.tokens) == (100, 1600)
    elsewhere = replace(DRAFTER, shared=False)
    assert plan_memory([TARGET, elsewhere], DEMAND, host(100)).num_pages == 100


def test_where_memory_is_not_known_the_wish_is_the_plan() -> None:
    assert plan_memory([TARGET], DEMAND).num_pages == 252
    assert plan_memory([replace(TARGET, shared=False)], DEMAND, 1).num_pages == 252


@pytest.mark.parametrize(("asked", "pages"), [(63, 63), (100, 100), (300, 300)])
def test_a_number_of_pages_can_be_asked_for(asked: int, pages: int) -> None:
    assert plan_memory([TARGET], replace(DEMAND, num_pages=asked), host(300)).num_pages == pages


def test_more_pages_than_fit_are_refused_with_the_number_that_does() -> None:
    said = refusal(TARGET, memory=host(300), demand=replace(DEMAND, num_pages=301))
    assert said == "target.num_pages: 301 pages do not fit; set it to 300 or less"


def test_fewer_pages_than_one_sequence_takes_are_refused() -> None:
    said = refusal(TARGET, memory=host(300), demand=replace(DEMAND, num_pages=62))
    assert "62 pages do not hold one sequence of 936 tokens; set it to 63 or more" in said


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    memory = host(40)
    said = refusal(TARGET, memory=memory)
    longest = int(re.search(r"set limits\.max_context to (\d+)", said)[1])
    plan = plan_memory([TARGET], replace(DEMAND, max_context=longest), memory)
    assert plan.num_pages >= plan.demand.sequence_pages
    assert str(longest) in refusal(TARGET, memory=memory, demand=DEMAND)
    refusal(TARGET, memory=memory, demand=replace(DEMAND, max_context=longest + 1))
    assert "the rest 50% does not hold one sequence of 936 tokens (4 KiB each)" in said


@pytest.mark.parametrize(("pages", "helps"), [(40, True), (30, False)])
def test_int8_is_a_remedy_where_it_is_enough(pages: int, helps: bool) -> None:
    said = refusal(TARGET, memory=host(pages))
    assert ("set target.kv_dtype to int8" in said) == helps


def test_int8_does_nothing_for_a_drafter() -> None:
    greedy = Holder("drafter-0", Part(kv_bytes=8000, int8_bytes=10))
    both = 16 * (4096 + 8096)
    said = refusal(TARGET, greedy, memory=host(50, 2, both))
    assert "kv_dtype" not in said


def test_wide_weights_and_small_machines_have_remedies_too() -> None:
    wide = replace(TARGET, footprint=Part(dtype="fp32"))
    said = refusal(wide, memory=FIXED)
    assert said.endswith("set target.dtype to bf16")
    assert "weights and work take 484 MiB of 484 MiB here" in said
    assert refusal(TARGET, memory=FIXED // 2).endswith("; take a smaller model")


def test_the_plan_is_said_in_few_lines() -> None:
    part = replace(TARGET.footprint, feature_bytes=96, copy_bytes=0)
    plan = plan_memory([replace(TARGET, footprint=part), DRAFTER], DEMAND, 2048 * MIB)
    assert plan.lines() == [
        "memory of target: weights 100 MiB, cache 15.4 MiB (252 pages of 16 tokens, 3.91 KiB a"
        " token), features 378 KiB, work about 384 MiB",
        "memory of drafter-0: weights 100 MiB, cache 3.48 MiB (252 pages of 16 tokens, 904 B a"
        " token), work about 385 MiB",
        "memory planned: 988 MiB of 2 GiB here",
        "caches hold 4 of 4 sequences of 936 tokens",
    ]


def test_a_full_memory_and_a_device_of_its_own_are_said() -> None:
    plan = plan_memory([TARGET], DEMAND, host(130))
    assert plan.lines()[-1] == (
        "caches hold 2 of 4 sequences of 936 tokens; when they are full the youngest wait"
    )
    apart = plan_memory([replace(TARGET, shared=False)], DEMAND).lines()
    assert apart[0].endswith("; 500 MiB of its device")
    assert len(apart) == 2


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (23040, "22.5 KiB"),
        (1000 * 1024, "1000 KiB"),
        (1023.9 * MIB, "1024 MiB"),
        (5 << 30, "5 GiB"),
        (1500 << 30, "1500 GiB"),
    ],
)
def test_sizes_are_said_in_units_that_fit(size: int, said: str) -> None:
    assert human(size) == said


def test_the_demand_is_that_of_the_configuration() -> None:
    limits = LimitsConfig(max_sequences=3, max_context=4096, step_rows=70)
    config = Config(target=TargetConfig(page_size=8, num_pages=99), limits=limits)
    assert Demand.of(config, 2000) == Demand(3, 2000, 64, 70, 8, 99)


def test_a_start_says_what_it_decided_and_the_memory_last() -> None:
    memory = plan_memory([TARGET], DEMAND, host(1000))
    plan = Plan(Seat("target"), (Seat("drafter-0", in_process=True),))
    lines = decisions(Config(), plan, memory)
    assert lines[0] == "context: 936 tokens, the most this model takes"
    assert "one core for target and drafter: the drafter shares this process" in lines
    assert lines[-3:] == memory.lines()
