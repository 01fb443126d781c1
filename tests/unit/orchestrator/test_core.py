"""The core's answers to single events: refusals, faults of workers, deadlines."""

import pytest

from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.events import (
    Cancelled,
    Command,
    DrafterSaid,
    Draining,
    DropDrafter,
    DropTarget,
    Round,
    Submitted,
    TargetLost,
    TargetSaid,
    Tell,
    Ticked,
    ToDrafterWorker,
    ToTargetWorker,
    WakeAt,
)
from orchestrator.k_policy import FixedK
from orchestrator.request import Delta, Finished, FinishReason, Mode, Refusal, Refused, Request
from protos.messages import (
    PROTOCOL,
    Grow,
    Guess,
    Hello,
    Need,
    Open,
    Step,
    StepClose,
    Stepped,
    Verdict,
)
from tests.simulation.scene import IdStopper


def hello(role: str, num_pages: int = 100) -> Hello:
    return Hello(PROTOCOL, role, 1, "m", "v", 32, 64, 4, num_pages, 64)


def core(num_pages: int = 100, **changes) -> Core:
    config = CoreConfig(**{"lookup": False, "max_context": 64, "patience_s": 0.0, **changes})
    made = Core(config, FixedK(config.k), IdStopper)
    made.handle(TargetSaid(0.0, 0, hello("target", num_pages)))
    return made


def request(name: str = "a", prompt: int = 3, max_tokens: int = 10) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), max_tokens)


def told(commands: list[Command], name: str = "a") -> list:
    return [c.update for c in commands if isinstance(c, Tell) and c.request_id == name]


def steps(commands: list[Command]) -> list[Step]:
    return [c.message for c in commands if isinstance(c, ToTargetWorker)]


def answer(made: Core, step: Step, *verdicts: Verdict) -> Stepped:
    """What a target says that found nothing cached and has the pages that the core expects."""
    free = made.capacity.ledgers[0].low
    return Stepped(step.step, verdicts, (0,) * len(step.opens), free, 0.01)


def submitted(made: Core, asked: Request | None = None, now: float = 0.0) -> list[Command]:
    return made.handle(Submitted(now, asked or request()))


def test_without_a_target_a_request_is_refused_for_now() -> None:
    made = Core(CoreConfig(), FixedK(4), IdStopper)
    (refused,) = told(submitted(made))
    assert refused.refusal is Refusal.NO_TARGET
    assert refused.retry_s > 0


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    (refused,) = told(submitted(core(num_pages=3), request(max_tokens=50)))
    assert refused.refusal is Refusal.TOO_LARGE
    assert "12 tokens" in refused.detail


def test_a_request_waits_for_pages_to_begin_and_to_go_on_for_a_while() -> None:
    made = core(num_pages=5)
    (first,) = steps(submitted(made, request("a", 3, 17)))
    assert steps(submitted(made, request("b", 3, 17))) == []
    assert made.waiting == 1
    freed = made.handle(Cancelled(1.0, "a"))
    assert told(freed)[0].reason is FinishReason.CANCELLED
    (second,) = steps(made.handle(TargetSaid(1.1, 0, answer(made, first, Verdict(1, 3, (), 5)))))
    assert [c.seq for c in second.closes] == [1]
    assert [o.seq for o in second.opens] == [2]


def test_a_draining_core_takes_nothing_new_and_ends_what_runs() -> None:
    made = core()
    (step,) = steps(submitted(made, request(max_tokens=1)))
    made.handle(Draining(0.5))
    (refused,) = told(submitted(made, request("b"), 0.6), "b")
    assert refused.refusal is Refusal.DRAINING
    done = told(made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 3, (), 5)))))
    assert done[0] == Delta((5,))
    assert done[1].reason is FinishReason.LENGTH


def test_a_live_request_id_cannot_be_used_again() -> None:
    made = core()
    submitted(made)
    (refused,) = told(submitted(made))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.DUPLICATE


def test_a_waiting_request_can_be_cancelled_and_times_out() -> None:
    made = core(max_sequences=1, max_request_s=5.0)
    submitted(made, request("a"))
    submitted(made, request("b"))
    submitted(made, request("c"), now=1.0)
    (gone,) = told(made.handle(Cancelled(2.0, "b")), "b")
    assert isinstance(gone, Finished)
    assert told(made.handle(Ticked(5.5)), "a")[0].reason is FinishReason.TIMEOUT
    assert next(made.sequences).request.request_id == "c"
    assert told(made.handle(Ticked(6.0)), "c")[0].reason is FinishReason.TIMEOUT


def test_cancelling_twice_or_after_the_end_does_nothing() -> None:
    made = core()
    submitted(made)
    assert told(made.handle(Cancelled(1.0, "a")))
    assert made.handle(Cancelled(1.1, "a")) == []


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, 7, (), 5),
        Verdict(1, 3, (0,), 5),
        Verdict(1, 3, (), -1),
        Verdict(9, 3, (), 5),
    ],
)
def test_a_verdict_that_fits_nothing_asked_for_ends_the_link(verdict: Verdict) -> None:
    made = core()
    (step,) = steps(submitted(made))
    commands = made.handle(TargetSaid(1.0, 0, answer(made, step, verdict)))
    assert any(isinstance(c, DropTarget) for c in commands)
    assert not any(isinstance(c, Round) for c in commands)
    assert made.counters.target_faults == 1


