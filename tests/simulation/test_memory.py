"""Prefix cache, preemption and page counts on the real core and engines, in virtual time.

The world asserts that no link is dropped: both ends agree on the pages after every step.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest

from drafter_workers.config import GrowthConfig
from orchestrator.events import TargetSaid
from orchestrator.k_policy import ScriptedK
from orchestrator.request import Finished, FinishReason, Mode, Refusal, Refused, Request
from orchestrator.sequence import Sequence
from orchestrator.target_desk import TargetDesk
from protos.messages import StepClose, StepOpen, Stepped
from protos.sampling import Sampling
from target_workers.runner import Forward
from tests.cached_lm import CachedForward
from tests.faults import calm, seeded
from tests.script_drafter import honest, perfect, worst
from tests.script_lm import ScriptForward, Shape
from tests.simulation.scene import BOTH, SEEDED, Scene, request, scene


def pool(tokens: int, page_size: int = 4) -> Shape:
    """A target with memory for so many tokens."""
    return Shape(max_context=128, page_size=page_size, num_pages=-(-tokens // page_size))


def serve(stage: Scene, *asked: Request) -> list[Finished]:
    """Submit these together and wait for them; what each was told last."""
    for each in asked:
        stage.world.submit(each, at=stage.world.clock.now())
    stage.world.run()
    return [stage.check(each).last for each in asked]


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(32) for _ in range(count)]


@contextmanager
def forking() -> Iterator[None]:
    """Every sequence names the one before it as its parent, alive or not, kin or not."""
    plain = TargetDesk._opening

    def opening(desk: TargetDesk, seq: Sequence) -> StepOpen:
        return replace(plain(desk, seq), parent=seq.seq - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetDesk, "_opening", opening)
        yield


def copies(stage: Scene) -> int:
    """How many opens began with a part of a page."""
    size = stage.world.targets[0]._engine.hello().page_size
    said = [event.message for event, _ in stage.world.log if isinstance(event, TargetSaid)]
    stepped = [message for message in said if isinstance(message, Stepped)]
    return sum(found % size > 0 for each in stepped for found in each.cached)


@dataclass(frozen=True)
class Memory:
    """How a target's memory is used: what keeps its rows, and whether sequences have parents."""

    forward: Callable[..., Forward] = ScriptForward
    forks: bool = False

    def use(self) -> AbstractContextManager[None]:
        return forking() if self.forks else nullcontext()


PLAIN, FORKED, INT8 = Memory(), Memory(forks=True), Memory(CachedForward, forks=True)
MEMORIES = pytest.mark.parametrize("memory", [PLAIN, FORKED, INT8], ids=["plain", "forks", "int8"])


def rounds_of(stage: Scene, seq: int) -> list[tuple[int, int]]:
    """Guesses verified and accepted, round by round."""
    return [(r.used, r.accepted) for r in stage.world.rounds if r.seq == seq]


# Law 1 with little memory.


def play(seed: int, memory: Memory = PLAIN) -> Scene:
    """Random requests with common beginnings on a target that holds one to six of them."""
    with memory.use():
        return _play(seed, memory)


