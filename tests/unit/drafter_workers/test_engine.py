"""The drafter engine over scripted proposers: messages, growth, catching up, limits."""

import random
from dataclasses import replace

import pytest

from drafter_workers.config import GrowthConfig
from drafter_workers.engine import DraftEngine
from drafter_workers.proposer import Candidate
from protos.draft_tree import DraftTree, Ids, Node
from protos.messages import Advance, Close, Grow, Held, Message, Need, Open, Report, Step
from protos.sampling import GREEDY, Sampling
from protos.worker import ProtocolError
from tests.duo import Duo, audit, counts
from tests.script_drafter import (
    CHAINS,
    SLOTS,
    Spot,
    TokenProposer,
    honest,
    pattern,
    perfect,
    script_drafter,
    worst,
)
from tests.script_lm import ScriptLM, Shape, ref_decode, script_target

LM = ScriptLM(vocab=16, seed=3)
PROMPT = (1, 2, 3, 4, 5)
RIGHT = tuple(ref_decode(LM, PROMPT, 60))
LONG = replace(SLOTS, max_context=512)


def make(growth: GrowthConfig = CHAINS, shape: Shape = SLOTS) -> DraftEngine:
    """A drafter that is always right."""
    return script_drafter(LM, TokenProposer(perfect(LM), shape), growth, shape)


def opened(credit: int = 4, opening: int = 1) -> DraftEngine:
    engine = make()
    assert engine.handle(Open(1, opening, PROMPT, GREEDY, credit)) == []
    return engine


def works(engine: DraftEngine) -> list[Message]:
    """Everything the engine has to say before the next message."""
    said: list[Message] = []
    while (answers := engine.work()) is not None:
        said.extend(answers)
    return said


def grown(messages: list[Message], seq: int = 1) -> list[int]:
    """The tokens of the nodes sent for a sequence."""
    grows = [m for m in messages if isinstance(m, Grow) and m.seq == seq]
    return [guess.token for grow in grows for guess in grow.nodes]


def test_an_opened_sequence_is_drafted_up_to_its_credit() -> None:
    engine = opened(credit=4)
    said = works(engine)
    assert grown(said) == list(RIGHT[:4])
    assert all(isinstance(m, Grow) and (m.opening, m.frontier) == (1, 5) for m in said)
    assert [g.id for m in said if isinstance(m, Grow) for g in m.nodes] == [1, 2, 3, 4]


def test_a_hit_moves_the_root_and_growth_goes_on_below() -> None:
    engine = opened()
    works(engine)
    engine.handle(Advance(1, 1, 5, RIGHT[:2], 4))
    said = works(engine)
    assert grown(said) == list(RIGHT[4:6])
    assert counts(engine)["expanded"] == 6, "what survived is not computed again"


def test_a_miss_starts_anew_at_the_new_root() -> None:
    engine = opened()
    works(engine)
    miss = (RIGHT[1] + 1) % 16
    engine.handle(Advance(1, 1, 5, (RIGHT[0], miss), 4))
    assert grown(works(engine)) == ref_decode(LM, [*PROMPT, RIGHT[0], miss], 4)


def test_an_advance_from_beyond_what_is_known_is_answered_by_a_need() -> None:
    engine = opened()
    assert engine.handle(Advance(1, 1, 7, (1,), 4)) == [Need(1, 1, 5)]
    assert engine.handle(Advance(1, 1, 6, (1,), 4)) == [Need(1, 1, 5)]
    assert counts(engine)["needs"] == 2
    assert engine.handle(Advance(1, 1, 5, RIGHT[:3], 4)) == []
    assert grown(works(engine)) == list(RIGHT[3:7])


def test_of_an_overlapping_advance_only_the_tail_is_new() -> None:
    engine = opened()
    works(engine)
    engine.handle(Advance(1, 1, 2, (*PROMPT[2:], *RIGHT[:2]), 4))
    engine.handle(Advance(1, 1, 5, RIGHT[:2], 4))
    engine.handle(Advance(1, 1, 0, PROMPT, 4))
    assert grown(works(engine)) == list(RIGHT[4:6])


def test_an_advance_without_a_tail_changes_the_credit_only() -> None:
    engine = opened(credit=2)
    works(engine)
    engine.handle(Advance(1, 1, 5, (), 5))
    assert grown(works(engine)) == list(RIGHT[2:5])
    engine.handle(Advance(1, 1, 5, (), 0))
    engine.handle(Advance(1, 1, 5, RIGHT[:5], 0))
    assert works(engine) == []


