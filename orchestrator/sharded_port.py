"""One WorkerPort over all ranks of a target: the same messages to each, the first one's answers.

Which rank was lost is told by its own end rather than by what the others say of it.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol, TypeVar

from orchestrator.ports import WorkerLost, WorkerPort
from protos.messages import Audit, AuditReply, Hello, Join, Joined, Message
from protos.worker import GROUP_BROKEN

# What the hellos of all ranks must agree in.
SAME = (
    "role",
    "model_hash",
    "vocab_hash",
    "vocab_size",
    "max_context",
    "page_size",
    "num_pages",
    "max_rows",
)
# A rank that complains of another is often heard before the other's own link ends.
SETTLE_S = 0.5
MAX_QUEUE = 4096
MAX_AUDITS = 16

T = TypeVar("T")


class RankPort(WorkerPort, Protocol):
    """A port that knows the host of its rank, where the other ranks reach it too."""

    host: str


class _Links:
    """The links to all ranks from one connect on, until the first of them ends."""

    def __init__(self, ranks: Sequence[RankPort]) -> None:
        self._ranks = ranks
        self._received: asyncio.Queue[Message | WorkerLost] = asyncio.Queue(MAX_QUEUE)
        self._joined: set[int] = set()
        self._formed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._audits: dict[int, dict[int, AuditReply]] = {}
        self._tasks = [asyncio.create_task(self._listen(i)) for i in range(len(ranks))]
        self._complaint = ""
        self._is_lost = False

    async def form(self, joins: Sequence[Join], timeout_s: float) -> None:
        """Until every rank has joined. Raises WorkerLost."""
        for rank, join in zip(self._ranks, joins, strict=True):
            rank.send(join)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._formed)
        except TimeoutError:
            missing = [r.name for i, r in enumerate(self._ranks) if i not in self._joined]
            raise WorkerLost(f"{', '.join(missing)}: no group within {timeout_s:g} s") from None

    def send(self, message: Message) -> None:
        if isinstance(message, Audit):
            self._audits[message.nonce] = {}
            while len(self._audits) > MAX_AUDITS:
                del self._audits[next(iter(self._audits))]
        for rank in self._ranks:
            rank.send(message)

    async def receive(self) -> Message:
        """The next message of the first rank. Raises WorkerLost."""
        item = await self._received.get()
        if isinstance(item, WorkerLost):
            self._received.put_nowait(item)
            raise item
        return item

    async def end(self) -> None:
        """Stop listening; a pending `receive` raises WorkerLost."""
        self._lose("closed by the orchestrator")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, index: int) -> None:
        rank = self._ranks[index]
        try:
            while not self._is_lost:
                self._heard(index, await rank.receive())
        except WorkerLost as lost:
            if GROUP_BROKEN not in str(lost):
                self._lose(str(lost))
            elif not self._complaint:
                self._complaint = str(lost)
                await asyncio.sleep(SETTLE_S)
                self._lose(self._complaint)
        except Exception as bug:
            self._lose(f"{rank.name}: {type(bug).__name__}: {bug}")
            raise

    def _heard(self, index: int, message: Message) -> None:
        rank = self._ranks[index]
        match message:
            case Joined():
                self._joined.add(index)
                if len(self._joined) == len(self._ranks) and not self._formed.done():
                    self._formed.set_result(None)
            case AuditReply():
                self._audited(index, message)
            case _ if index:
                self._lose(f"{rank.name} says {type(message).__name__}, which the first rank does")
            case _ if self._received.full():
                self._lose(f"{rank.name}: {MAX_QUEUE} messages wait")
            case _:
                self._received.put_nowait(message)

    def _audited(self, index: int, reply: AuditReply) -> None:
        """Pass the account on once every rank has given the same; their counters may differ."""
        replies = self._audits.setdefault(reply.nonce, {})
        replies[index] = reply
        if len(replies) < len(self._ranks):
            return
        del self._audits[reply.nonce]
        tables = {i: replace(each, counters=()) for i, each in replies.items()}
        other = next((i for i in sorted(tables) if tables[i] != tables[0]), 0)
        if other:
            self._lose(f"{self._ranks[other].name} holds other pages than the first rank")
        else:
            self._received.put_nowait(replies[0])

    def _lose(self, cause: str) -> None:
        """End it all for this cause, if it is the first."""
        if self._is_lost:
            return
        self._is_lost = True
        lost = WorkerLost(cause)
        if not self._formed.done():
            self._formed.set_exception(lost)
            self._formed.exception()  # Perhaps nobody waits for it.
        while self._received.full():
            self._received.get_nowait()
        self._received.put_nowait(lost)


class ShardedPort:
    """A WorkerPort whose worker is a group of ranks, formed anew at every connect.

    The group has `form_s` to form, longer than ranks wait for each other.
    """

    def __init__(self, name: str, ranks: Sequence[RankPort], form_s: float) -> None:
        self.name = name
        self._ranks = ranks
        self._form_s = form_s
        self._generation = 0
        self._hello: Hello | None = None
        self._links: _Links | None = None

    async def connect(self) -> None:
        """Open the links to all ranks and let them form a group. Raises WorkerLost."""
        await self.close()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            await _all(rank.connect() for rank in self._ranks)
            hellos = self._hellos(await _all(rank.receive() for rank in self._ranks))
            self._links = _Links(self._ranks)
            await self._links.form(self._joins(hellos), self._form_s)
            self._hello = _merged(hellos)
            stack.pop_all()

    def send(self, message: Message) -> None:
        """Queue a message for every rank. What goes wrong shows in `receive`."""
        if self._links is not None:
            self._links.send(message)

    async def receive(self) -> Message:
        """The next message of the first rank, Hello first. Raises WorkerLost naming the rank."""
        if self._links is None:
            raise WorkerLost(f"{self.name}: not connected")
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        return await self._links.receive()

    async def close(self) -> None:
        """End the links to all ranks; a pending `receive` raises WorkerLost."""
        links, self._links, self._hello = self._links, None, None
        if links is not None:
            await links.end()
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    def _hellos(self, messages: Sequence[Message]) -> list[Hello]:
        """Every rank's hello. Raises WorkerLost for one that does not fit the first rank's."""
        hellos = [message for message in messages if isinstance(message, Hello)]
        assert len(hellos) == len(self._ranks), "a port gives the Hello first"
        for rank, hello in zip(self._ranks, hellos, strict=True):
            for name in SAME:
                is_, first = getattr(hello, name), getattr(hellos[0], name)
                if is_ != first:
                    raise WorkerLost(
                        f"{rank.name} has {name} {is_!r}, the first rank {first!r}; "
                        "give every rank the same model and settings"
                    )
            if not hello.group_port:
                raise WorkerLost(f"{rank.name} is a target in one piece; set target.tp to 1")
        return hellos

    def _joins(self, hellos: Sequence[Hello]) -> list[Join]:
        """What each rank is told: who is where, and a key that nobody else has."""
        self._generation += 1
        key = secrets.token_hex(16)
        peers = tuple(
            f"{rank.host}:{hello.group_port}"
            for rank, hello in zip(self._ranks, hellos, strict=True)
        )
        return [Join(self._generation, i, peers, key) for i in range(len(self._ranks))]


def _merged(hellos: Sequence[Hello]) -> Hello:
    """One hello for all: another incarnation if that of any rank is another."""
    incarnation = hash(tuple(hello.incarnation for hello in hellos)) & (1 << 62) - 1
    return replace(hellos[0], incarnation=incarnation, group_port=0)


async def _all(works: Iterable[Awaitable[T]]) -> list[T]:
    """What all give, once all have ended. Raises what the first of those that fail raised."""
    results = await asyncio.gather(*works, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
