"""The design's laws, on the real core, the real engines and a scripted model."""

import random

import pytest

from drafter_workers.config import GrowthConfig
from orchestrator.events import ToDrafterWorker
from orchestrator.k_policy import FixedK, ScriptedK
from orchestrator.request import Finished, FinishReason, Mode
from protos.messages import Grow
from protos.sampling import Sampling
from services.text import TextStream, TokenStopper
from tests.faults import Fate, scripted, seeded
from tests.script_drafter import honest, pattern, perfect, worst
from tests.simulation.scene import BOTH, MODES, SEEDED, STEP_S, request, scene, step_s

DRAFTERS = {"perfect": perfect, "worst": worst, "honest": honest}


# Law 1: output equals plain decoding.


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", BOTH)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_output_equals_plain_decoding(drafter, mode, sampling, k) -> None:
    stage = scene(mode=mode, k=k)
    stage.add_drafter(DRAFTERS[drafter])
    asked = request("a", sampling=sampling, max_tokens=60)
    stage.world.submit(asked)
    stage.world.run()
    stage.check(asked)
    stage.check_nothing_left()
    stage.check_replay()


@pytest.mark.parametrize("seed", range(20))
def test_output_equals_plain_decoding_with_trees(seed) -> None:
    rng = random.Random(seed)
    stage = scene(seed=seed, k=rng.randrange(2, 13), shape="tree")
    stage.add_drafter(honest, 0.001, growth=GrowthConfig(width=3))
    asked = [request(str(i), [i, i, 3], 60, sampling=BOTH[i % 2]) for i in range(3)]
    for each in asked:
        stage.world.submit(each)
    stage.world.run()
    for each in asked:
        stage.check(each)
    branching = [
        e
        for s in stage.world.steps
        for e in s.extends
        if len({n.parent for n in e.nodes}) < len(e.nodes)
    ]
    assert branching
    stage.check_nothing_left()
    stage.check_replay()


def test_every_answer_of_the_target_twice_changes_nothing_and_is_counted() -> None:
    stage = scene(k=4, plan=lambda way, index, message: Fate(copies=1 + (way == "in")))
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=60)
    stage.world.submit(asked)
    stage.world.run()
    stage.check(asked)
    assert stage.world.core.counters.stepped_stale > 0


@pytest.mark.parametrize("seed", range(60))
def test_output_equals_plain_decoding_under_faults(seed) -> None:
    rng = random.Random(seed)
    weather = seeded(seed, max_delay_s=0.02, again=0.1, stall=0.03)
    stage = scene(
        seed=seed,
        k=rng.randrange(1, 9),
        patience_s=rng.choice([0.0, 0.01]),
        lookup=rng.random() < 0.3,
        step_rows=rng.choice([8, 16, 256]),
        max_sequences=rng.randrange(1, 9),
    )
    for _ in range(rng.randrange(1, 3)):
        guesser = rng.choice([perfect, worst, honest])
        stage.add_drafter(guesser, rng.uniform(0.0005, 0.02), weather)
    asked = [
        request(
            str(i),
            [rng.randrange(32) for _ in range(rng.randrange(1, 40))],
            rng.randrange(1, 60),
            sampling=Sampling(rng.choice([0.0, 0.8]), seed=i),
            mode=rng.choice([None, *MODES]),
            stop_token_ids=(rng.randrange(32),) if rng.random() < 0.3 else (),
        )
        for i in range(rng.randrange(1, 12))
    ]
    for each in asked:
        stage.world.submit(each, at=rng.uniform(0, 0.3))
    if rng.random() < 0.5:
        when = rng.uniform(0, 0.5)
        stage.world.at(when, lambda: stage.world.drafters[0].cut())
        stage.world.at(when + 0.05, lambda: stage.world.drafters[0].connect())
    if rng.random() < 0.3:
        when = rng.uniform(0.3, 0.6)  # new requests are refused while it is away
        stage.world.at(when, lambda: stage.world.targets[0].cut())
        stage.world.at(when + 0.1, lambda: stage.world.targets[0].connect())
    stage.world.run()
    for each in asked:
        stage.check(each)
    stage.check_nothing_left()
    stage.check_replay()


# Law 3: nothing of a perfect drafter is wasted, and stalls do not last.


