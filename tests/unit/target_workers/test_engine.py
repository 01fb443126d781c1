"""The target engine over a scripted model whose cache tells a wrong row from a right one."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from protos.messages import (
    Advance,
    Audit,
    Extend,
    Held,
    Message,
    Step,
    StepClose,
    StepOpen,
    Stepped,
    TreeNode,
    Verdict,
)
from protos.sampling import GREEDY, Sampling
from protos.worker import ProtocolError
from target_workers.drawn import Decided
from target_workers.engine import TargetEngine
from target_workers.model.chooser import Choosers
from target_workers.model.run import Run
from target_workers.pages import Slots
from target_workers.rows import Draws
from tests.duo import audit, counts, step
from tests.script_lm import ScriptForward, ScriptLM, Shape, ref_decode, script_target

LM = ScriptLM(vocab=16, seed=3)
CHOOSERS = Choosers(LM.vocab)
PROMPT = (1, 2, 3, 4, 5)
SHAPE = Shape()
SAMPLINGS = (GREEDY, Sampling(0.8, 11))


def run(engine: TargetEngine, message: Message) -> Stepped:
    (stepped,) = engine.handle(message)
    assert isinstance(stepped, Stepped)
    return stepped


def opened(prompt: Sequence[int] = PROMPT, shape: Shape = SHAPE) -> tuple[TargetEngine, Verdict]:
    """An engine with sequence 1 open, its prompt computed in step 1."""
    engine = script_target(LM, shape)
    opens = [StepOpen(1, tuple(prompt), GREEDY)]
    (verdict,) = run(engine, step(1, opens, [Extend(1, 0, tuple(prompt))])).verdicts
    return engine, verdict


def chain(*tokens: int) -> tuple[TreeNode, ...]:
    return tuple(TreeNode(i - 1, token) for i, token in enumerate(tokens))


def wrong(token: int) -> int:
    return (token + 1) % LM.vocab


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_plain_decoding_equals_the_model_for_any_chunking(chunk: int, sampling: Sampling) -> None:
    engine = script_target(LM)
    tokens = list(PROMPT)
    opens = [StepOpen(1, PROMPT, sampling)]
    cached = 0
    for number in range(1, 40):
        end = min(cached + chunk, len(tokens))
        stepped = run(engine, step(number, opens, [Extend(1, cached, tuple(tokens[cached:end]))]))
        assert len(stepped.verdicts) == (end == len(tokens))
        tokens.extend(verdict.next_token for verdict in stepped.verdicts)
        opens, cached = [], end
    assert tokens[5:] == ref_decode(LM, PROMPT, len(tokens) - 5, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", range(12))
def test_any_tree_in_any_batch_gives_what_plain_decoding_gives(
    seed: int, sampling: Sampling
) -> None:
    draw = random.Random(seed)
    engine = script_target(LM, Shape(page_size=draw.choice((1, 3, 16)), num_pages=300))
    prompts = {seq: [draw.randrange(16) for _ in range(draw.randint(1, 9))] for seq in range(1, 6)}
    tokens = {seq: list(prompt) for seq, prompt in prompts.items()}
    cached = dict.fromkeys(prompts, 0)
    keep: dict[int, tuple[int, ...]] = dict.fromkeys(prompts, ())
    for number in range(1, 25):
        seqs = [seq for seq in prompts if draw.random() < 0.7]
        opens = [
            StepOpen(seq, tuple(prompts[seq]), sampling)
            for seq in seqs
            if not cached[seq] and len(tokens[seq]) == len(prompts[seq])
        ]
        extends = [
            Extend(
                seq,
                cached[seq],
                tuple(tokens[seq][cached[seq] :]),
                _tree(draw, tokens[seq], sampling),
                keep[seq],
            )
            for seq in seqs
        ]
        verdicts = run(engine, step(number, opens, extends)).verdicts
        for extend, verdict in zip(extends, verdicts, strict=True):
            assert not verdict.error
            seq = verdict.seq
            cached[seq] = len(tokens[seq]) + len(verdict.walk)
            keep[seq] = verdict.walk
            tokens[seq].extend(extend.nodes[i].token for i in verdict.walk)
            tokens[seq].append(verdict.next_token)
        audit(engine)
    for seq, prompt in prompts.items():
        output = tokens[seq][len(prompt) :]
        assert output == ref_decode(LM, prompt, len(output), sampling)
    assert counts(engine)["accepted"] > 20


def _tree(draw: random.Random, tokens: list[int], sampling: Sampling) -> tuple[TreeNode, ...]:
    """A random tree in which many nodes are the model's own tokens."""
    nodes: list[TreeNode] = []
    paths = {-1: tokens}
    for _ in range(draw.randrange(10)):
        parent = draw.randrange(-1, len(nodes))
        right = LM.choose(paths[parent], sampling)
        node = TreeNode(parent, draw.choice((right, right, draw.randrange(16))))
        if node not in nodes:
            paths[len(nodes)] = [*paths[parent], node.token]
            nodes.append(node)
    return tuple(nodes)