def test_unequal_history_is_a_fault_and_all_of_it_is_needed() -> None:
    engine = opened()
    works(engine)
    assert engine.handle(Advance(1, 1, 4, (9, 9), 4)) == [Need(1, 1, 0)]
    assert counts(engine)["faults"] == 1
    assert works(engine) == []
    assert engine.handle(Advance(1, 1, 6, (9,), 4)) == [Need(1, 1, 0)]
    engine.handle(Advance(1, 1, 0, (1, 2), 4))
    said = works(engine)
    assert grown(said) == ref_decode(LM, (1, 2), 4)
    assert isinstance(said[0], Grow)
    assert said[0].nodes[0].id == 5, "ids of an opening run on"


def test_messages_of_another_opening_are_dropped_and_counted() -> None:
    engine = opened(opening=3)
    for message in (
        Advance(1, 2, 5, (9,), 4),
        Advance(1, 4, 5, (9,), 4),
        Close(1, 2),
        Open(1, 3, (9,), GREEDY, 4),
        Open(1, 2, (9,), GREEDY, 4),
    ):
        assert engine.handle(message) == []
    assert counts(engine)["stale"] == 5
    assert grown(works(engine)) == list(RIGHT[:4])


def test_messages_of_no_sequence_are_dropped_and_counted() -> None:
    engine = make()
    assert engine.handle(Advance(1, 1, 0, (1,), 4)) == []
    assert engine.handle(Close(1, 1)) == []
    assert counts(engine)["unknown"] == 2


def test_a_higher_opening_starts_the_sequence_anew() -> None:
    engine = opened(opening=1)
    works(engine)
    engine.handle(Open(1, 2, (7, 7), GREEDY, 3))
    said = works(engine)
    assert grown(said) == ref_decode(LM, (7, 7), 3)
    assert isinstance(said[0], Grow)
    assert (said[0].opening, said[0].frontier, said[0].nodes[0].id) == (2, 2, 1)


def test_closing_and_resetting_free_every_slot() -> None:
    engine = opened()
    works(engine)
    engine.handle(Close(1, 1))
    assert (audit(engine).held, audit(engine).free_pages) == ((), 1024)
    engine.handle(Open(2, 1, PROMPT, GREEDY, 4))
    works(engine)
    engine.reset()
    assert (audit(engine).held, audit(engine).free_pages) == ((), 1024)


def test_a_message_that_is_not_for_a_drafter_ends_the_link() -> None:
    with pytest.raises(ProtocolError, match="takes no Step"):
        opened().handle(Step(1, 0))
    with pytest.raises(ProtocolError, match="position -1"):
        opened().handle(Advance(1, 1, -1, (1,), 4))


def test_a_sequence_opened_without_tokens_waits_for_them() -> None:
    engine = make()
    engine.handle(Open(1, 1, (), GREEDY, 4))
    assert engine.work() is None
    engine.handle(Advance(1, 1, 0, PROMPT, 4))
    assert grown(works(engine)) == list(RIGHT[:4])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 4)])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_both_ends_hold_the_same_tree_whatever_is_late(
    seed: int, width: int, sampling: Sampling
) -> None:
    draw = random.Random(seed)
    engine = script_drafter(
        LM, TokenProposer(honest(ScriptLM(16, 3, flaw=0.3))), GrowthConfig(width=width)
    )
    committed = list(PROMPT)
    mirror, ids = DraftTree(5), Ids("drafter", memory=20)
    to_drafter: list[Message] = [Open(1, 1, PROMPT, sampling, 12)]
    to_mirror: list[Message] = []
    for turn in range(150):
        event = draw.choice(("commit", "deliver", "work", "work", "grow", "grow"))
        if event == "commit" and turn < 120:
            tokens = ref_decode(LM, committed, draw.randint(1, 4), sampling)
            if draw.random() < 0.2:
                tokens[-1] = draw.randrange(16)
            credit = draw.choice((0, 4, 12))
            to_drafter.append(Advance(1, 1, len(committed), tuple(tokens), credit))
            committed.extend(tokens)
            mirror.advance(tokens)
            ids.reconcile(mirror)
        elif event == "deliver" and to_drafter:
            to_mirror.extend(engine.handle(to_drafter.pop(0)))
        elif event == "work":
            to_mirror.extend(engine.work() or [])
        elif to_mirror:
            _take(to_mirror.pop(0), mirror, ids, committed)
    while to_drafter:
        to_mirror.extend(engine.handle(to_drafter.pop(0)))
    for message in to_mirror + works(engine):
        _take(message, mirror, ids, committed)
    assert _paths(mirror) == _paths(engine.tree(1))
    assert ids.live == engine.tree(1).size == mirror.size
    audit(engine)


