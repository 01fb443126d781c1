"""Stand-ins for what the orchestrator talks to: a toy engine, a link that misbehaves by plan."""

import asyncio
from dataclasses import dataclass, field
from heapq import heappop, heappush

from orchestrator.ports import WorkerLost, WorkerPort
from protos.messages import PROTOCOL, Audit, AuditReply, Close, Grow, Guess, Hello, Message, Open
from protos.worker import Engine, ProtocolError
from tests.faults import Direction, Lane, Plan, calm

WRONG, BROKEN = -1, -2
"""Nonces of an Audit at which the toy engine raises: as for a wrong message, as for a bug."""


class ToyEngine:
    """Answers an Audit with its nonce, and grows a chain of `credit` guesses a piece at a time."""

    def __init__(self, incarnation: int = 1, protocol: int = PROTOCOL) -> None:
        self.said = Hello(protocol, "toy", incarnation, "model", "vocab", 16, 64, 16, 8, 4)
        self._open: dict[int, Open] = {}
        self._grown: dict[int, int] = {}
        self.resets = 0

    def hello(self) -> Hello:
        return self.said

    def handle(self, message: Message) -> list[Message]:
        if isinstance(message, Audit):
            return [self._audit(message.nonce)]
        if isinstance(message, Open):
            self._open[message.seq] = message
            self._grown[message.seq] = 0
        elif isinstance(message, Close):
            del self._open[message.seq], self._grown[message.seq]
        return []

    def work(self) -> list[Message] | None:
        for seq, opened in self._open.items():
            grown = self._grown[seq]
            if grown < opened.credit:
                self._grown[seq] = grown + 1
                guess = Guess(grown + 1, grown, grown % 16, -0.5)
                return [Grow(seq, opened.opening, len(opened.tokens), (guess,))]
        return None

    def reset(self) -> None:
        self.resets += 1
        self._open.clear()
        self._grown.clear()

    def _audit(self, nonce: int) -> AuditReply:
        if nonce == WRONG:
            raise ProtocolError("planted: a wrong message")
        if nonce == BROKEN:
            raise RuntimeError("planted: a bug")
        return AuditReply(nonce, 8, 8 - len(self._open), 0)


def toy_engine(**options: int) -> Engine:
    """The builder an actor finds by its import path."""
    return ToyEngine(**options)


@dataclass(slots=True)
class _Timed:
    """A queue whose items can be taken once they are due, in order of time, then of arrival."""

    heap: list[tuple[float, int, Message]] = field(default_factory=list)
    count: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, due: float, message: Message) -> None:
        heappush(self.heap, (due, self.count, message))
        self.count += 1
        self.changed.set()

    async def get(self) -> Message:
        loop = asyncio.get_running_loop()
        while True:
            self.changed.clear()
            wait_s = self.heap[0][0] - loop.time() if self.heap else None
            if wait_s is not None and wait_s <= 0:
                return heappop(self.heap)[2]
            try:
                await asyncio.wait_for(self.changed.wait(), wait_s)
            except TimeoutError:
                continue


class FaultLink:
    """A WorkerPort around another whose messages meet the plan's fates, in real time."""

    def __init__(self, port: WorkerPort, plan: Plan = calm) -> None:
        self.name = port.name
        self._port = port
        self._plan = plan
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        await self.close()
        await self._port.connect()
        self._cause: str | None = None
        self._lanes = {way: Lane(way, self._plan) for way in ("out", "in")}
        self._queues = {way: _Timed() for way in ("out", "in")}
        self._tasks = [asyncio.create_task(run()) for run in (self._pump_in, self._pump_out)]

    def send(self, message: Message) -> None:
        self._post("out", message)

    async def receive(self) -> Message:
        arriving = asyncio.ensure_future(self._queues["in"].get())
        done, _ = await asyncio.wait({arriving, *self._tasks}, return_when="FIRST_COMPLETED")
        if arriving in done and self._cause is None:
            return arriving.result()
        arriving.cancel()
        raise WorkerLost(f"{self.name}: {self._cause}")

    async def close(self) -> None:
        self.cut("closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._port.close()

    def cut(self, cause: str = "cut") -> None:
        """End the link as a broken cable does: what is on its way is lost."""
        self._cause = cause
        for task in self._tasks:
            task.cancel()

    def stall(self, direction: Direction, seconds: float) -> None:
        """Hold everything sent in one direction from now on."""
        self._lanes[direction].stall(asyncio.get_running_loop().time() + seconds)

    def _post(self, direction: Direction, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        arrivals = self._lanes[direction].arrivals(now, message)
        if arrivals is None:
            self.cut()
        for due in arrivals or ():
            self._queues[direction].put(due, message)

    async def _pump_in(self) -> None:
        try:
            while True:
                self._post("in", await self._port.receive())
        except WorkerLost as error:
            self._cause = str(error)

    async def _pump_out(self) -> None:
        while True:
            self._port.send(await self._queues["out"].get())