class Spy(ScriptForward):
    """Counts the rows moved; forgets to move them if told to."""

    moved = 0
    forgetful = False

    def move(self, source: Slots, target: Slots) -> None:
        self.moved += len(source)
        if not self.forgetful:
            super().move(source, target)


def spied(forgetful: bool = False) -> tuple[TargetEngine, Spy]:
    forward = Spy(LM, SHAPE.num_slots)
    forward.forgetful = forgetful
    return TargetEngine(SHAPE.hello("target", LM), forward, CHOOSERS), forward


def test_the_kept_nodes_of_a_chain_are_where_they_belong() -> None:
    engine, forward = spied()
    right = ref_decode(LM, PROMPT, 3)
    opens = [StepOpen(1, PROMPT, GREEDY)]
    (verdict,) = run(engine, step(1, opens, [Extend(1, 0, PROMPT, chain(*right))])).verdicts
    assert verdict.walk == (0, 1, 2)
    run(engine, step(2, [], [Extend(1, 8, (verdict.next_token,), keep=verdict.walk)]))
    assert forward.moved == 0


@pytest.mark.parametrize("forgetful", [False, True])
def test_the_kept_nodes_of_a_branch_move_to_their_positions(forgetful: bool) -> None:
    engine, forward = spied(forgetful)
    one, two, three, *_ = output = ref_decode(LM, PROMPT, 5)
    nodes = (TreeNode(-1, wrong(one)), TreeNode(-1, one), TreeNode(0, 0), TreeNode(1, two))
    opens = [StepOpen(1, PROMPT, GREEDY)]
    (verdict,) = run(engine, step(1, opens, [Extend(1, 0, PROMPT, nodes)])).verdicts
    assert (verdict.walk, verdict.next_token) == ((1, 3), three)
    (after,) = run(engine, step(2, [], [Extend(1, 7, (three,), keep=(1, 3))])).verdicts
    assert forward.moved == 2
    assert (after.next_token == output[3]) != forgetful, "the toy model must tell the difference"


def test_rows_of_rejected_nodes_are_freed_before_others_get_room() -> None:
    shape = Shape(page_size=1, num_pages=12)
    engine, verdict = opened(PROMPT, shape)
    nodes = chain(wrong(LM.choose([*PROMPT, verdict.next_token])), 0, 0, 0, 0, 0)
    stepped = run(engine, step(2, [], [Extend(1, 5, (verdict.next_token,), nodes)]))
    assert stepped.free_pages == 0
    (verdict,) = stepped.verdicts
    other = (7, 8, 9, 10)
    stepped = run(
        engine,
        step(
            3,
            [StepOpen(2, other, GREEDY)],
            [Extend(2, 0, other), Extend(1, 6, (verdict.next_token,))],
        ),
    )
    # The first in order is allocated first, from what the second has just freed.
    assert [bool(v.error) for v in stepped.verdicts] == [False, False]
    assert audit(engine).held == (Held(1, 7, 7), Held(2, 4, 4))