def _take(message: Message, mirror: DraftTree, ids: Ids, committed: list[int]) -> None:
    if isinstance(message, Report):
        return
    assert isinstance(message, Grow)
    for guess in message.nodes:
        ids.place(mirror, committed, message.frontier, guess)


def _paths(tree: DraftTree) -> set[tuple[tuple[int, float], ...]]:
    paths: dict[Node, tuple[tuple[int, float], ...]] = {}
    for node in tree.walk():
        above = paths[node.parent] if node.parent else ()
        paths[node] = (*above, (node.token, node.scores["drafter"]))
    return set(paths.values())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, 5)])
@pytest.mark.parametrize("width", [1, 3])
def test_several_sequences_drafted_together_stay_apart(width: int, sampling: Sampling) -> None:
    """Case B056: as many streams as rows, each with its own acceptance."""
    shape = "chain" if width == 1 else "tree"
    drafter = script_drafter(
        LM, TokenProposer(pattern(LM, (0, 3, 1, 2))), GrowthConfig(width=width)
    )
    duo = Duo(
        script_target(LM, Shape(num_pages=1000)), drafter, k=4 if width == 1 else 20, shape=shape
    )
    for seq in range(8):
        duo.open(seq, [seq, 1, 2 + seq % 3], sampling)
    for turn in range(20):
        duo.draft()
        duo.round([seq for seq in range(8) if (seq + turn) % 3])
        audit(duo.target)
        audit(drafter)
    for line in duo.lines.values():
        assert line.output == ref_decode(LM, line.tokens[: line.prompt], len(line.output), sampling)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_no_guess_of_a_perfect_drafter_is_rejected(k: int) -> None:
    """Case B050: the last guess of a block was never computed before it is accepted."""
    duo = Duo(
        script_target(LM, replace(LONG, page_size=16, num_pages=64, max_rows=600)),
        make(shape=LONG),
        k=k,
    )
    duo.credit = k
    line = duo.open(1, PROMPT)
    while len(line.output) < 300:
        duo.draft()
        duo.round()
    assert set(line.accepted) == {k}


def test_acceptance_is_whole_again_after_a_time_without_guesses() -> None:
    """Case B052: the drafter follows, or catches up, while nothing is asked of it."""
    target = script_target(LM, replace(LONG, page_size=16, num_pages=64, max_rows=600))
    duo = Duo(target, make(GrowthConfig(feed_rows=8), LONG))
    line = duo.open(1, PROMPT)
    for k, rounds in ((4, 5), (0, 30), (4, 20)):
        duo.credit = 32 if k else 0
        for _ in range(rounds):
            duo.round(k=k)
            duo.draft()
    assert line.accepted == line.proposed
    assert line.proposed[1:5] == [4] * 4
    assert line.proposed[5:35] == [0] * 30
    assert line.proposed[36:] == [4] * 19


def test_a_drafter_that_joins_late_is_whole_at_once() -> None:
    """Case B052, second half: its first look at the sequence is at token 50."""
    duo = Duo(script_target(LM))
    line = duo.open(1, PROMPT)
    for _ in range(50):
        duo.round()
    duo.drafter = make()
    duo.drafter.handle(Open(1, 1, tuple(line.tokens), GREEDY, 32))
    line.accepted.clear()
    for _ in range(5):
        duo.draft()
        duo.round()
    assert line.accepted == [4] * 5


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("second", range(5))
def test_the_cache_is_cut_by_exactly_what_was_rejected(first: int, second: int) -> None:
    """Case B049: K = 4, any number accepted, then any other."""
    drafter = script_drafter(LM, TokenProposer(pattern(LM, (first, second, 0))))
    duo = Duo(script_target(LM), drafter)
    duo.credit = 4
    line = duo.open(1, PROMPT)
    for accepted in (first, second):
        duo.draft()
        duo.round()
        assert line.accepted[-1] == accepted
        held = audit(drafter).held
        # The last guess of a full block and the target's own token were never computed.
        short = 2 if accepted == 4 else 1
        assert held == (Held(1, len(line.tokens) - short, len(line.tokens) - short),)
    duo.draft(1)
    assert audit(drafter).held == (Held(1, len(line.tokens), len(line.tokens)),)


def test_a_worst_case_drafter_keeps_to_the_committed_rows() -> None:
    """Cases B051 and B053: rejected at once in every round, and never without a proposal."""
    drafter = script_drafter(LM, TokenProposer(worst(LM)))
    duo = Duo(script_target(LM), drafter)
    line = duo.open(1, PROMPT)
    for _ in range(50):
        duo.draft(6)
        assert line.tree.size >= 4
        duo.round()
        assert audit(drafter).held == (Held(1, len(line.tokens) - 1, len(line.tokens) - 1),)
    assert set(line.accepted) == {0}
    assert line.output == ref_decode(LM, PROMPT, 50)


