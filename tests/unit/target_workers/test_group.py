"""Ranks agree before they compute; where they do not, all of them say so and none goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from protos.codec import row_hash
from protos.messages import Extend, Join, Step, StepOpen, Stepped, TreeNode
from protos.sampling import GREEDY, Processors, Sampling, Scoring
from protos.worker import GroupBroken, ProtocolError
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.run import Run
from target_workers.model.shard import Shard
from target_workers.rows import Draws
from tests.driver import Driver
from tests.duo import Duo, counts, step
from tests.ranks import LOOPBACK, Ranks, grouped, joins_of, ranked
from tests.tiny import make_tiny_llama

PROMPT = (5, 9, 200, 31, 7, 7, 118)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"), 1)
    return TargetConfig(
        str(folder), dtype="fp32", exact=False, num_pages=32, max_context=256, rank_timeout_s=1.0
    )


@pytest.fixture
def pair(config: TargetConfig) -> Iterator[Ranks]:
    with ranked(config, 2) as ranks:
        yield ranks


def first_step(nodes: Sequence[TreeNode] = (), tokens: Sequence[int] = PROMPT) -> Step:
    return step(1, [StepOpen(1, PROMPT, GREEDY)], [Extend(1, 0, tuple(tokens), tuple(nodes))])


def output(ranks: Ranks, count: int = 8) -> list[int]:
    duo = Duo(ranks, k=0)
    line = duo.open(1, PROMPT)
    for _ in range(count):
        duo.round()
    return line.output


def test_only_the_first_rank_answers_a_step(pair: Ranks) -> None:
    answers = pair.threads.each(lambda i: pair.engines[i].handle(first_step()))
    assert isinstance(answers[0][0], Stepped)
    assert answers[1] == []


def test_a_step_takes_two_exchanges_a_layer_and_three_more(pair: Ranks) -> None:
    """To agree, to gather logits, to spread the choice; one was for joining."""
    pair.handle(first_step())
    for engine in pair.engines:
        assert counts(engine)["exchanges"] == 1 + 2 * 2 + 3
        assert counts(engine)["exchange_us"] > 0


def test_other_guesses_on_one_rank_are_found_out_before_the_forward(pair: Ranks) -> None:
    """B095: both lists are sound, and each has the right hash."""
    mine, other = first_step([TreeNode(-1, 3)]), first_step([TreeNode(-1, 4)])
    for error in pair.errors(mine, other):
        assert error.startswith("GroupBroken: rank ")
        assert f"{mine.row_hash}" in error and f"{other.row_hash}" in error
    assert all("forwards" not in counts(engine) for engine in pair.engines)


def test_a_block_of_another_length_is_found_out(pair: Ranks) -> None:
    """B096."""
    longer = first_step([TreeNode(-1, 3), TreeNode(0, 3)])
    assert all(map("GroupBroken".__eq__, kinds(pair.errors(first_step([TreeNode(-1, 3)]), longer))))
    damaged = replace(first_step([TreeNode(-1, 3)]), extends=longer.extends)
    pair.reset()
    pair.join()
    assert kinds(pair.errors(first_step(), damaged)) == ["GroupBroken", "ProtocolError"]


def kinds(errors: Sequence[str]) -> list[str]:
    return [error.partition(":")[0] for error in errors]


def test_another_step_number_is_found_out(pair: Ranks) -> None:
    other = first_step()
    other = Step(2, row_hash(other.opens, other.extends, ()), other.opens, other.extends)
    assert kinds(pair.errors(first_step(), other)) == ["GroupBroken"] * 2


def test_a_step_without_rows_is_agreed_on_too(pair: Ranks) -> None:
    only_opens = step(1, [StepOpen(1, PROMPT, GREEDY)])
    assert kinds(pair.errors(first_step(), only_opens)) == ["GroupBroken"] * 2


def test_other_page_tables_are_found_out_by_the_next_step(pair: Ranks) -> None:
    pair.handle(first_step())
    pages = pair.engines[1]._pages
    pages.open(99)
    pages.grow(99, 1)
    errors = pair.errors(step(2, [StepOpen(2, PROMPT, GREEDY)]))
    assert kinds(errors) == ["GroupBroken"] * 2


def test_another_answer_to_the_last_step_is_found_out(pair: Ranks) -> None:
    pair.handle(first_step())
    pair.engines[1]._peers.answered(Stepped(1, (), (), 0, 0.0))
    assert kinds(pair.errors(step(2, [StepOpen(2, PROMPT, GREEDY)]))) == ["GroupBroken"] * 2


def test_scores_and_reasons_are_the_first_ranks_and_agreed_on(
    pair: Ranks, config: TargetConfig
) -> None:
    """Every rule and end of a sequence goes through the group, and it goes on."""
    whole = Driver(load_target(config, vocab_hash="", incarnation=1))
    ranks = Driver(pair)
    size, nodes = len(PROMPT), (TreeNode(-1, 7), TreeNode(0, 8), TreeNode(-1, 9))
    penalised = Processors(repetition_penalty=1.5, top_k=5, withheld=(2,), min_tokens=3)
    opens = [
        StepOpen(1, PROMPT, Sampling(0.8, 3, "match", penalised, size), scoring=Scoring(2, 1)),
        StepOpen(2, PROMPT, Sampling(0.8, 3, "rejection", prompt_tokens=size)),
        StepOpen(3, PROMPT, Sampling(processors=Processors(allowed=(5,), no_repeat_ngram=1))),
    ]
    extends = [Extend(each.seq, 0, PROMPT, nodes) for each in opens]
    one, two = (driver.send(opens, extends) for driver in (whole, ranks))
    assert [v.error for v in two.verdicts] == [v.error for v in one.verdicts]
    assert [v.next_token for v in two.verdicts] == [v.next_token for v in one.verdicts]
    assert "no token can follow position 6" in two.verdicts[2].error
    for scored, expected in (
        (two.verdicts[0].scores, one.verdicts[0].scores),
        (two.prompts[0].scores, one.prompts[0].scores),
    ):
        assert [score.logprob for score in scored] == pytest.approx(
            [score.logprob for score in expected], abs=1e-4
        )
    for driver, (first, second, _) in ((whole, one.verdicts), (ranks, two.verdicts)):
        for verdict in (first, second):
            tail = [*(nodes[i].token for i in verdict.walk), verdict.next_token][-1]
            again = driver.extend(verdict.seq, size + len(verdict.walk), (tail,), keep=verdict.walk)
            assert again.error == ""


def test_times_are_no_part_of_an_answer(pair: Ranks) -> None:
    for rank, engine in enumerate(pair.engines):
        engine._peers.answered(Stepped(1, (), (), 0, forward_s=float(rank), idle_s=float(rank)))
    assert output(pair)


def test_a_forward_that_fails_on_one_rank_ends_the_group_and_is_not_tried_again(
    pair: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail(_runs: Sequence[Run], _draws: Draws) -> None:
        calls.append(1)
        raise MemoryError("planted")

    monkeypatch.setattr(pair.engines[1]._forward, "_decide", fail)
    two = [StepOpen(1, PROMPT, GREEDY), StepOpen(2, PROMPT, GREEDY)]
    errors = pair.errors(step(1, two, [Extend(1, 0, PROMPT), Extend(2, 0, PROMPT)]))
    assert errors == ["GroupBroken: rank 1: its forward failed: MemoryError: planted"] * 2
    assert len(calls) == 1


def test_a_rank_that_left_is_named(pair: Ranks) -> None:
    pair.engines[1].reset()
    with pytest.raises(GroupBroken, match="rank 1 left the group"):
        pair.engines[0].handle(first_step())


def test_a_silent_rank_is_named(pair: Ranks) -> None:
    with pytest.raises(GroupBroken, match="rank 1 took longer than 1 s"):
        pair.engines[0].handle(first_step())


def test_a_new_group_serves_on_with_the_same_weights(pair: Ranks) -> None:
    expected = output(pair)
    decoders = [engine._forward._decoder for engine in pair.engines]
    pair.errors(first_step(), step(1))
    pair.reset()
    pair.join()
    assert output(pair) == expected
    for engine, decoder in zip(pair.engines, decoders, strict=True):
        assert engine._forward._decoder is decoder


def test_a_rank_that_is_restarted_joins_those_that_live(config: TargetConfig, pair: Ranks) -> None:
    expected = output(pair)
    pair.reset()
    shard = Shard(1, 2)
    anew = load_target(replace(config, shard=shard, host=LOOPBACK), vocab_hash="", incarnation=2)
    pair.engines = [pair.engines[0], anew]
    pair.join()
    assert output(pair) == expected


def test_no_step_is_computed_without_a_group(config: TargetConfig) -> None:
    shard = Shard(0, 2)
    rank = load_target(replace(config, shard=shard, host=LOOPBACK), vocab_hash="", incarnation=1)
    with pytest.raises(GroupBroken, match="rank 0 is in no group"):
        rank.handle(first_step())


def test_a_rank_joins_only_as_what_it_has_loaded(pair: Ranks) -> None:
    one, two = joins_of([1, 2])
    with pytest.raises(ProtocolError, match="asked to be rank 1 of 2, it holds the part of 0 of 2"):
        pair.engines[0].handle(two)
    three = Join(1, 0, (*one.peers, "host:3"), one.key)
    with pytest.raises(ProtocolError, match="asked to be rank 0 of 3"):
        pair.engines[0].handle(three)


def test_a_target_in_one_piece_joins_nothing(config: TargetConfig) -> None:
    alone = load_target(config, vocab_hash="", incarnation=1)
    assert alone.hello().group_port == 0
    with pytest.raises(ProtocolError, match="in one piece"):
        alone.handle(joins_of([1, 2])[0])


def test_sums_are_added_up_in_rank_order() -> None:
    """In another order these would give other sums."""
    parts = [torch.tensor([[1e8, 1.0]]), torch.tensor([[-1e8, 1.0]]), torch.tensor([[1.0, 1e-8]])]
    with grouped(3) as (groups, threads):
        sums = threads.each(lambda i: groups[i].reduce(parts[i]))
        halves = threads.each(lambda i: groups[i].reduce(parts[i].bfloat16()))
    assert all(total.tolist() == [[1.0, 2.0]] for total in sums)
    assert all(total.dtype == torch.float32 for total in halves)


def test_the_first_ranks_numbers_reach_all() -> None:
    with grouped(3) as (groups, threads):
        told = threads.each(lambda i: groups[i].spread(torch.tensor([i, -1, 7])))
    assert [numbers.tolist() for numbers in told] == [[0, -1, 7]] * 3