def _play(seed: int, memory: Memory) -> Scene:
    rng = random.Random(seed)
    stage = scene(
        seed=seed,
        target=pool(rng.choice((100, 110, 150, 220)), rng.choice((1, 2, 4, 16))),
        plan=seeded(seed, max_delay_s=0.005) if rng.random() < 0.5 else calm,
        k=rng.randrange(9),
        shape=rng.choice(("chain", "tree")),
        patience_s=rng.choice((0.0, 0.01)),
        lookup=rng.random() < 0.3,
        step_rows=rng.choice((8, 16, 256)),
        max_sequences=rng.randrange(1, 9),
        forward=memory.forward,
    )
    weather = seeded(seed, max_delay_s=0.02, again=0.1, stall=0.03)
    for _ in range(rng.randrange(3)):
        guesser = rng.choice((perfect, worst, honest))
        stage.add_drafter(guesser, rng.uniform(0.0005, 0.02), weather, growth=GrowthConfig(width=2))
    heads = [some(rng, 40), some(rng, 40)]
    asked = [
        request(
            str(i),
            rng.choice(heads)[: rng.randrange(1, 40)] + some(rng, rng.randrange(6)),
            rng.randrange(1, 60),
            sampling=Sampling(rng.choice((0.0, 0.8)), seed=i),
            mode=rng.choice((None, *Mode)),
            stop_token_ids=(rng.randrange(32),) if rng.random() < 0.3 else (),
            cache_salt=rng.choice(("", "", "salt")),
            prefix_cache=rng.random() < 0.9,
        )
        for i in range(rng.randrange(1, 14))
    ]
    gone = {each.request_id for each in asked if rng.random() < 0.2}
    for each in asked:
        stage.world.submit(each, at=rng.uniform(0.02, 0.3))
        if each.request_id in gone:
            stage.world.cancel(each.request_id, at=rng.uniform(0.3, 1.0))
    if rng.random() < 0.3:
        when = rng.uniform(0.31, 0.6)
        stage.world.at(when, lambda: stage.world.targets[0].cut())
        stage.world.at(when + 0.1, lambda: stage.world.targets[0].connect())
    stage.world.run()
    for each in asked:
        if each.request_id in gone:
            tokens = stage.world.served[each.request_id].tokens
            assert tokens == stage.reference(each)[: len(tokens)]
        else:
            stage.check(each)
    stage.check_nothing_left()
    stage.check_replay()
    return stage


@pytest.mark.parametrize("seed", range(100))
def test_output_equals_plain_decoding_with_little_memory_and_any_faults(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(24))
def test_it_does_so_over_rows_that_parents_share(seed: int) -> None:
    play(seed, INT8 if seed % 4 == 0 else FORKED)


def test_those_histories_preempt_and_share_enough_to_mean_something() -> None:
    stages = [play(seed, FORKED) for seed in range(30)]
    counters = [stage.world.core.counters for stage in stages]
    assert sum(c.preemptions for c in counters) > 15
    assert sum(c.cached_tokens > 0 for c in counters) > 15
    assert sum(map(copies, stages)) > 10


@MEMORIES
@pytest.mark.parametrize("fits", [1, 2, 3])
@pytest.mark.parametrize("sampling", BOTH)
def test_all_finish_where_only_some_fit(fits: int, sampling: Sampling, memory: Memory) -> None:
    """Case B041: the pool fits 2 of 4, K is 8."""
    stage = scene(target=pool(fits * 80), k=8, forward=memory.forward)
    stage.add_drafter(perfect)
    heads = [[0] * 19 if memory.forks else [i] * 19 for i in range(4)]
    asked = [request(str(i), [*heads[i], i], 60, sampling=sampling) for i in range(4)]
    with memory.use():
        for i, each in enumerate(asked):
            stage.world.submit(each, at=0.02 * i)
        stage.world.run()
        stage.check_replay()
    for each in asked:
        stage.check(each)
    # Three that share their prompt leave room for the fourth.
    assert stage.world.core.counters.preemptions > 0 or (memory.forks and fits == 3)
    assert (copies(stage) > 0) == memory.forks
    stage.check_nothing_left()


def test_guesses_shrink_before_anyone_is_paused() -> None:
    stage = scene(target=pool(68), k=8)
    stage.add_drafter(perfect)
    # Both hold 28 rows, 14 pages of 17, when they have 7 guesses each and 18 pages would do.
    serve(stage, *(request(str(i), [i] * 10, 26) for i in range(2)))
    assert stage.world.core.counters.preemptions == 0
    assert any(r.clamp == "pages" for r in stage.world.rounds)


def test_the_oldest_is_never_paused() -> None:
    stage = scene(target=pool(100), k=4)
    stage.add_drafter(perfect)
    asked = [request(str(i), [i] * 20, 70) for i in range(4)]
    serve(stage, *asked)
    assert stage.world.core.counters.preemptions > 0
    closed = [c.seq for step in stage.world.steps for c in step.closes]
    assert closed.count(1) == 1
    assert max(map(closed.count, (2, 3, 4))) > 1