@pytest.mark.parametrize("sampling", BOTH)
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_no_guess_of_a_perfect_drafter_is_rejected(sampling, mode, k) -> None:
    stage = scene(mode=mode, k=k)
    stage.add_drafter(perfect)
    asked = request("a", sampling=sampling, max_tokens=100)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.accepted == stats.drafted > 0
    counters = stage.world.core.counters
    assert counters.openings == 1
    assert counters.guesses_gone <= 2  # decided by the target before the first Grow arrived


class Stalls:
    """Holds one direction once, from its n-th message on, and remembers until when."""

    def __init__(self, direction: str, at: int, seconds: float) -> None:
        self.now = lambda: 0.0
        self.until = 0.0
        self._where = (direction, at)
        self._seconds = seconds

    def __call__(self, direction, index, message) -> Fate:
        if (direction, index) != self._where:
            return Fate()
        self.until = self.now() + self._seconds
        return Fate(stall_s=self._seconds)


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("at", range(2, 16, 3))
def test_a_perfect_drafter_is_back_at_full_length_two_rounds_after_a_40_ms_stall(
    direction, at
) -> None:
    k = 4
    stage = scene(k=k)
    stalls = Stalls(direction, at, 0.040)
    stage.add_drafter(perfect, 0.002, stalls)
    stalls.now = stage.world.clock.now
    asked = request("a", max_tokens=110)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.accepted == stats.drafted
    rounds = [r for r in stage.world.rounds if r.clamp != "length"]
    stalled_until = stalls.until
    after = [r for r in rounds if r.now > stalled_until + 2 * step_s(1 + k)]
    assert len(after) > 3
    assert all(r.used == k for r in after)
    assert stage.world.core.counters.reopenings == 0


def test_a_stall_of_every_length_leaves_no_lasting_loss() -> None:
    for stall_ms in range(5, 200, 15):
        stage = scene(k=4)
        stage.add_drafter(perfect, 0.002, scripted({("in", 6): Fate(stall_s=stall_ms / 1000)}))
        asked = request("a", max_tokens=120)
        stage.world.submit(asked)
        stage.world.run()
        stage.check(asked)
        lost = [r for r in stage.world.rounds if r.clamp == "draft"]
        assert len(lost) <= stall_ms / 1000 / STEP_S + 4, stall_ms


def test_the_worst_drafter_costs_rows_but_no_tokens() -> None:
    stage = scene(k=4)
    stage.add_drafter(worst)
    asked = request("a", max_tokens=60)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.accepted == 0
    assert stats.rounds == 60


def test_drafting_goes_on_while_the_target_verifies() -> None:
    stage = scene(k=4)
    stage.add_drafter(perfect, 0.002)
    asked = request("a", max_tokens=100)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.hits >= 0.8 * stats.rounds
    assert stats.accepted >= 3.5 * stats.rounds - 10


def test_synchronous_mode_drafts_only_between_verifications() -> None:
    stage = scene(mode=Mode.SYNC, k=4)
    stage.add_drafter(perfect, 0.002)
    asked = request("a", max_tokens=100)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.hits <= 1  # the prompt's own prefill may overlap the first block
    assert stats.histogram[-1] >= stats.rounds - 2
    assert len(stats.histogram) == 5


# Law 4: nothing is left behind. Law 6: none stalls another.


def test_a_cancelled_request_is_freed_within_one_step() -> None:
    stage = scene(k=4)
    stage.add_drafter(perfect)
    stage.world.submit(request("gone", max_tokens=100))
    stage.world.submit(stays := request("stays", [4, 5], max_tokens=100))
    stage.world.cancel("gone", at=0.1)
    stage.world.run(until=lambda: stage.world.clock.now() > 0.1)
    running = stage.world.steps[-1].step
    stage.world.run(until=lambda: stage.world.steps[-1].step > running)
    closing = stage.world.steps[-1]
    assert [close.seq for close in closing.closes] == [1], "the very next step frees it"
    accounts = audit(stage)
    assert {held.seq for account in accounts.values() for held in account.held} == {2}
    stage.world.run()
    assert stage.world.served["gone"].last.reason is FinishReason.CANCELLED
    stage.check(stays)
    stage.check_nothing_left()


def audit(stage):
    """Every worker's account, in the middle of things."""
    from protos.messages import Audit

    stage.world.audits.clear()
    for link in [*stage.world.targets, *stage.world.drafters]:
        link.send(Audit(9))
    stage.world.run(until=lambda: len(stage.world.audits) == 2)
    return stage.world.audits