def test_catching_up_is_done_in_pieces_and_takes_turns_with_growth() -> None:
    engine = make(GrowthConfig(feed_rows=8))
    engine.handle(Open(1, 1, tuple(range(10)) * 5, GREEDY, 4))
    engine.handle(Open(2, 1, PROMPT, GREEDY, 4))
    said = [engine.work() for _ in range(14)]
    assert [m if m is None else len(m) for m in said[:9]] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [seq for m in said if m for seq in (m[0].seq,)] == [2] * 4 + [1] * 4  # type: ignore[union-attr]
    assert counts(engine)["fed_rows"] == 48
    assert engine.work() is None


def test_an_advance_takes_effect_between_two_pieces() -> None:
    engine = make(GrowthConfig(feed_rows=8))
    prompt = tuple(range(10)) * 5
    engine.handle(Open(1, 1, prompt, GREEDY, 4))
    engine.work()
    engine.handle(Advance(1, 1, 50, (3,), 4))
    assert grown(works(engine)) == ref_decode(LM, (*prompt, 3), 4)


def test_without_credit_nothing_is_computed() -> None:
    engine = opened(credit=0)
    assert engine.work() is None
    assert counts(engine).get("forwards", 0) == 0
    engine.handle(Advance(1, 1, 5, (), 1))
    assert grown(works(engine)) == [RIGHT[0]]


def test_a_batch_takes_the_likeliest_leaves_of_all_sequences() -> None:
    engine = make(GrowthConfig(batch=2))
    for seq in (1, 2, 3):
        engine.handle(Open(seq, 1, (seq, 5), GREEDY, 2))
    order = [[m.seq for m in engine.work() or [] if isinstance(m, Grow)] for _ in range(3)]
    assert order == [[1, 2], [3, 1], [2, 3]], "a root comes before what is below another"
    assert engine.work() is None


def test_what_is_likelier_in_one_sequence_comes_before_what_is_not_in_another() -> None:
    def guess(spot: Spot, width: int) -> list[Candidate]:
        return perfect(LM, 0.9 if spot.prefix[0] == 2 else 0.3)(spot, width)

    engine = script_drafter(LM, TokenProposer(guess), GrowthConfig(batch=1))
    for seq in (1, 2):
        engine.handle(Open(seq, 1, (seq, 5), GREEDY, 4))
    order = [m.seq for m in works(engine) if isinstance(m, Grow)]
    assert order == [1, 2, 2, 2, 2, 1, 1, 1]


def test_a_root_with_pending_rows_counts_all_of_them() -> None:
    engine = make(shape=replace(SLOTS, max_rows=12))
    for seq in (1, 2):
        engine.handle(Open(seq, 1, (seq,) * 10, GREEDY, 1))
    order = [[m.seq for m in engine.work() or [] if isinstance(m, Grow)] for _ in range(2)]
    assert order == [[1], [2]]


def test_a_sequence_beyond_the_context_is_not_drafted() -> None:
    """Case B030: the long one runs without guesses, the short one with them."""
    engine = make(shape=replace(SLOTS, max_context=8))
    engine.handle(Open(1, 1, (1,) * 8, GREEDY, 4))
    engine.handle(Open(2, 1, PROMPT, GREEDY, 4))
    said = works(engine)
    assert grown(said, 1) == []
    assert grown(said, 2) == list(RIGHT[:3]), "no node beyond the context"
    assert counts(engine)["too_long"] == 1
    engine.handle(Advance(2, 1, 5, RIGHT[:3], 4))
    assert works(engine) == [Grow(2, 1, 8, ())]
    assert counts(engine)["too_long"] == 2
    assert audit(engine).held == (Held(1, 0, 0), Held(2, 0, 0)), "and its rows are freed"
    engine.handle(Advance(2, 1, 8, RIGHT[3:5], 4))
    engine.handle(Close(2, 1))
    assert works(engine) == []


def test_a_token_outside_the_drafters_vocabulary_ends_drafting() -> None:
    engine = opened()
    works(engine)
    engine.handle(Advance(1, 1, 5, (99,), 4))
    assert works(engine) == [Grow(1, 1, 6, ())]
    assert counts(engine)["foreign"] == 1
    assert audit(engine).free_pages == 1024