def test_a_sequence_that_finds_no_page_fails_alone_and_may_try_again() -> None:
    shape = Shape(page_size=4, num_pages=3)
    engine, verdict = opened(PROMPT, shape)
    opens = [StepOpen(2, (1,) * 5, GREEDY)]
    extends = [Extend(2, 0, (1,) * 5), Extend(1, 5, (verdict.next_token,))]
    first, second = run(engine, step(2, opens, extends)).verdicts
    assert "out of pages" in first.error
    assert second.next_token == LM.choose([*PROMPT, verdict.next_token])
    assert audit(engine).held == (Held(1, 6, 2), Held(2, 0, 0))
    stepped = run(engine, step(3, [], [Extend(2, 0, (1,) * 5)], [StepClose(1)]))
    assert stepped.verdicts[0].next_token == LM.choose([1] * 5)


def test_what_was_kept_once_cannot_be_kept_again() -> None:
    engine = script_target(LM, Shape(page_size=4, num_pages=2))
    first, *_, last = ref_decode(LM, (1, 2), 3)
    opens = [StepOpen(1, (1, 2), GREEDY)]
    (verdict,) = run(engine, step(1, opens, [Extend(1, 0, (1, 2), chain(first))])).verdicts
    extend = Extend(1, 3, (verdict.next_token,), chain(last, 0, 0, 0, 0, 0), keep=(0,))
    (verdict,) = run(engine, step(2, [], [extend])).verdicts
    assert "out of pages" in verdict.error
    (verdict,) = run(engine, step(3, [], [replace(extend, nodes=())])).verdicts
    assert "no path" in verdict.error
    (verdict,) = run(engine, step(4, [], [replace(extend, nodes=(), keep=())])).verdicts
    assert verdict.next_token == last


def test_a_prefill_chunk_gets_no_verdict() -> None:
    engine = script_target(LM)
    stepped = run(engine, step(1, [StepOpen(1, PROMPT, GREEDY)], [Extend(1, 0, PROMPT[:3])]))
    assert stepped.verdicts == ()
    assert stepped.cached == (0,)


def test_an_open_may_come_without_an_extend() -> None:
    engine = script_target(LM)
    run(engine, step(1, [StepOpen(1, PROMPT, GREEDY)]))
    (verdict,) = run(engine, step(2, [], [Extend(1, 0, PROMPT)])).verdicts
    assert verdict.next_token == LM.choose(PROMPT)


def test_logits_that_are_not_finite_end_that_sequence_only() -> None:
    engine = script_target(LM, broken=[15])
    opens = [StepOpen(1, (1, 15), GREEDY), StepOpen(2, (1, 2), GREEDY)]
    extends = [Extend(1, 0, (1, 15)), Extend(2, 0, (1, 2))]
    broken, sound = run(engine, step(1, opens, extends)).verdicts
    assert broken.error == "the logits at position 1 are not finite"
    assert (sound.error, sound.next_token) == ("", LM.choose((1, 2)))


def test_no_guess_ends_a_sequence() -> None:
    """The broken guess spoils its whole run: that of the root, or a branch of its own."""
    right = ref_decode(LM, PROMPT, 4)
    off, on = wrong(right[0]), right[1]
    trunk = (TreeNode(-1, off), *(TreeNode(i, t) for i, t in ((-1, right[0]), (1, on))))
    opens = [StepOpen(1, PROMPT, GREEDY), StepOpen(2, (4, 4), GREEDY)]
    for nodes, broken, walk in (
        (trunk, off, ()),
        ((trunk[1], trunk[0], TreeNode(0, on)), off, (0, 2)),
        (trunk, on, ()),
    ):
        engine = script_target(LM, broken=[broken])
        extends = [Extend(1, 0, PROMPT, nodes), Extend(2, 0, (4, 4))]
        first, other = run(engine, step(1, opens, extends)).verdicts
        assert (first.error, first.walk, first.next_token) == ("", walk, right[len(walk)])
        assert other.next_token == LM.choose((4, 4))
        assert counts(engine).get("bared", 0) == (not walk)
        tail = tuple([*PROMPT, *right][5 + len(walk) : 6 + len(walk)])
        extend = Extend(1, 5 + len(walk), tail, keep=walk)
        (after,) = run(engine, step(2, [], [extend])).verdicts
        assert after.next_token == right[len(walk) + 1]