def test_the_paused_go_on_before_anyone_new() -> None:
    stage = scene(target=pool(100), k=0, max_sequences=3)
    asked = [request(str(i), [i] * 20, 60) for i in range(6)]
    serve(stage, *asked)
    known: set[int] = set()
    closed: set[int] = set()
    waited = 0
    for i, step in enumerate(stage.world.steps):
        later = {o.seq for each in stage.world.steps[i + 1 :] for o in each.opens}
        opened = {o.seq for o in step.opens}
        closed = (closed | {c.seq for c in step.closes}) - opened
        assert not opened - known or not closed & later, "a new one came before a paused one"
        waited += bool(closed & later)
        known |= opened
    assert waited > 10


def pauses(stage: Scene) -> list[StepClose]:
    """The closes of sequences that are opened again."""
    found, later = [], set()
    for step in reversed(stage.world.steps):
        found += [close for close in step.closes if close.seq in later]
        later |= {opened.seq for opened in step.opens}
    return found


def test_a_paused_sequence_keeps_its_drafter_and_its_guesses() -> None:
    """Case B057: a resumed request is accepted as if it had never been paused."""
    small, large = (scene(target=pool(tokens), k=4) for tokens in (120, 1000))
    for stage in (small, large):
        stage.add_drafter(perfect, 1e-6)
        serve(stage, *(request(str(i), [i] * 20, 70) for i in range(3)))
    assert small.world.core.counters.preemptions > 0
    assert small.world.core.counters.openings == 3
    assert any(close.keep for close in pauses(small)), "what was accepted last is kept too"
    stats = [s.world.served["2"].last.stats for s in (small, large)]
    assert stats[0].accepted == stats[0].drafted
    assert stats[0].rounds <= stats[1].rounds + 2 * small.world.core.counters.preemptions


def test_a_paused_sequence_finds_most_of_what_it_had() -> None:
    stage = scene(target=pool(120), k=0)
    asked = [request(str(i), [i] * 30, 50) for i in range(2)]
    ends = serve(stage, *asked)
    assert stage.world.core.counters.preemptions == len(pauses(stage)) > 0
    assert stage.world.core.counters.cached_tokens > 0
    assert [end.stats.cached for end in ends] == [0, 0], "what it found again was its own"


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_is_served() -> None:
    stage = scene(target=pool(64), k=8)
    stage.add_drafter(perfect)
    stage.world.submit(request("large", [1] * 20, 45))
    serve(stage, request("fits", [1] * 20, 44))
    refused = stage.world.served["large"].last
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.TOO_LARGE


# What is shared.


@pytest.mark.parametrize("k", [0, 4])
def test_the_same_prompt_is_found_whether_drafts_are_made_or_not(k: int) -> None:
    """Case B061."""
    stage = scene(k=k)
    stage.add_drafter(perfect)
    prompt = some(random.Random(1), 41)
    cached = [serve(stage, request(str(i), prompt, 20))[0].stats.cached for i in range(3)]
    assert cached == [0, 40, 40]
    assert stage.world.core.counters.cached_tokens == 80


def test_only_requests_of_one_salt_share_and_one_that_opts_out_shares_nothing() -> None:
    stage = scene(k=4)
    prompt = some(random.Random(1), 41)
    variants = [
        ({"cache_salt": "a"}, 0),
        ({"cache_salt": "b"}, 0),
        ({}, 0),
        ({"prefix_cache": False}, 0),
        ({"cache_salt": "a", "prefix_cache": False}, 0),
        ({"cache_salt": "a"}, 40),
        ({"cache_salt": "b"}, 40),
        ({}, 40),
    ]
    for i, (fields, cached) in enumerate(variants):
        (finished,) = serve(stage, request(str(i), prompt, 10, **fields))
        assert finished.stats.cached == cached, fields