def test_an_error_ends_its_sequence_only() -> None:
    made = core()
    (step,) = steps(submitted(made, request("a")))
    submitted(made, request("b"))
    commands = made.handle(
        TargetSaid(
            1.0, 0, answer(made, step, Verdict(1, 3, (), -1, error="logits not finite at 3"))
        )
    )
    (ended,) = told(commands)
    assert ended.reason is FinishReason.ERROR
    assert "logits" in ended.error
    (step,) = steps(commands)
    assert step.closes == (StepClose(1),)
    assert [e.seq for e in step.extends] == [2]


def test_an_answer_to_no_step_is_counted_and_changes_nothing() -> None:
    made = core()
    (step,) = steps(submitted(made))
    done = answer(made, step, Verdict(1, 3, (), 5))
    assert told(made.handle(TargetSaid(1.0, 0, done)))
    assert made.handle(TargetSaid(1.1, 0, done)) == []
    assert made.counters.stepped_stale == 1


def test_an_answer_to_a_step_never_sent_ends_the_link() -> None:
    made = core()
    submitted(made)
    commands = made.handle(TargetSaid(1.0, 0, Stepped(99, (), (), 1, 0.1)))
    assert [type(c) for c in commands] == [DropTarget]


def test_a_target_that_does_not_answer_its_step_is_cut_off() -> None:
    made = core(step_timeout_s=5.0)
    submitted(made)
    assert made.handle(Ticked(4.0)) == []
    assert [type(c) for c in made.handle(Ticked(5.0))] == [DropTarget]


def test_a_message_of_the_wrong_role_ends_the_link() -> None:
    commands = core().handle(TargetSaid(0.1, 0, Need(1, 1, 0)))
    assert [type(c) for c in commands] == [DropTarget]


def test_what_takes_the_target_down_each_time_is_given_up_and_its_neighbour_served() -> None:
    made = core()
    (step,) = steps(submitted(made, request("poison")))
    submitted(made, request("fine"))
    served: list[Command] = []
    for now in range(1, 40):
        if any(extend.seq == 1 for extend in step.extends):
            commands = made.handle(TargetLost(float(now), 0, "killed"))
            served += commands
            commands = made.handle(TargetSaid(now + 0.1, 0, hello("target")))
        else:
            verdicts = [Verdict(e.seq, e.start + len(e.tokens), (), 5) for e in step.extends]
            commands = made.handle(TargetSaid(now + 0.1, 0, answer(made, step, *verdicts)))
        served += commands
        if not steps(commands):
            break
        (step,) = steps(commands)
    (ended,) = told(served, "poison")
    assert ended.reason is FinishReason.ERROR
    assert told(served, "fine")[-1].reason is FinishReason.LENGTH


def test_waiting_requests_are_given_up_with_the_target() -> None:
    made = core(max_sequences=1, recovery_s=5.0)
    submitted(made, request("a"))
    submitted(made, request("b"))
    made.handle(TargetLost(1.0, 0, "gone"))
    assert told(made.handle(Ticked(5.0)), "b") == []
    assert told(made.handle(Ticked(6.0)), "b")[0].reason is FinishReason.UNAVAILABLE


def with_drafter(**changes) -> tuple[Core, Step]:
    made = core(**changes)
    made.handle(DrafterSaid(0.0, 0, hello("drafter")))
    (step,) = steps(submitted(made))
    return made, step


def to_drafter(commands: list[Command]) -> list:
    return [c.message for c in commands if isinstance(c, ToDrafterWorker)]


def test_a_need_is_answered_with_what_is_missing() -> None:
    made, _ = with_drafter()
    (advance,) = to_drafter(made.handle(DrafterSaid(0.1, 0, Need(1, 1, 1))))
    assert (advance.start, advance.tokens) == (1, (2, 3))


def test_a_need_of_something_that_does_not_exist_ends_the_link() -> None:
    made, _ = with_drafter()
    commands = made.handle(DrafterSaid(0.1, 0, Need(1, 1, 4)))
    assert any(isinstance(c, DropDrafter) for c in commands)
    assert made.handle(DrafterSaid(0.1, 0, Need(1, 8, 0))) == []


def test_a_guess_outside_the_vocabulary_and_all_below_it_stand_for_nothing() -> None:
    made, _ = with_drafter()
    guesses = (Guess(1, 0, 32, -0.1), Guess(2, 1, 5, -0.1), Guess(3, 0, 6, -0.1))
    made.handle(DrafterSaid(0.1, 0, Grow(1, 1, 3, guesses)))
    assert [n.token for n in next(made.sequences).tree.walk()] == [6]
    assert made.counters.guesses_foreign == 1