class Poisoned(ScriptForward):
    """Raises while token 13 is among the rows, as a kernel does over an index it cannot take."""

    def decide(self, runs: Sequence[Run], draws: Draws) -> Decided:
        if any(13 in run.tokens.tolist() for run in runs):
            raise IndexError("planted")
        return super().decide(runs, draws)


def poisoned() -> TargetEngine:
    return TargetEngine(SHAPE.hello("target", LM), Poisoned(LM, SHAPE.num_slots), CHOOSERS)


@pytest.mark.parametrize("poison", [(1, 13), (1, 13, 2, 2)])
def test_an_extend_that_makes_the_forward_raise_ends_its_sequence_alone(
    poison: tuple[int, ...],
) -> None:
    engine = poisoned()
    prompts = {1: PROMPT, 2: poison, 3: (4, 4)}
    opens = [StepOpen(seq, tokens, GREEDY) for seq, tokens in prompts.items()]
    extends = [Extend(seq, 0, tokens[:2]) for seq, tokens in prompts.items()]
    second, third = run(engine, step(1, opens, extends)).verdicts
    assert (second.seq, second.error) == (2, "its forward failed: IndexError: planted")
    assert (third.seq, third.next_token) == (3, LM.choose((4, 4)))
    stepped = run(engine, step(2, [], [Extend(1, 2, PROMPT[2:])], [StepClose(2)]))
    assert stepped.verdicts[0].next_token == LM.choose(PROMPT)
    assert counts(engine)["failed_forwards"] == 2
    assert audit(engine).held == (Held(1, 5, 2), Held(3, 2, 1))


def test_a_guess_that_makes_the_forward_raise_is_dropped() -> None:
    engine = poisoned()
    (verdict,) = run(
        engine, step(1, [StepOpen(1, PROMPT, GREEDY)], [Extend(1, 0, PROMPT, chain(13, 2))])
    ).verdicts
    assert (verdict.error, verdict.walk) == ("", ())
    assert verdict.next_token == LM.choose(PROMPT)


def test_pages_of_a_failed_forward_are_found_by_nobody() -> None:
    engine = poisoned()
    tokens = (1, 13, *[2] * 8)
    run(engine, step(1, [StepOpen(1, tokens, GREEDY)], [Extend(1, 0, tokens)]))
    run(engine, step(2, closes=[StepClose(1)]))
    assert run(engine, step(3, [StepOpen(2, tokens, GREEDY)])).cached == (0,)


def _inconsistent(next_token: int) -> Iterator[tuple[Extend, str]]:
    """After PROMPT, node (9,) rejected: what an orchestrator must not send."""
    good = Extend(1, 6, (next_token,))
    yield replace(good, seq=9), "not open"
    yield replace(good, start=5), "starts at 5"
    yield replace(good, start=7), "starts at 7"
    yield replace(good, tokens=()), "not those committed"
    yield replace(good, tokens=(wrong(next_token),)), "not those committed"
    yield replace(good, tokens=(next_token, 0)), "not those committed"
    yield replace(good, keep=(0,), start=7), "not what became committed"
    yield replace(good, keep=(1,)), "no path"
    yield replace(good, nodes=(TreeNode(0, 1),)), "parent"
    yield replace(good, nodes=(TreeNode(-1, 1),) * 2), "same parent"
    yield replace(good, nodes=(TreeNode(-1, 16),)), "vocabulary"
    yield replace(good, nodes=(TreeNode(-1, -1),)), "vocabulary"
    yield replace(good, nodes=chain(*(1,) * 4)), "context of 10"