def test_a_sequence_without_guesses_never_holds_up_one_with_them() -> None:
    alone = scene(k=4, patience_s=0.01)
    alone.add_drafter(perfect)
    alone.world.submit(asked := request("a", max_tokens=100))
    alone.world.run()
    together = scene(k=4, patience_s=0.01)
    together.add_drafter(perfect)
    together.world.submit(asked)
    together.world.submit(request("plain", [9, 9], 100, mode=Mode.OFF))
    done_at = {}
    while together.world.served["a"].last is None:
        together.world.clock.step()
    done_at["a"] = together.world.clock.now()
    assert done_at["a"] <= alone.world.clock.now() * 1.1
    together.world.run()
    together.check(asked)


def test_the_loss_of_the_drafter_changes_nothing_but_speed() -> None:
    stage = scene(k=4)
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=100)
    stage.world.submit(asked)
    stage.world.at(0.1, lambda: stage.world.drafters[0].cut())
    stage.world.run()
    served = stage.check(asked)
    assert served.last.stats.degraded
    last = stage.world.rounds[-1]
    assert last.used == 0


def test_a_second_drafter_takes_over_from_a_lost_one() -> None:
    stage = scene(k=4)
    stage.add_drafter(perfect)
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=110)
    stage.world.submit(asked)
    stage.world.at(0.1, lambda: stage.world.drafters[0].cut())
    stage.world.run()
    served = stage.check(asked)
    assert not served.last.stats.degraded
    assert stage.world.rounds[-2].used == 4


# Law 5 and B052: the drafter follows while K is 0.


def test_a_drafter_is_fed_while_k_is_zero() -> None:
    policy = ScriptedK([4] * 5 + [0] * 30 + [4])
    stage = scene(k=4, policy=policy)
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=100)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.accepted == stats.drafted
    resumed = [r for r in stage.world.rounds if r.number >= 35 and r.clamp != "length"]
    assert resumed
    assert all(r.used == 4 for r in resumed)
    assert [r.used for r in stage.world.rounds if 5 <= r.number < 35] == [0] * 30


def test_a_drafter_that_joins_late_is_of_use_at_once() -> None:
    stage = scene(k=4)
    asked = request("a", max_tokens=110)
    stage.world.submit(asked)
    stage.world.run(until=lambda: len(stage.world.rounds) == 50)
    stage.add_drafter(perfect)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.accepted == stats.drafted > 30


# Law 8: stops and limits, per token and in order.


@pytest.mark.parametrize("place", range(6))
def test_an_end_token_at_any_place_of_a_block_ends_the_sequence_there(place) -> None:
    """Place 5 is the target's own token after a block of five."""
    scout = scene(k=5)
    scout.add_drafter(perfect)
    scout.world.submit(request("a", max_tokens=100))
    scout.world.run()
    output = scout.world.served["a"].tokens
    # A whole block whose token at this place is the first of its kind.
    starts = [r.frontier - 3 for r in scout.world.rounds if r.accepted == 5]
    at = next(i for i in starts if output[i + place] not in output[: i + place])
    stage = scene(k=5)
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=100, stop_token_ids=(output[at + place],))
    stage.world.submit(asked)
    stage.world.run()
    served = stage.check(asked)
    assert served.tokens == output[: at + place + 1]
    last = stage.world.rounds[-1]
    assert last.frontier - 3 == at
    assert last.accepted == min(place + 1, 5), "nothing after the stop is counted"
    stage.check_nothing_left()