def test_a_drafter_that_exceeds_its_credit_is_opened_anew() -> None:
    made, _ = with_drafter(credit=3)
    guesses = tuple(Guess(i, i - 1, 5, -0.1) for i in range(1, 6))
    commands = made.handle(DrafterSaid(0.1, 0, Grow(1, 1, 3, guesses)))
    assert [type(m) for m in to_drafter(commands)][-1] is Open
    assert to_drafter(commands)[-1].opening == 2
    assert made.counters.reopenings == 1


def test_the_step_waits_for_a_first_draft_no_longer_than_patience() -> None:
    made, step = with_drafter(patience_s=0.5)
    made.handle(DrafterSaid(0.1, 0, Grow(1, 1, 3, ())))
    commands = made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 3, (), 5))))
    assert steps(commands) == []
    assert WakeAt(1.5) in commands
    (step,) = steps(made.handle(Ticked(1.5)))
    assert step.extends[0].nodes == ()
    assert made.counters.waits_in_vain == 1
    commands = made.handle(TargetSaid(2.0, 0, answer(made, step, Verdict(1, 4, (), 6))))
    assert len(steps(commands)) == 1, "a late drafter is not waited for again"
    made.handle(DrafterSaid(2.1, 0, Grow(1, 1, 5, (Guess(1, 0, 7, -0.1),))))
    (step,) = steps(commands)
    commands = made.handle(TargetSaid(3.0, 0, answer(made, step, Verdict(1, 5, (), 8))))
    assert steps(commands) == [], "one that answered in time is"


def test_a_lost_targets_sequences_are_opened_anew_with_what_they_have() -> None:
    made = core()
    (step,) = steps(submitted(made))
    (step,) = steps(made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 3, (), 5)))))
    made.handle(TargetLost(1.1, 0, "gone"))
    (step,) = steps(made.handle(TargetSaid(1.2, 0, hello("target"))))
    assert step.opens[0].tokens == (1, 2, 3, 5)
    assert (step.extends[0].start, step.extends[0].tokens) == (0, (1, 2, 3, 5))


def test_a_drafter_that_goes_on_being_wrong_is_cut_off() -> None:
    made, _ = with_drafter()
    dropped: list[Command] = []
    for opening in range(1, 20):
        commands = made.handle(DrafterSaid(0.1, 0, Grow(1, opening, 99, ())))
        dropped += [c for c in commands if isinstance(c, DropDrafter)]
    assert dropped
    assert made.counters.reopenings == 8


def test_the_guesses_of_an_opening_end_with_it() -> None:
    made, _ = with_drafter(credit=3)
    for opening in range(1, 5):
        guesses = tuple(Guess(i, i - 1, 10 + i, -0.1) for i in range(1, 4))
        made.handle(DrafterSaid(0.1, 0, Grow(1, opening, 3, guesses)))
        assert next(made.sequences).tree.size == 3
        made.handle(DrafterSaid(0.1, 0, Grow(1, opening, 99, ())))
        assert next(made.sequences).tree.size == 0


def test_a_drafter_that_rests_is_not_waited_for() -> None:
    made, step = with_drafter(patience_s=0.5)
    commands = made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 3, (), 5))))
    assert steps(commands) == []
    (step,) = steps(made.handle(DrafterSaid(1.1, 0, Grow(1, 1, 4, ()))))
    assert step.extends[0].nodes == ()
    assert made.counters.waits_in_vain == 0


def test_a_block_larger_than_credit_is_not_waited_for_in_whole() -> None:
    made, step = with_drafter(sync_patience_s=0.5, mode=Mode.SYNC, k=8, credit=2)
    commands = made.handle(TargetSaid(1.0, 0, answer(made, step, Verdict(1, 3, (), 5))))
    assert steps(commands) == []
    guesses = (Guess(1, 0, 7, -0.1), Guess(2, 1, 8, -0.1))
    (step,) = steps(made.handle(DrafterSaid(1.1, 0, Grow(1, 1, 4, guesses))))
    assert len(step.extends[0].nodes) == 2


def test_the_time_of_a_prefill_is_no_waiting_in_vain() -> None:
    made, step = with_drafter(patience_s=0.5)
    commands = made.handle(TargetSaid(2.0, 0, answer(made, step, Verdict(1, 3, (), 5))))
    assert steps(commands) == [], "the drafter is waited for, however long the prefill took"
    assert made.counters.waits_in_vain == 0


def test_much_drafted_streams_leave_a_new_prompt_its_share() -> None:
    made = core(max_sequences=4, step_rows=12, k=8)
    made.handle(DrafterSaid(0.0, 0, hello("drafter")))
    (step,) = steps(submitted(made, request("a", 3, 40)))
    guesses = tuple(Guess(i, i - 1, 7, -0.1) for i in range(1, 30))
    made.handle(DrafterSaid(0.1, 0, Grow(1, 1, 3, guesses)))
    new = Request("b", tuple(range(1, 21)), 10, prefix_cache=False)
    submitted(made, new, now=0.2)
    (step,) = steps(made.handle(TargetSaid(0.3, 0, answer(made, step, Verdict(1, 3, (), 7)))))
    rows = {e.seq: len(e.tokens) + len(e.nodes) for e in step.extends}
    assert rows == {1: 9, 2: 3}
