"""Several ranks behind one port: one group, one voice, and the lost rank is named."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from orchestrator.local_port import LocalPort
from orchestrator.ports import WorkerLost
from orchestrator.sharded_port import ShardedPort
from protos.engine_thread import LinkLimits
from protos.messages import Audit, AuditReply, Close, Hello, Join, Joined, Message, Report
from protos.worker import Engine, GroupBroken
from tests.fakes import ToyEngine
from tests.opened import LIMITS, streamed

FORM_S = 2.0


class ToyRank:
    """A toy engine that joins groups; `joins` has what it was told."""

    def __init__(self, rank: int, **said: object) -> None:
        self.toy = ToyEngine(incarnation=10 + rank)
        self.said = replace(self.toy.said, role="target", group_port=4000 + rank, **said)
        self.rank = rank
        self.joins: list[Join] = []
        self.pages = 0
        self.closes: Callable[[int], object] = lambda _seq: None
        self.seen: list[Message] = []

    def hello(self) -> Hello:
        return self.said

    def handle(self, message: Message) -> list[Message]:
        self.seen.append(message)
        match message:
            case Join():
                self.joins.append(message)
                return [Joined(message.generation)]
            case Audit():
                return [replace(self.toy._audit(message.nonce), tables_hash=self.pages)]
            case Close(seq):
                self.closes(seq)
                return [Report(seq, 0.0, 0)] if self.rank == 0 else []
        return []

    def work(self) -> list[Message] | None:
        return None

    def reset(self) -> None:
        return


@asynccontextmanager
async def sharded(engines: Sequence[Engine], form_s: float = FORM_S) -> AsyncIterator[ShardedPort]:
    ranks = [
        LocalPort(f"rank {i}", lambda engine=engine: engine, LIMITS)
        for i, engine in enumerate(engines)
    ]
    port = ShardedPort("target", ranks, form_s)
    async with asyncio.timeout(20):
        yield port
        await port.close()
        for rank in ranks:
            assert await rank.stop()


@pytest.fixture
def three() -> list[ToyRank]:
    return [ToyRank(rank) for rank in range(3)]


async def test_all_ranks_join_one_group_and_say_one_hello(three: list[ToyRank]) -> None:
    async with sharded(three) as port:
        await port.connect()
        hello = await port.receive()
    assert hello == replace(three[0].said, incarnation=hello.incarnation, group_port=0)
    joins = [rank.joins[0] for rank in three]
    peers = tuple(f"127.0.0.1:{4000 + i}" for i in range(3))
    assert joins == [Join(1, i, peers, joins[0].key) for i in range(3)]
    assert len(joins[0].key) == 32


async def test_every_connect_forms_a_new_generation_under_a_new_key(three: list[ToyRank]) -> None:
    async with sharded(three) as port:
        for _ in range(2):
            await port.connect()
            await port.receive()
    assert [join.generation for join in three[1].joins] == [1, 2]
    assert three[1].joins[0].key != three[1].joins[1].key


async def test_a_restarted_rank_gives_another_incarnation(three: list[ToyRank]) -> None:
    async with sharded(three) as port:
        await port.connect()
        before = await port.receive()
        three[2].said = replace(three[2].said, incarnation=99)
        await port.connect()
        after = await port.receive()
    assert before.incarnation != after.incarnation


async def test_every_rank_hears_all_and_the_first_one_answers(three: list[ToyRank]) -> None:
    async with sharded(three) as port:
        await port.connect()
        await port.receive()
        for seq in (7, 8):
            port.send(Close(seq, 1))
        assert [await port.receive(), await port.receive()] == [
            Report(7, 0.0, 0),
            Report(8, 0.0, 0),
        ]
        port.send(Audit(5))
        await port.receive()
    for rank in three:
        assert [m for m in rank.seen if not isinstance(m, Join)] == [
            Close(7, 1),
            Close(8, 1),
            Audit(5),
        ]


@pytest.mark.parametrize(
    ("name", "value"), [("model_hash", "other"), ("num_pages", 9), ("max_rows", 1), ("role", "x")]
)
async def test_a_rank_that_does_not_fit_is_named(name: str, value: object) -> None:
    async with sharded([ToyRank(0), ToyRank(1), ToyRank(2)]) as port:
        engines = [rank._build() for rank in port._ranks]
        engines[2].said = replace(engines[2].said, **{name: value})
        with pytest.raises(WorkerLost, match=f"rank 2 has {name} '?{value}'?, the first rank"):
            await port.connect()


async def test_a_target_in_one_piece_is_no_rank(three: list[ToyRank]) -> None:
    three[1].said = replace(three[1].said, group_port=0)
    async with sharded(three) as port:
        with pytest.raises(WorkerLost, match="rank 1 is a target in one piece"):
            await port.connect()


async def test_an_account_is_that_of_all_ranks(three: list[ToyRank]) -> None:
    async with sharded(three) as port:
        await port.connect()
        await port.receive()
        port.send(Audit(5))
        assert await port.receive() == AuditReply(5, 8, 8, 0)
        three[1].pages = 1
        port.send(Audit(6))
        with pytest.raises(WorkerLost, match="rank 1 holds other pages than the first rank"):
            await port.receive()


async def until(holds: Callable[[], object]) -> None:
    while True:
        if holds():
            return
        await asyncio.sleep(0.01)


async def cause(port: ShardedPort) -> str:
    """Why the link ends, after whatever comes before that."""
    try:
        while True:
            await port.receive()
    except WorkerLost as lost:
        return str(lost)


def fail_at(rank: ToyRank, error: Exception) -> None:
    def closes(_seq: int) -> None:
        raise error

    rank.closes = closes


async def test_a_rank_that_fails_is_named_even_if_others_complained_first(
    three: list[ToyRank],
) -> None:
    complained = asyncio.Event()
    loop = asyncio.get_running_loop()
    fail_at(three[0], GroupBroken("rank 1 is gone"))

    def fail_late(_seq: int) -> None:
        asyncio.run_coroutine_threadsafe(complained.wait(), loop).result(10)
        raise RuntimeError("planted")

    three[1].closes = fail_late
    async with sharded(three) as port:
        await port.connect()
        await port.receive()
        port.send(Close(1, 1))
        receiving = asyncio.create_task(port.receive())
        await until(lambda: port._links._complaint)
        complained.set()
        with pytest.raises(WorkerLost, match="rank 1: the engine failed: RuntimeError: planted"):
            await receiving


async def test_a_complaint_is_the_cause_where_nothing_else_is_heard(three: list[ToyRank]) -> None:
    fail_at(three[0], GroupBroken("rank 1 gave no sign for 5 s"))
    async with sharded(three) as port:
        await port.connect()
        await port.receive()
        port.send(Close(1, 1))
        with pytest.raises(WorkerLost, match="rank 0: the group broke: rank 1 gave no sign"):
            await port.receive()
        with pytest.raises(WorkerLost, match="rank 1 gave no sign"):
            await port.receive()
        three[0].closes = lambda _seq: None
        await port.connect()
        assert isinstance(await port.receive(), Hello)


async def test_a_rank_that_never_joins_is_named(three: list[ToyRank]) -> None:
    three[2].handle = lambda _message: []
    async with sharded(three, form_s=0.3) as port:
        with pytest.raises(WorkerLost, match=r"rank 2: no group within 0\.3 s"):
            await port.connect()
        with pytest.raises(WorkerLost, match="not connected"):
            await port.receive()


async def test_a_rank_that_cannot_be_reached_is_named(three: list[ToyRank]) -> None:
    broken = LocalPort("rank 1", lambda: 1 / 0, LinkLimits(connect_s=2.0))
    async with sharded(three) as port:
        port._ranks = [port._ranks[0], broken, port._ranks[2]]
        with pytest.raises(WorkerLost, match="rank 1: the engine is dead: ZeroDivisionError"):
            await port.connect()


async def test_another_rank_that_speaks_is_a_fault(three: list[ToyRank]) -> None:
    three[1].rank = 0
    async with sharded(three) as port:
        await port.connect()
        await port.receive()
        port.send(Close(1, 1))
        assert "rank 1 says Report" in await cause(port)


async def test_a_close_ends_a_pending_receive(three: list[ToyRank]) -> None:
    async with sharded(three) as port:
        await port.connect()
        await port.receive()
        receiving = asyncio.create_task(port.receive())
        await asyncio.sleep(0)
        await port.close()
        with pytest.raises(WorkerLost, match="closed by the orchestrator"):
            await receiving


async def test_ranks_over_streams(three: list[ToyRank]) -> None:
    async with streamed(lambda: three[0]) as one, streamed(lambda: three[1]) as two:
        port = ShardedPort("target", [one, two], FORM_S)
        await port.connect()
        assert isinstance(await port.receive(), Hello)
        assert three[1].joins[0].peers == ("127.0.0.1:4000", "127.0.0.1:4001")
        fail_at(three[1], RuntimeError("planted"))
        port.send(Close(1, 1))
        assert "toy: ABORTED: the engine failed: RuntimeError" in await cause(port)
        await port.close()