@pytest.mark.parametrize("index", range(13))
def test_an_inconsistent_extend_fails_alone_and_changes_nothing(index: int) -> None:
    engine, verdict = opened(PROMPT, Shape(max_context=10))
    first = verdict.next_token
    rejected = chain(wrong(LM.choose([*PROMPT, first])))
    (verdict,) = run(engine, step(2, [], [Extend(1, 5, (first,), rejected)])).verdicts
    assert verdict.walk == ()
    bad, cause = list(_inconsistent(verdict.next_token))[index]
    opens = [StepOpen(2, (4, 4), GREEDY)]
    failed, sound = run(engine, step(3, opens, [bad, Extend(2, 0, (4, 4))])).verdicts
    assert cause in failed.error
    assert failed.seq == bad.seq
    assert sound.next_token == LM.choose((4, 4))
    # A longer rejected row is still there: the sequence goes on as if nothing had been sent.
    (after,) = run(engine, step(4, [], [Extend(1, 6, (verdict.next_token,))])).verdicts
    assert after.next_token == ref_decode(LM, PROMPT, 3)[2]
    audit(engine)


def test_nodes_below_an_unfinished_prompt_are_refused() -> None:
    engine = script_target(LM)
    extend = Extend(1, 0, PROMPT[:3], chain(1))
    (verdict,) = run(engine, step(1, [StepOpen(1, PROMPT, GREEDY)], [extend])).verdicts
    assert "nodes under position 2 of 5" in verdict.error


def test_a_prompt_outside_the_vocabulary_fails_alone() -> None:
    engine = script_target(LM)
    opens = [StepOpen(1, (1, 99), GREEDY)]
    (verdict,) = run(engine, step(1, opens, [Extend(1, 0, (1, 99))])).verdicts
    assert "vocabulary of 16" in verdict.error


def test_a_sequence_may_fill_the_context_to_its_last_position() -> None:
    engine, verdict = opened((1,) * 9, Shape(max_context=10))
    (verdict,) = run(engine, step(2, [], [Extend(1, 9, (verdict.next_token,))])).verdicts
    assert verdict.error == ""
    (verdict,) = run(engine, step(3, [], [Extend(1, 10, (verdict.next_token,))])).verdicts
    assert "11 positions exceed the context of 10" in verdict.error


def test_a_tree_may_have_more_nodes_than_positions_are_left() -> None:
    engine, verdict = opened((1,) * 7, Shape(max_context=10))
    nodes = tuple(TreeNode(-1, token) for token in range(6))
    (verdict,) = run(engine, step(2, [], [Extend(1, 7, (verdict.next_token,), nodes)])).verdicts
    assert verdict.error == ""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (Step(2, 0, extends=(Extend(1, 5, (1,)),)), "do not match their hash"),
        (step(1), "after step 1"),
        (step(0), "after step 1"),
        (step(2, [StepOpen(1, (1,), GREEDY)]), "open already"),
        (step(2, closes=[StepClose(2)]), "not open"),
        (step(2, closes=[StepClose(1, (0,))]), "no path"),
        (step(2, extends=[Extend(1, 5, (1,)), Extend(1, 5, (1,))]), "two Extends"),
        (step(2, extends=[Extend(1, 5, (1,) * 300)]), "300 rows, 256 allowed"),
        (Advance(1, 1, 0, (), 1), "takes no Advance"),
    ],
)
def test_what_makes_no_sense_closes_the_link(message: Message, cause: str) -> None:
    engine, _ = opened()
    with pytest.raises(ProtocolError, match=cause):
        engine.handle(message)
    audit(engine)


def test_closing_frees_all_pages() -> None:
    engine, verdict = opened()
    extend = Extend(1, 5, (verdict.next_token,), chain(LM.choose([*PROMPT, verdict.next_token])))
    (verdict,) = run(engine, step(2, [], [extend])).verdicts
    assert run(engine, step(3, closes=[StepClose(1, verdict.walk)])).free_pages == 256
    assert audit(engine).held == ()