PIECES = [bytes([97 + token % 26, 65 + token // 26]) for token in range(32)]


def text_stopper(asked) -> TokenStopper:
    """The edge's own stopper, over tokens of two letters each."""
    return TokenStopper(frozenset(), TextStream(PIECES, asked.stop_strings))


@pytest.mark.parametrize("end", range(40, 58))
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("k", [4, 16])
def test_a_stop_string_ends_the_sequence_at_the_token_that_completes_it(end, tokens, k) -> None:
    """B021, B022: at every place of a block, over two blocks, and at the start of a long one."""
    stage = scene(k=k, stopper=text_stopper)
    stage.add_drafter(perfect)
    plain = stage.reference(request("x", max_tokens=100))
    text = b"".join(PIECES[token] for token in plain)
    # From the middle of one token to the middle of another.
    stop = text[2 * (end - tokens) + 1 : 2 * end + 1].decode()
    first = text.decode().index(stop) + len(stop)
    stage.world.submit(request("a", max_tokens=100, stop_strings=(stop,)))
    stage.world.run()
    served = stage.world.served["a"]
    assert served.tokens == plain[: -(-first // 2)]
    assert served.last.reason is FinishReason.STOP
    stage.check_nothing_left()


@pytest.mark.parametrize("drafter", [perfect, worst])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_exactly_max_tokens_are_delivered(drafter, max_tokens) -> None:
    stage = scene(k=4)
    stage.add_drafter(drafter)
    asked = request("a", max_tokens=max_tokens)
    stage.world.submit(asked)
    stage.world.run()
    served = stage.check(asked)
    assert len(served.tokens) == max_tokens
    for r in stage.world.rounds:
        assert r.used <= 3 + max_tokens - r.frontier - 1


def test_generation_ends_exactly_at_the_end_of_the_context() -> None:
    stage = scene(k=8, max_context=64)
    stage.add_drafter(perfect)
    asked = request("a", [5] * 58, max_tokens=100)
    stage.world.submit(asked)
    stage.world.run()
    served = stage.check(asked)
    assert len(served.tokens) == 6
    assert served.last.reason is FinishReason.LENGTH


def test_a_drafter_with_a_shorter_context_serves_what_fits() -> None:
    from tests.script_lm import Shape

    stage = scene(k=4)
    stage.add_drafter(perfect, shape=Shape(max_context=32, page_size=1, num_pages=1024))
    long = request("long", [3] * 100, max_tokens=20)
    short = request("short", [4] * 10, max_tokens=60)
    stage.world.submit(long)
    stage.world.submit(short)
    stage.world.run()
    stage.check(long)
    stage.check(short)
    by_seq = {1: [], 2: []}
    for r in stage.world.rounds:
        by_seq[r.seq].append(r)
    assert all(r.used == 0 for r in by_seq[1])
    assert any(r.used == 4 for r in by_seq[2])
    assert all(r.used == 0 for r in by_seq[2] if r.frontier >= 32)


# B005, B056: no token twice, none lost, none of another sequence.


def test_patterned_acceptance_never_repeats_or_loses_a_token() -> None:
    rights = (0, 1, 2, 3, 4, 4, 0, 3, 1)
    stage = scene(mode=Mode.SYNC, k=4)
    stage.add_drafter(lambda lm: pattern(lm, rights))
    asked = request("a", max_tokens=120)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert all(stats.histogram)


def test_concurrent_sequences_never_mix() -> None:
    stage = scene(k=4)
    stage.add_drafter(lambda lm: pattern(lm, (0, 3, 1, 4, 2)), forward_s=0.001)
    asked = [request(str(i), [i, i + 1, i], 100, sampling=SEEDED) for i in range(8)]
    for each in asked:
        stage.world.submit(each)
    stage.world.run()
    for each in asked:
        stage.check(each)


# B068: a message of another time or sequence changes nothing and is counted.


@pytest.mark.parametrize("stale", ["opening", "sequence", "gap", "future"])
def test_a_grow_that_does_not_fit_changes_nothing_and_is_counted(stale) -> None:
    from orchestrator.events import DrafterSaid
    from protos.messages import Guess

    stage = scene(k=4)
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=60)
    stage.world.submit(asked)
    stage.world.run(until=lambda: len(stage.world.rounds) == 5)
    seq = next(stage.world.core.sequences)
    before = {id(n) for n in seq.tree.walk()}
    wrong = Guess(10_000 if stale == "gap" else 1, 0, 5, -0.01)
    grow = Grow(
        seq=99 if stale == "sequence" else 1,
        opening=7 if stale == "opening" else 1,
        frontier=1000 if stale == "future" else seq.frontier,
        nodes=(wrong,),
    )
    counters = stage.world.core.counters
    counted = counters.grows_stale + counters.reopenings
    stage.world.dispatch(DrafterSaid(stage.world.clock.now(), 0, grow))
    assert counters.grows_stale + counters.reopenings == counted + 1
    # A fault ends the opening, whose guesses go with it; nothing wrong ever comes in.
    assert {id(n) for n in seq.tree.walk()} == (set() if stale in ("gap", "future") else before)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stats.accepted == stats.drafted


def test_every_frame_twice_changes_nothing() -> None:
    once, twice = scene(k=4), scene(k=4)
    once.add_drafter(perfect)
    twice.add_drafter(perfect, plan=lambda direction, index, message: Fate(copies=2))
    asked = request("a", max_tokens=100)
    for stage in (once, twice):
        stage.world.submit(asked)
        stage.world.run()
        stage.check(asked)
    assert twice.world.served["a"].last == once.world.served["a"].last
    assert twice.world.core.counters.guesses_repeated > 0


# Law 7: bounds have a named answer.


def test_requests_beyond_the_limit_wait_and_beyond_the_queue_are_refused() -> None:
    from orchestrator.request import Refusal, Refused

    stage = scene(max_sequences=2, max_queue=2)
    asked = [request(str(i), [i + 1], 20) for i in range(5)]
    for each in asked:
        stage.world.submit(each)
    stage.world.run()
    for each in asked[:4]:
        stage.check(each)
    refused = stage.world.served["4"].last
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.QUEUE_FULL
    assert refused.retry_s > 0
    assert stage.world.served["3"].last.stats.wait_s > 0


def test_a_lost_target_that_returns_continues_every_stream() -> None:
    stage = scene(k=4)
    stage.add_drafter(perfect)
    asked = [request(str(i), [i + 1, 7], 80, sampling=SEEDED) for i in range(3)]
    for each in asked:
        stage.world.submit(each)
    stage.world.at(0.1, lambda: stage.world.targets[0].cut())
    stage.world.at(0.3, lambda: stage.world.targets[0].connect())
    stage.world.run()
    for each in asked:
        stage.check(each)
    stage.check_nothing_left()


def test_a_target_that_stays_away_ends_the_streams_with_what_they_have() -> None:
    stage = scene(recovery_s=1.0)
    asked = request("a", max_tokens=80)
    stage.world.submit(asked)
    stage.world.at(0.1, lambda: stage.world.targets[0].cut())
    from orchestrator.events import Ticked

    stage.world.at(1.2, lambda: stage.world.dispatch(Ticked(stage.world.clock.now())))
    stage.world.run()
    served = stage.world.served["a"]
    assert isinstance(served.last, Finished)
    assert served.last.reason is FinishReason.UNAVAILABLE
    assert served.tokens == stage.reference(asked)[: len(served.tokens)]
    assert served.tokens


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_resumed_tokens_count_and_are_not_sent_again(at) -> None:
    stage = scene(k=4)
    stage.add_drafter(perfect)
    whole = request("whole", max_tokens=60, sampling=SEEDED)
    expected = stage.reference(whole)
    asked = request("a", max_tokens=60, sampling=SEEDED, resumed=tuple(expected[:at]))
    stage.world.submit(asked)
    stage.world.run()
    assert stage.world.served["a"].tokens == expected[at:]
    stage.check_nothing_left()


def test_looked_up_guesses_speed_up_a_repetitive_text() -> None:
    stage = scene(k=4, lookup=True)
    asked = request("a", [1, 2, 3, 4] * 10, max_tokens=80)
    stage.world.submit(asked)
    stage.world.run()
    stats = stage.check(asked).last.stats
    assert stage.world.core.counters.looked_up > 0
    assert stats.drafted > 0


def test_nothing_is_drafted_when_speculation_is_off() -> None:
    stage = scene(lookup=True, mode=Mode.OFF)
    stage.add_drafter(perfect)
    asked = request("a", [1, 2] * 10, max_tokens=40)
    stage.world.submit(asked)
    stage.world.run()
    assert stage.check(asked).last.stats.drafted == 0
    assert stage.world.core.counters.openings == 0
    sent = [c.message for _, cs in stage.world.log for c in cs if isinstance(c, ToDrafterWorker)]
    assert sent == []


def test_a_fixed_k_is_a_bound() -> None:
    stage = scene(k=8, policy=FixedK(3))
    stage.add_drafter(perfect)
    asked = request("a", max_tokens=60, k=2)
    stage.world.submit(asked)
    stage.world.run()
    stage.check(asked)
    assert max(r.used for r in stage.world.rounds) == 2
