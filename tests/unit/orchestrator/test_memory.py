"""The core and a target's memory: opens that come first, pages that agree, sequences that pause."""

import pytest

from orchestrator.core import Core
from orchestrator.events import (
    Cancelled,
    DrafterSaid,
    DropTarget,
    Submitted,
    TargetLost,
    TargetSaid,
)
from orchestrator.request import Delta, FinishReason, Refusal, Request
from protos.messages import Grow, Guess, Step, StepClose, Stepped, Verdict
from tests.unit.orchestrator.test_core import answer, core, hello, steps, submitted, told


def asked(name: str = "a", prompt: int = 9, max_tokens: int = 10, **fields) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), max_tokens, **fields)


def opened(cached: int = 0, **fields) -> tuple[Core, Step]:
    """A core with one sequence whose open has been answered; the step with its first Extend."""
    made = core()
    (first,) = steps(submitted(made, asked(**fields)))
    free = made.capacity.ledgers[0].low
    said = Stepped(first.step, (), (cached,), free - cached // 4, 0.0)
    (second,) = steps(made.handle(TargetSaid(0.1, 0, said)))
    return made, second


def test_a_prompt_of_more_than_a_page_is_opened_before_its_first_extend() -> None:
    (step,) = steps(submitted(core(), asked(cache_salt="s")))
    (opening,) = step.opens
    assert step.extends == ()
    assert (opening.tokens, opening.cache_salt) == (tuple(range(1, 10)), "s")
    assert opening.prefix_cache


@pytest.mark.parametrize("cached", [0, 4, 8])
def test_the_first_extend_starts_where_the_open_says(cached: int) -> None:
    made, step = opened(cached)
    (extend,) = step.extends
    assert step.opens == ()
    assert (extend.start, extend.tokens) == (cached, tuple(range(cached + 1, 10)))
    assert made.counters.cached_tokens == cached
    assert made.counters.opened_tokens == 9


@pytest.mark.parametrize("fields", [{"prompt": 4}, {"prefix_cache": False}])
def test_an_open_that_can_find_nothing_comes_with_its_first_extend(fields) -> None:
    (step,) = steps(submitted(core(), asked(**fields)))
    assert [o.seq for o in step.opens] == [e.seq for e in step.extends] == [1]
    assert step.opens[0].prefix_cache == fields.get("prefix_cache", True)


def test_what_was_cached_is_in_the_stats() -> None:
    made, step = opened(8, max_tokens=1)
    done = told(made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 9, (), 5)))))
    assert done[0] == Delta((5,))
    assert done[1].stats.cached == 8


def test_tokens_the_client_already_has_are_not_counted_as_cached_prompt() -> None:
    made, step = opened(8, prompt=5, resumed=(6, 7, 8, 9), max_tokens=5)
    done = told(made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 9, (), 5)))))
    assert done[1].stats.cached == 5


def test_two_that_come_together_are_opened_in_one_step() -> None:
    made = core(max_sequences=3)
    (first,) = steps(submitted(made, asked("a")))
    submitted(made, asked("b"))
    submitted(made, asked("c"))
    (step,) = steps(made.handle(TargetSaid(0.1, 0, answer(made, first))))
    assert [o.seq for o in step.opens] == [2, 3]
    (step,) = steps(made.handle(TargetSaid(0.2, 0, answer(made, step))))
    assert [e.seq for e in step.extends] == [1, 2, 3]


def test_a_sequence_that_ends_while_it_is_opened_is_closed_with_the_next_step() -> None:
    made = core()
    (first,) = steps(submitted(made, asked("a")))
    assert told(made.handle(Cancelled(0.1, "a")))[0].reason is FinishReason.CANCELLED
    said = Stepped(first.step, (), (8,), 98, 0.0)
    (step,) = steps(made.handle(TargetSaid(0.2, 0, said)))
    assert (step.closes, step.extends) == ((StepClose(1),), ())
    assert made.handle(TargetSaid(0.3, 0, Stepped(step.step, (), (), 100, 0.0))) == []
    assert made.counters.target_faults == 0


@pytest.mark.parametrize("cached", [(), (0, 0), (3,), (12,), (-4,)])
def test_an_open_that_cannot_have_found_so_much_ends_the_link(cached: tuple[int, ...]) -> None:
    made = core()
    (first,) = steps(submitted(made, asked()))
    said = Stepped(first.step, (), cached, 100, 0.0)
    (drop,) = made.handle(TargetSaid(0.1, 0, said))
    assert isinstance(drop, DropTarget)
    assert "cannot have found" in drop.cause


@pytest.mark.parametrize("off", [-1, 1])
def test_pages_that_do_not_add_up_are_a_fault_with_both_counts(off: int) -> None:
    made, step = opened()
    said = Stepped(step.step, (Verdict(1, 9, (), 5),), (), 97 + off, 0.0)
    (drop,) = made.handle(TargetSaid(1.0, 0, said))
    assert isinstance(drop, DropTarget)
    assert f"{97 + off} pages are free, by our count 97 of 100" in drop.cause
    assert made.counters.target_faults == 1
    assert submitted(made, asked("b")) == [], "a target that is cut off gets no step"
    made.handle(TargetLost(1.1, 0, drop.cause))
    (step,) = steps(made.handle(TargetSaid(1.2, 0, hello("target"))))
    assert [o.seq for o in step.opens] == [1, 2]


