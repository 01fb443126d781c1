"""Sequences that begin with the rows of a parent, over a model that tells wrong rows from right."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from orchestrator.ledger import Ledger
from protos.messages import Extend, Held, StepClose, StepOpen, TreeNode
from protos.sampling import GREEDY, Sampling
from target_workers.pages import Pages
from tests.cached_lm import CachedForward
from tests.driver import Driver
from tests.duo import audit, step
from tests.script_lm import ScriptForward, ScriptLM, Shape, ref_decode, script_target

LM = ScriptLM(vocab=16, seed=3)
PROMPT = tuple(range(1, 14))
SIZE = 4
SHAPE = Shape(page_size=SIZE, num_pages=16)
APART = {"cache_salt": "another"}
ALONE = {"prefix_cache": False}


def driver_of(shape: Shape = SHAPE, broken: Sequence[int] = (), forward=ScriptForward) -> Driver:
    return Driver(script_target(LM, shape, broken, forward))


def family(tokens: Sequence[int] = PROMPT, shape: Shape = SHAPE, **fields) -> Driver:
    """An engine with sequence 1 open, its prompt computed."""
    driver = driver_of(shape)
    driver.open(1, tokens, **fields)
    assert driver.extend(1, 0, tokens).error == ""
    return driver


@pytest.mark.parametrize("fields", [{}, APART, ALONE])
@pytest.mark.parametrize("length", range(1, 14))
def test_a_child_has_all_rows_of_its_parent_but_the_last_tokens(length: int, fields) -> None:
    tokens = PROMPT[:length]
    driver = family(tokens, **fields)
    assert driver.open(2, tokens, parent=1) == length - 1
    reply = audit(driver.engine)
    assert reply.held[1] == Held(2, length - 1, -(-(length - 1) // SIZE))
    assert reply.shared_pages == (length - 1) // SIZE
    assert driver.extend(2, length - 1, tokens[-1:]).next_token == LM.choose(tokens)
    assert driver.close(1, 2).free_pages == SHAPE.num_pages


@pytest.mark.parametrize("same", range(13))
def test_a_child_has_what_its_tokens_have_in_common_with_the_parents(same: int) -> None:
    driver = family(PROMPT, **ALONE)
    tokens = (*PROMPT[:same], 0, 0, 0)
    assert driver.open(2, tokens, parent=1) == same
    assert driver.extend(2, same, tokens[same:]).next_token == LM.choose(tokens)


def test_what_is_cached_comes_first_and_the_parents_rows_after_it() -> None:
    driver = family(PROMPT[:5])
    driver.close(1)
    driver.open(2, PROMPT, **APART)
    driver.send([], [Extend(2, 0, PROMPT[:11])])
    assert driver.open(3, PROMPT, parent=2) == 11
    assert audit(driver.engine).shared_pages == 1, "of two whole pages one is the cached"
    assert driver.extend(3, 11, PROMPT[11:]).next_token == LM.choose(PROMPT)


def test_a_parent_with_less_than_the_cache_gives_nothing() -> None:
    driver = family()
    driver.close(1)
    driver.open(2, PROMPT, **APART)
    driver.send([], [Extend(2, 0, PROMPT[:7])])
    assert driver.open(3, PROMPT, parent=2) == 12
    assert audit(driver.engine).shared_pages == 0


def test_rows_of_guesses_are_never_taken() -> None:
    driver = driver_of()
    right = ref_decode(LM, PROMPT[:5], 4)
    driver.open(1, PROMPT[:5])
    nodes = tuple(TreeNode(i - 1, token) for i, token in enumerate(right[:3]))
    verdict = driver.extend(1, 0, PROMPT[:5], nodes)
    assert verdict.walk == (0, 1, 2)
    tokens = (*PROMPT[:5], *right)
    assert driver.open(2, tokens, parent=1) == 5, "they are committed, but not yet in their places"
    assert driver.extend(2, 5, tokens[5:]).next_token == LM.choose(tokens)
    after = driver.extend(1, 8, right[3:], keep=verdict.walk)
    assert after.next_token == LM.choose(tokens)
    assert driver.open(3, tokens, parent=1) == 8


@pytest.mark.parametrize("samplings", [(GREEDY, GREEDY), (Sampling(0.9, 1), Sampling(0.9, 2))])
@pytest.mark.parametrize("length", [5, 8, 9, 11])
def test_parent_and_child_go_on_without_touching_each_others_rows(length: int, samplings) -> None:
    tokens = [list(PROMPT[:length]), list(PROMPT[:length])]
    driver = driver_of(Shape(page_size=SIZE, num_pages=40))
    driver.open(1, tokens[0], samplings[0])
    outputs = [driver.decode(1, tokens[0], 0, 3), []]
    starts = [len(tokens[0]) - 1, driver.open(2, tokens[1], samplings[1], parent=1)]
    for _ in range(8):
        for i in (0, 1):
            outputs[i] += driver.decode(1 + i, tokens[i], starts[i], 1)
            starts[i] = len(tokens[i]) - 1
    for output, sampling in zip(outputs, samplings, strict=True):
        assert output == ref_decode(LM, PROMPT[:length], len(output), sampling)


def test_a_parent_opened_in_the_same_step_gives_what_it_has_found() -> None:
    driver = family(**APART)
    driver.close(1)
    opens = [StepOpen(2, PROMPT, GREEDY, **APART), StepOpen(3, PROMPT, GREEDY, parent=2)]
    assert driver.send(opens).cached == (12, 12)
    assert audit(driver.engine).shared_pages == 3
    opens = [StepOpen(4, (5, 5), GREEDY), StepOpen(5, (5, 5), GREEDY, parent=4)]
    assert driver.send(opens).cached == (0, 0)


def test_a_child_of_a_child_of_one_step_has_the_copied_rows() -> None:
    driver = family(PROMPT[:7])
    opens = [StepOpen(seq, PROMPT[:7], GREEDY, parent=seq - 1) for seq in (2, 3)]
    assert driver.send(opens).cached == (6, 6)
    for seq in (2, 3):
        assert driver.extend(seq, 6, PROMPT[6:7]).next_token == LM.choose(PROMPT[:7])


@pytest.mark.parametrize(("fields", "found"), [({}, 12), (ALONE, 0)])
def test_a_parent_closed_in_the_same_step_is_none(fields, found: int) -> None:
    driver = family(**fields)
    opens = [StepOpen(2, PROMPT, GREEDY, parent=1, **fields)]
    assert driver.send(opens, closes=[StepClose(1)]).cached == (found,)


@pytest.mark.parametrize("parent", [2, 9, -1])
def test_itself_nobody_and_the_unknown_are_no_parents(parent: int) -> None:
    driver = family(**ALONE)
    assert driver.open(2, PROMPT, parent=parent) == 0


def test_an_open_with_an_extend_takes_nothing_from_its_parent() -> None:
    driver = family(**ALONE)
    stepped = driver.send([StepOpen(2, PROMPT, GREEDY, parent=1)], [Extend(2, 0, PROMPT)])
    assert stepped.cached == (0,)
    assert stepped.verdicts[0].next_token == LM.choose(PROMPT)


def test_a_parent_whose_rows_are_not_finite_gives_nothing() -> None:
    driver = driver_of(broken=[6])
    driver.open(1, PROMPT)
    assert driver.extend(1, 0, PROMPT).error
    assert driver.open(2, PROMPT, parent=1) == 0


@pytest.mark.parametrize("length", [9, 11])
def test_without_a_page_for_the_copy_whole_pages_are_shared(length: int) -> None:
    driver = family(PROMPT[:length], Shape(page_size=SIZE, num_pages=3))
    assert driver.open(2, PROMPT[:length], parent=1) == 8
    reply = audit(driver.engine)
    assert (reply.free_pages, reply.shared_pages) == (0, 2)
    driver.close(1)
    assert driver.extend(2, 8, PROMPT[8:length]).next_token == LM.choose(PROMPT[:length])


def test_a_page_has_one_key_whoever_shares_it() -> None:
    """Else evicting it would leave the other key pointing at a page with other tokens."""
    driver = family(PROMPT, Shape(page_size=SIZE, num_pages=4), cache_salt="a")
    driver.open(2, PROMPT[:9], parent=1, cache_salt="b")
    driver.extend(2, 8, PROMPT[8:9])
    driver.close(1, 2)
    assert driver.open(3, (3,) * 16) == 0
    assert driver.extend(3, 0, (3,) * 16).error == ""
    driver.close(3)
    for seq, salt in enumerate("ab", start=4):
        assert driver.open(seq, PROMPT, cache_salt=salt) == 0


def test_what_a_child_shares_is_found_under_its_own_terms() -> None:
    driver = family(**ALONE)
    driver.open(2, PROMPT, parent=1)
    driver.extend(2, 12, PROMPT[12:])
    assert driver.open(3, PROMPT) == 12
    driver.close(1, 2, 3)
    assert driver.open(4, PROMPT) == 12
    assert driver.open(5, PROMPT, **APART) == 0


@pytest.mark.parametrize("paused", [1, 2])
def test_a_paused_member_of_a_family_goes_on_as_if_it_had_not_been(paused: int) -> None:
    driver = family(PROMPT[:7], **ALONE)
    tokens = {1: [*PROMPT[:7], LM.choose(PROMPT[:7])], 2: list(PROMPT[:7])}
    assert driver.open(2, PROMPT[:7], parent=1, **ALONE) == 6
    driver.decode(2, tokens[2], 6, 3)
    driver.decode(1, tokens[1], 7, 3)
    driver.close(paused)
    other = 3 - paused
    driver.decode(other, tokens[other], len(tokens[other]) - 1, 2)
    found = driver.open(paused, tokens[paused], parent=other, **ALONE)
    assert found == len(tokens[paused]) - 1, "all that it had is in the other's rows"
    driver.decode(paused, tokens[paused], found, 2)
    for seq in (1, 2):
        assert tokens[seq][7:] == ref_decode(LM, PROMPT[:7], len(tokens[seq]) - 7)


def test_a_page_that_a_fork_lost_is_noticed_when_nobody_is_left() -> None:
    driver = family()
    driver.open(2, PROMPT, parent=1)
    driver.engine._pages._references[0] += 1
    with pytest.raises(AssertionError, match="1 pages are lost"):
        driver.engine.handle(step(9, closes=[StepClose(1), StepClose(2)]))


def test_a_shared_page_with_rows_to_come_is_noticed_by_the_audit() -> None:
    driver = family(PROMPT[:7])
    driver.open(2, PROMPT[:7], parent=1)
    pages = driver.engine._pages
    pages._references[pages._tables[2].pages.pop()] -= 1
    pages._free.append(2)
    pages._tables[2].pages.append(1)
    pages._references[1] += 1
    with pytest.raises(AssertionError, match="may yet write to"):
        audit(driver.engine)


# Any history, beside what the orchestrator counts.


@dataclass
class Member:
    """One sequence: what it was asked, what it has committed, and what is cached of it."""

    prompt: list[int]
    sampling: Sampling
    tokens: list[int]
    cached: int
    pages: int
    keep: tuple[int, ...] = ()


@dataclass
class Clan:
    """Sequences that fork, pause and end at random; a ledger counts as the orchestrator does."""

    draw: random.Random
    shape: Shape
    driver: Driver
    ledger: Ledger
    members: dict[int, Member] = field(default_factory=dict)
    closes: list[StepClose] = field(default_factory=list)
    next_seq: int = 1
    copies: int = 0
    full: int = 0

    @property
    def held(self) -> int:
        return sum(member.pages for member in self.members.values())

    def end(self, seq: int) -> Member:
        """Tell of an end with the next step."""
        member = self.members.pop(seq)
        self.closes.append(StepClose(seq, member.keep))
        self.ledger.closing += member.pages
        return member

    def open(self, *members: Member) -> None:
        """A step that only opens, each with a parent by chance; and carries the closes out."""
        opens = []
        self.ledger.start(self.held, 0)
        for member in members:
            known = [*self.members, *(close.seq for close in self.closes), self.next_seq - 1]
            parent = self.draw.choice([-1, *known])
            salt = self.draw.choice(("", "salt"))
            cached = self.draw.random() < 0.7
            opens.append(
                StepOpen(
                    self.next_seq,
                    tuple(member.tokens),
                    member.sampling,
                    cache_salt=salt,
                    prefix_cache=cached,
                    parent=parent,
                )
            )
            self.members[self.next_seq] = member
            self.next_seq += 1
        stepped = self.driver.send(opens, closes=self.closes)
        self.closes = []
        for member, found in zip(members, stepped.cached, strict=True):
            member.cached, member.pages = found, self.ledger.pages(found)
            member.keep = ()
            self.copies += found % self.shape.page_size > 0
        pages = sum(map(self.ledger.pages, stepped.cached))
        assert self.ledger.land(stepped.free_pages, pages) == ""

    def work(self) -> None:
        """A step over some of the sequences, as far as their pages are sure to be there."""
        budget = self.ledger.surely_free(self.held)
        extends, grown = [], {}
        for seq, member in self.members.items():
            extend = self._extend(seq, member)
            end = len(extend.tokens) + len(extend.nodes) + extend.start
            more = self.ledger.pages(end) - member.pages
            if more > budget:
                self.full += 1
            elif self.draw.random() < 0.7:
                budget -= max(more, 0)
                grown[seq] = self.ledger.pages(end)
                extends.append(extend)
        taken = sum(pages - self.members[seq].pages for seq, pages in grown.items())
        self.ledger.start(self.held, taken)
        stepped = self.driver.send([], extends, self.closes)
        self.closes = []
        assert self.ledger.land(stepped.free_pages, 0) == ""
        verdicts = {verdict.seq: verdict for verdict in stepped.verdicts}
        for extend in extends:
            member = self.members[extend.seq]
            member.pages = grown[extend.seq]
            member.cached, member.keep = extend.start + len(extend.tokens), ()
            if verdict := verdicts.get(extend.seq):
                assert verdict.error == ""
                member.keep = verdict.walk
                member.cached += len(verdict.walk)
                member.tokens += [extend.nodes[i].token for i in verdict.walk]
                member.tokens.append(verdict.next_token)

    def _extend(self, seq: int, member: Member) -> Extend:
        rest = member.tokens[member.cached :]
        chunk = rest[: self.draw.randrange(1, len(rest) + 1)]
        nodes: tuple[TreeNode, ...] = ()
        if len(chunk) == len(rest):
            right = LM.choose(member.tokens, member.sampling)
            wrong = TreeNode(-1, (right + 1) % 16)
            nodes = self.draw.choice(((), (wrong, TreeNode(-1, right), TreeNode(1, 3))))
        return Extend(seq, member.cached, tuple(chunk), nodes, member.keep)


def play(seed: int, forward=ScriptForward) -> Clan:
    draw = random.Random(seed)
    shape = Shape(page_size=draw.choice((1, 2, 4, 8)), num_pages=draw.choice((30, 60, 120)))
    driver = driver_of(shape, forward=forward)
    clan = Clan(draw, shape, driver, Ledger(shape.num_pages, shape.page_size))
    heads = [[draw.randrange(16) for _ in range(12)] for _ in range(2)]
    for number in range(60):
        if number % 5 == 0 or not clan.members:
            prompt = draw.choice(heads)[: draw.randrange(1, 13)]
            samplings = [Sampling(draw.choice((0.0, 0.9)), draw.randrange(3)) for _ in range(3)]
            clan.open(*(Member(prompt, s, list(prompt), 0, 0) for s in samplings))
        elif draw.random() < 0.25:
            member = clan.end(draw.choice(list(clan.members)))
            if draw.random() < 0.5:  # paused, and computed again
                clan.open(member)
        else:
            clan.work()
        while clan.held > shape.num_pages:
            clan.end(max(clan.members))
        for member in clan.members.values():
            output = member.tokens[len(member.prompt) :]
            assert output == ref_decode(LM, member.prompt, len(output), member.sampling)
    while clan.members:
        clan.end(next(iter(clan.members)))
    clan.work()
    assert audit(clan.driver.engine).held == ()
    clan.driver.engine._pages.check_idle()
    return clan


@pytest.mark.parametrize("seed", range(40))
def test_any_history_of_forks_computes_the_right_tokens_and_is_counted_right(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(6))
def test_it_does_over_rows_kept_as_int8(seed: int) -> None:
    play(seed, CachedForward)


def test_those_histories_copy_and_run_out_of_pages_enough_to_mean_something() -> None:
    clans = [play(seed) for seed in range(10)]
    assert sum(clan.copies for clan in clans) > 20
    assert sum(clan.full for clan in clans) > 10


def test_every_shard_gets_the_same_tables() -> None:
    tables = []
    for _ in range(2):
        pages = play(4).driver.engine._pages
        tables.append((pages._free, list(pages._cache._page_of.items()), pages._cache.idle_pages()))
    assert tables[0] == tables[1]


def test_a_fork_of_pages_says_what_to_copy() -> None:
    pages = Pages(6, SIZE)
    pages.open(1)
    assert pages.grow(1, 10)
    pages.open(2)
    rows, source, target = pages.fork(2, 1, 7)
    assert (rows, source.tolist(), target.tolist()) == (7, [4, 5, 6], [12, 13, 14])
    assert (pages.held(2), pages.shared, pages.free) == (2, 1, 2)
    pages.check()
    pages.close(1)
    pages.close(2)
    pages.check_idle()