def test_what_does_not_fit_the_cache_waits_until_it_does() -> None:
    engine = make(shape=replace(SLOTS, num_pages=9))
    engine.handle(Open(1, 1, PROMPT, GREEDY, 4))
    assert grown(works(engine)) == list(RIGHT[:4])
    engine.handle(Open(2, 1, PROMPT, GREEDY, 4))
    assert works(engine) == [Grow(2, 1, 5, ())]
    assert counts(engine)["no_slots"] == 1
    engine.handle(Close(1, 1))
    assert grown(works(engine), 2) == list(RIGHT[:4])


def test_the_cache_is_as_good_after_many_sequences_as_before() -> None:
    """Case B048: room for one and a half sequences."""
    engine = make(shape=replace(SLOTS, num_pages=12))
    for seq in range(12):
        engine.handle(Open(seq, 1, (seq, *PROMPT), GREEDY, 4))
        assert len(grown(works(engine), seq)) == 4
        engine.handle(Close(seq, 1))
        assert audit(engine).free_pages == 12


def test_a_report_comes_every_few_forwards() -> None:
    times = iter(range(1000))
    proposer = TokenProposer(perfect(LM))
    engine = DraftEngine(
        SLOTS.hello("drafter", LM),
        proposer,
        GrowthConfig(report_every=3),
        lambda: float(next(times)),
    )
    engine.handle(Open(1, 1, PROMPT, GREEDY, 7))
    reports = [m for m in works(engine) if isinstance(m, Report)]
    assert reports == [Report(3, 1.0, 3), Report(6, 1.0, 6)]


def test_candidates_held_back_are_sent_in_answer_to_the_advance_that_lifts_them() -> None:
    timid = script_drafter(LM, TokenProposer(perfect(LM, 0.3)), GrowthConfig(floor=0.2))
    timid.handle(Open(1, 1, PROMPT, GREEDY, 8))
    assert grown(works(timid)) == [RIGHT[0]]
    answer = timid.handle(Advance(1, 1, 5, RIGHT[:1], 8))
    assert grown(answer) == [RIGHT[1]]
    assert counts(timid)["expanded"] == 2


def test_a_sequence_that_will_get_nothing_more_is_named_once_per_advance() -> None:
    timid = script_drafter(LM, TokenProposer(perfect(LM, 0.3)), GrowthConfig(floor=0.5))
    timid.handle(Open(1, 1, PROMPT, GREEDY, 8))
    assert works(timid) == [Grow(1, 1, 5, ())], "nothing is above the floor"
    assert timid.work() is None
    timid.handle(Advance(1, 1, 5, RIGHT[:1], 8))
    assert works(timid) == [Grow(1, 1, 6, ())]
    timid.handle(Advance(1, 1, 6, (), 4))
    assert works(timid) == [Grow(1, 1, 6, ())], "credit alone changed"
    timid.handle(Advance(1, 1, 6, (), 0))
    assert works(timid) == [], "nobody waits without credit"
    assert counts(timid)["exhausted"] == 3


def test_a_tree_that_fills_its_credit_is_not_called_exhausted() -> None:
    engine = opened(credit=3)
    assert all(isinstance(m, Grow) and m.nodes for m in works(engine))
    engine.handle(Advance(1, 1, 5, RIGHT[:1], 3))
    assert all(isinstance(m, Grow) and m.nodes for m in works(engine))


def test_nodes_come_before_the_word_that_no_more_will() -> None:
    engine = make(shape=replace(SLOTS, max_context=8))
    engine.handle(Open(1, 1, PROMPT, GREEDY, 6))
    said = works(engine)
    assert grown(said) == list(RIGHT[:3])
    assert said[-1] == Grow(1, 1, 5, ())
    assert len(said) == 4


def test_a_stuck_sequence_is_named_before_others_are_computed() -> None:
    engine = make(shape=replace(SLOTS, max_context=8))
    engine.handle(Open(1, 1, PROMPT, GREEDY, 4))
    engine.handle(Open(2, 1, (1,) * 8, GREEDY, 4))
    assert engine.work() == [Grow(2, 1, 8, ())]
    assert grown(works(engine), 1) == list(RIGHT[:3])


def test_nothing_is_said_of_a_sequence_whose_tokens_are_missing() -> None:
    engine = opened()
    works(engine)
    engine.handle(Advance(1, 1, 4, (9, 9), 4))
    assert works(engine) == []


def test_a_guesser_without_a_guess_says_so() -> None:
    engine = script_drafter(LM, TokenProposer(lambda _spot, _width: []))
    engine.handle(Open(1, 1, PROMPT, GREEDY, 4))
    assert works(engine) == [Grow(1, 1, 5, ())]
    assert counts(engine)["forwards"] == 1