def test_after_an_error_the_targets_own_count_is_taken() -> None:
    made, step = opened()
    failed = Verdict(1, 9, (), -1, error="planted")
    (step,) = steps(made.handle(TargetSaid(1.0, 0, Stepped(step.step, (failed,), (), 99, 0.0))))
    assert step.closes == (StepClose(1),)
    assert made.handle(TargetSaid(1.1, 0, Stepped(step.step, (), (), 100, 0.0))) == []
    assert made.counters.target_faults == 0


def squeezed() -> tuple[Core, Step]:
    """Five pages, and two sequences with three tokens each, one page each."""
    made = core(num_pages=5, k=0)
    (step,) = steps(submitted(made, asked("old", 3, 14)))
    submitted(made, asked("young", 3, 14))
    (step,) = steps(made.handle(TargetSaid(0.1, 0, answer(made, step, Verdict(1, 3, (), 5)))))
    return made, step


def run(made: Core, step: Step, times: int) -> Step:
    """So many verdicts of one token for all."""
    for _ in range(times):
        verdicts = [Verdict(e.seq, e.start + len(e.tokens), (), 7) for e in step.extends]
        (step,) = steps(made.handle(TargetSaid(1.0, 0, answer(made, step, *verdicts))))
    return step


def test_the_youngest_pauses_when_pages_run_out_and_goes_on_when_there_are_some() -> None:
    made, step = squeezed()
    step = run(made, step, 5)
    assert sorted(e.seq for e in step.extends) == [1, 2]
    # Nine rows and eight fit; the ninth row of the young one does not.
    step = run(made, step, 1)
    assert step.closes == (StepClose(2),)
    assert [e.seq for e in step.extends] == [1]
    assert made.counters.preemptions == 1
    assert told(made.handle(Cancelled(2.0, "old")), "old")[0].reason is FinishReason.CANCELLED
    verdict = Verdict(1, step.extends[0].start + 1, (), 7)
    (step,) = steps(made.handle(TargetSaid(2.1, 0, answer(made, step, verdict))))
    assert [(o.seq, o.tokens[:3]) for o in step.opens] == [(2, (1, 2, 3))]
    assert len(step.opens[0].tokens) == 3 + 6
    assert step.closes == (StepClose(1),)


def test_a_paused_sequence_ends_like_any_other() -> None:
    made, step = squeezed()
    step = run(made, step, 6)
    (ended,) = told(made.handle(Cancelled(2.0, "young")), "young")
    assert ended.reason is FinishReason.CANCELLED
    step = run(made, step, 1)
    assert (step.closes, step.opens) == ((), ())


def test_a_new_request_waits_behind_the_paused_ones() -> None:
    made, step = squeezed()
    run(made, step, 6)
    assert submitted(made, asked("new", 1, 1)) == []
    assert made.waiting == 1


def test_old_guesses_of_others_do_not_stop_a_sequence_that_is_to_run_alone() -> None:
    made = core(num_pages=3, k=0)
    made.handle(DrafterSaid(0.0, 0, hello("drafter")))
    (step,) = steps(submitted(made, Request("a", (1, 2, 3), 9, k=7)))
    submitted(made, Request("b", (1,), 3))
    guesses = (Guess(1, 0, 5, -0.1), *(Guess(i, i - 1, 9, -0.1) for i in range(2, 9)))
    made.handle(DrafterSaid(0.1, 0, Grow(1, 1, 3, guesses)))
    (step,) = steps(made.handle(TargetSaid(0.2, 0, answer(made, step, Verdict(1, 3, (), 5)))))
    assert sorted(e.seq for e in step.extends) == [1, 2]
    made.handle(TargetLost(0.3, 0, "either may have been the cause"))
    (step,) = steps(made.handle(TargetSaid(0.4, 0, hello("target", num_pages=3))))
    assert [(e.seq, len(e.nodes)) for e in step.extends] == [(1, 7)], "all three pages"
    (step,) = steps(made.handle(TargetSaid(0.5, 0, answer(made, step, Verdict(1, 4, (), 8)))))
    assert sorted(e.seq for e in step.extends) == [1, 2]


def test_what_no_longer_fits_a_target_that_came_back_smaller_ends() -> None:
    made = core(num_pages=10)
    submitted(made, asked("a", 3, 30))
    submitted(made, asked("b", 3, 3))
    made.handle(TargetLost(1.0, 0, "gone"))
    commands = made.handle(TargetSaid(1.1, 0, hello("target", num_pages=3)))
    (ended,) = told(commands, "a")
    assert ended.reason is FinishReason.UNAVAILABLE
    assert "less memory" in ended.error
    (step,) = steps(commands)
    assert [o.seq for o in step.opens] == [2]


def test_a_request_that_fits_only_without_guesses_is_served() -> None:
    made = core(num_pages=3, k=8)
    (step,) = steps(made.handle(Submitted(0.0, asked("a", 3, 9))))
    assert [e.seq for e in step.extends] == [1]
    (refused,) = told(submitted(made, asked("b", 3, 10)), "b")
    assert refused.refusal is Refusal.TOO_LARGE