def test_a_target_that_was_lost_has_forgotten_its_cache() -> None:
    stage = scene(k=4)
    prompt = some(random.Random(1), 41)
    serve(stage, request("a", prompt))
    stage.world.targets[0].cut()
    stage.world.targets[0].connect()
    stage.world.settle()
    assert serve(stage, request("b", prompt))[0].stats.cached == 0


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_prompts_around_a_pages_end_are_found_by_whole_pages(length: int, k: int) -> None:
    """Case B060."""
    stage = scene(target=pool(512, 16), k=k)
    stage.add_drafter(perfect)
    prompt = some(random.Random(length), length)
    first, second = (serve(stage, request(name, prompt, 20))[0] for name in "ab")
    assert (first.stats.cached, second.stats.cached) == (0, (length - 1) // 16 * 16)
    assert stage.world.served["a"].tokens == stage.world.served["b"].tokens
    stage.check_nothing_left()


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
@pytest.mark.parametrize("sampling", BOTH)
def test_acceptance_is_the_same_for_a_prompt_from_the_cache(mode: Mode, sampling) -> None:
    """Case B057: the drafter is opened with the whole prompt, cached at the target or not."""
    stage = scene(mode=mode, k=4)
    stage.add_drafter(honest, 1e-6)
    prompt = some(random.Random(2), 64)
    for name in "abc":
        serve(stage, request(name, prompt, 40, sampling=sampling))
    assert rounds_of(stage, 1) == rounds_of(stage, 2) == rounds_of(stage, 3)
    assert stage.world.served["c"].last.stats.cached == 60
    fresh = scene(mode=mode, k=4)
    fresh.add_drafter(honest, 1e-6)
    for other in (stage, fresh):
        serve(other, request("d", prompt[:48] + some(random.Random(3), 16), 40, sampling=sampling))
    assert stage.world.served["d"].last.stats.cached == 48
    assert rounds_of(stage, 4) == rounds_of(fresh, 1)


@pytest.mark.parametrize("drafter", [perfect, None])
@pytest.mark.parametrize("end", range(1, 9))
def test_a_next_turn_finds_the_last_one_and_nothing_beyond_its_end(end: int, drafter) -> None:
    """Case B058: turn 1 ends inside a block, by a stop or by its length."""
    prompt, more = some(random.Random(4), 22), some(random.Random(5), 9)
    for stops in (False, True):
        stage = scene(k=8)
        if drafter is not None:
            stage.add_drafter(drafter, 1e-6)
        plain = stage.reference(request("x", prompt, 60))
        stop = (plain[end - 1],) if stops and plain[end - 1] not in plain[: end - 1] else ()
        first = request("a", prompt, 60 if stop else end, stop_token_ids=stop)
        serve(stage, first)
        said = stage.world.served["a"].tokens
        assert said == plain[:end]
        beyond = request("beyond", prompt + plain[: end + 20], 5)
        (finished,) = serve(stage, beyond)
        length = len(prompt) + end
        assert (length - 1) // 4 * 4 <= finished.stats.cached <= length
        second = request("b", prompt + said + more, 30)
        (finished,) = serve(stage, second)
        assert (length - 1) // 4 * 4 <= finished.stats.cached <= length // 4 * 4


def test_requests_with_a_long_common_beginning_run_together_where_they_could_not_alone() -> None:
    head = some(random.Random(6), 80)
    most = {}
    for salted in (False, True):
        stage = scene(target=pool(200), k=0)
        serve(stage, request("first", head, 1, cache_salt="0" if salted else ""))
        asked = [
            request(str(i), [*head, i], 20, cache_salt=str(i) if salted else "") for i in range(6)
        ]
        serve(stage, *asked)
        most[salted] = max(len(step.extends) for step in stage.world.steps)
        stage.check_nothing_left()
    assert most == {True: 2, False: 6}


def test_a_burst_of_equal_prompts_shares_what_the_first_has_computed() -> None:
    """One prompt ahead of seven others that have 48 of its 50 tokens: the hit rate of a chat."""
    stage = scene(k=4, step_rows=64)
    stage.add_drafter(perfect)
    head = some(random.Random(7), 48)
    asked = [request(str(i), [*head, i, i], 30) for i in range(8)]
    for i, each in enumerate(asked):
        stage.world.submit(each, at=0.0 if i == 0 else 0.1 + 0.01 * i)
    stage.world.run()
    for each in asked:
        stage.check(each)
    counters = stage.world.core.counters
    assert counters.cached_tokens == 7 * 48
    prefilled = sum(len(e.tokens) for s in stage.world.steps for e in s.extends if not e.nodes)
    assert prefilled < 50 + 7 * 2 + 8 * 3


# Opening first.


def test_opening_first_costs_an_idle_target_no_step_and_a_busy_one_no_round() -> None:
    stage = scene(k=0)
    first = request("a", some(random.Random(8), 40), 10)
    serve(stage, first)
    opens = [step for step in stage.world.steps if step.opens]
    assert [(len(s.opens), len(s.extends)) for s in opens] == [(1, 0)]
    assert stage.world.clock.now() < 10 * 0.03 + 0.001
    short = scene(k=0)
    serve(short, request("a", [1, 2, 3], 10))
    assert [(len(s.opens), len(s.extends)) for s in short.world.steps if s.opens] == [(1, 1)]


# Law 4.


def drain(stage: Scene) -> None:
    stage.check_nothing_left()
    for link in stage.world.targets:
        link._engine._pages.check_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_nothing_is_held_after_each_of_a_hundred_requests(k: int, page_size: int) -> None:
    """Case B039."""
    rng = random.Random(k)
    stage = scene(target=pool(400, page_size), k=k, shape=rng.choice(("chain", "tree")))
    stage.add_drafter(honest, 0.001)
    for i in range(100):
        serve(stage, request(str(i), some(rng, rng.randrange(1, 40)), rng.randrange(1, 12)))
        drain(stage)


@pytest.mark.parametrize("memory", [FORKED, INT8], ids=["forks", "int8"])
def test_nothing_is_held_after_each_of_fifty_families(memory: Memory) -> None:
    """Case B039, each request with another on its heels that has the same prompt."""
    rng = random.Random(4)
    stage = scene(target=pool(400, 16), k=4, shape="tree", forward=memory.forward)
    stage.add_drafter(honest, 0.001)
    with memory.use():
        for i in range(50):
            prompt, more = some(rng, rng.randrange(17, 40)), some(rng, 2)
            now = stage.world.clock.now()
            stage.world.submit(request(f"{i}a", prompt, 20), at=now)
            stage.world.submit(request(f"{i}b", prompt + more, rng.randrange(1, 12)), at=now + 0.05)
            stage.world.run()
            drain(stage)
    assert copies(stage) > 30


def soak(count: int, memory: Memory) -> None:
    with memory.use():
        _soak(count, memory)


def _soak(count: int, memory: Memory) -> None:
    """Case B040: concurrency 16, a fifth cancelled, a tenth with a stop, K of 0 to 8."""
    rng = random.Random(9)
    policy = ScriptedK([rng.randrange(9) for _ in range(50)])
    stage = scene(
        target=pool(600, 16), k=8, max_sequences=16, policy=policy, forward=memory.forward
    )
    stage.add_drafter(honest, 0.001)
    head = some(rng, 40) if memory.forks else []
    for batch in range(0, count, 100):
        asked = [
            request(
                str(batch + i),
                head[: rng.randrange(41)] + some(rng, rng.randrange(1, 81 - len(head))),
                rng.randrange(1, 41),
                stop_token_ids=(rng.randrange(32),) if rng.random() < 0.1 else (),
            )
            for i in range(min(100, count - batch))
        ]
        now = stage.world.clock.now()
        gone = [each for each in asked if rng.random() < 0.2]
        for i, each in enumerate(asked):
            stage.world.submit(each, at=now + 0.02 * i)
        for each in gone:
            i = asked.index(each)
            stage.world.cancel(each.request_id, at=now + 0.02 * i + rng.uniform(0.0, 0.3))
        stage.world.run()
        for each in asked:
            served = stage.world.served[each.request_id]
            if served.last.reason is not FinishReason.CANCELLED:
                stage.check(each)
        drain(stage)

    assert (copies(stage) > count // 4) == memory.forks


@MEMORIES
def test_no_page_drifts_over_many_requests(memory: Memory) -> None:
    soak(100 if memory is INT8 else 200, memory)


@pytest.mark.long
@pytest.mark.timeout(900)
@MEMORIES
def test_no_page_drifts_over_two_thousand_requests(memory: Memory) -> None:
    soak(2000, memory)


# Chunked prefill.


def test_every_chunk_size_gives_the_same_tokens() -> None:
    for rows in range(1, 65):
        stage = scene(k=4, step_rows=rows, max_sequences=min(3, rows))
        stage.add_drafter(perfect)
        rng = random.Random(rows)
        serve(stage, *(request(str(i), some(rng, 60 - 7 * i), 12) for i in range(3)))
        stage.check_nothing_left()


@pytest.mark.parametrize("length", [5, 8, 9, 24, 25])
def test_nothing_is_verified_before_the_last_chunk(length: int) -> None:
    """Case B062: chunks of at most 8 rows beside two decoding requests."""
    stage = scene(k=4, step_rows=8)
    stage.add_drafter(perfect)
    prompt = some(random.Random(length), length)
    asked = [request("long", prompt, 20), request("a", [1], 60), request("b", [2, 3], 60)]
    for each in asked[1:]:
        stage.world.submit(each)
    stage.world.submit(asked[0], at=0.1)
    stage.world.run()
    for each in asked:
        stage.check(each)
    chunks = [e for s in stage.world.steps for e in s.extends if e.seq == 3]
    unfinished = [e for e in chunks if e.start + len(e.tokens) < length]
    assert all(e.nodes == () for e in unfinished)
    assert len(unfinished) >= length // 8
    assert any(e.nodes for e in chunks)


@pytest.mark.parametrize("sampling", BOTH)
def test_a_drafter_knows_the_whole_prompt_whatever_the_chunks(sampling: Sampling) -> None:
    """Case B063: the same guesses and acceptance for a prompt in one chunk and in eight."""
    traces = []
    for rows in (68, 12):  # in both the last chunk leaves room for guesses
        stage = scene(mode=Mode.SYNC, k=4, step_rows=rows, max_sequences=1)
        stage.add_drafter(honest, 1e-6)
        serve(stage, request("a", some(random.Random(10), 64), 40, sampling=sampling))
        traces.append(rounds_of(stage, 1))
    assert traces[0] == traces[1]
    assert traces[0][0][0] == 4


@pytest.mark.parametrize("k", [0, 4])
def test_a_long_prompt_delays_running_streams_by_no_more_than_a_steps_budget(k: int) -> None:
    """Case B064: four streams, then a prompt twenty times as long as theirs."""
    rows = 32
    stage = scene(k=k, step_rows=rows)
    stage.add_drafter(perfect)
    running = [request(str(i), [i] * 5, 100) for i in range(4)]
    for each in running:
        stage.world.submit(each)
    stage.world.submit(long := request("long", some(random.Random(11), 100), 20), at=0.2)
    stage.world.run()
    for each in (*running, long):
        stage.check(each)
    chunks = [e for s in stage.world.steps for e in s.extends if e.seq == 5]
    assert len([e for e in chunks if e.start + len(e.tokens) < 100]) >= 3
    budget_s = 0.016 * (1 + 0.0214 * (rows - 1))
    for seq in range(1, 5):
        times = [r.now for r in stage.world.rounds if r.seq == seq]
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        assert gaps[-1] < 5 * gaps[len(gaps) // 2]
        assert gaps[-1] < budget_s + 0.001, "one step, and the answer to an open"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_of_one_prompt_compute_it_once(*, prefix_cache: bool) -> None:
    """The others wait for the first one's rows and begin with all of them but the last."""
    stage = scene(max_sequences=4, lookup=False)
    stage.add_drafter(honest)
    prompt = [5, *range(1, 30)]
    first = request("0", prompt, 20, sampling=SEEDED, prefix_cache=prefix_cache)
    asked = [
        first,
        *(
            replace(first, request_id=f"{i}", parent="0", sampling=replace(SEEDED, seed=i))
            for i in range(1, 4)
        ),
    ]
    for each in asked:
        stage.world.submit(each)
    stage.world.run()
    for each in asked:
        stage.check(each)
    computed = [
        len(extend.tokens)
        for step in stage.world.steps
        for extend in step.extends
        if extend.start < len(prompt)
    ]
    assert sorted(computed) == [1, 1, 1, len(prompt)]
    stage.check_nothing_left()
    stage.check_replay()


def test_a_choice_whose_parent_is_gone_computes_its_prompt_itself() -> None:
    stage = scene(max_sequences=4, lookup=False)
    asked = request("1", [5, *range(1, 30)], 20, parent="never")
    stage.world.submit(asked)
    stage.world.run()
    stage.check(asked)
    stage.check_nothing_left()