def test_a_close_may_keep_less_than_was_accepted() -> None:
    engine = script_target(LM)
    extend = Extend(1, 0, PROMPT, chain(*ref_decode(LM, PROMPT, 3)))
    run(engine, step(1, [StepOpen(1, PROMPT, GREEDY)], [extend]))
    assert run(engine, step(2, closes=[StepClose(1, (0, 1))])).free_pages == 256


def test_a_closed_sequence_can_be_opened_again() -> None:
    engine, _ = opened()
    run(engine, step(2, closes=[StepClose(1)]))
    (verdict,) = run(
        engine, step(3, [StepOpen(1, PROMPT, GREEDY)], [Extend(1, 0, PROMPT)])
    ).verdicts
    assert verdict.next_token == LM.choose(PROMPT)


def test_after_a_reset_nothing_is_left_and_steps_count_anew() -> None:
    engine, _ = opened()
    engine.reset()
    assert (audit(engine).held, audit(engine).free_pages) == ((), 256)
    (verdict,) = run(
        engine, step(1, [StepOpen(1, PROMPT, GREEDY)], [Extend(1, 0, PROMPT)])
    ).verdicts
    assert verdict.next_token == LM.choose(PROMPT)


def test_a_worst_case_drafter_leaves_no_trace_in_the_cache() -> None:
    """Case B051: after every round the rows held are those of the committed tokens."""
    engine, verdict = opened()
    tokens = [*PROMPT, verdict.next_token]
    for number in range(2, 52):
        nodes = chain(*(wrong(LM.choose(tokens)) for _ in range(4)))
        extend = Extend(1, len(tokens) - 1, (tokens[-1],), nodes)
        (verdict,) = run(engine, step(number, [], [extend])).verdicts
        assert verdict.walk == ()
        assert audit(engine).held == (Held(1, len(tokens), -(-(len(tokens) + 4) // 4)),)
        tokens.append(verdict.next_token)
    assert tokens[5:] == ref_decode(LM, PROMPT, 51)


def test_cores_are_set_when_they_change() -> None:
    asked: list[int] = []
    forward = ScriptForward(LM, SHAPE.num_slots)
    forward.set_cores = asked.append  # type: ignore[method-assign]
    engine = TargetEngine(SHAPE.hello("target", LM), forward, CHOOSERS)
    for number, cores in enumerate((0, 2, 2, 0, 1, 2), start=1):
        run(engine, step(number, cores=cores))
    assert asked == [2, 1, 2]


def test_times_are_those_of_the_forward_and_of_the_wait_before() -> None:
    times = iter((10.0, 13.0, 14.0, 18.0, 21.0, 22.0, 22.5))
    forward = ScriptForward(LM, SHAPE.num_slots)
    engine = TargetEngine(SHAPE.hello("target", LM), forward, CHOOSERS, lambda: next(times))
    opens = [StepOpen(1, PROMPT, GREEDY)]
    stepped = run(engine, step(1, opens, [Extend(1, 0, PROMPT)]))
    assert (stepped.idle_s, stepped.forward_s) == (3.0, 4.0)
    stepped = run(engine, step(2))
    assert (stepped.idle_s, stepped.forward_s) == (3.0, 0.5)


def test_an_audit_accounts_for_rows_pages_and_steps() -> None:
    engine, _ = opened()
    reply = audit(engine)
    assert (reply.total_pages, reply.free_pages, reply.cached_pages) == (256, 254, 0)
    assert reply.held == (Held(1, 5, 2),)
    assert counts(engine) == {
        "accepted": 0,
        "errors": 0,
        "forwards": 1,
        "found": 0,
        "nodes": 0,
        "opened": 5,
        "rows": 5,
        "runs": 1,
        "steps": 1,
        "verdicts": 1,
    }
    assert engine.handle(Audit(3))[0] == replace(reply, nonce=3)
    assert engine.work() is None
