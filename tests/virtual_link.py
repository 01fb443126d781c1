"""A link between a core and an engine in virtual time, with faults by plan: no threads, no loop."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from protos.codec import decode, encode
from protos.messages import Message
from protos.worker import Engine, ProtocolError
from tests.faults import Direction, Lane, Plan, calm


class Clock(Protocol):
    """Virtual time: calls of the same time run in the order they were asked for."""

    def now(self) -> float: ...

    def call_at(self, time: float, call: Callable[[], None]) -> None: ...


class Peer(Protocol):
    """The orchestrator's end of a virtual link."""

    def arrived(self, message: Message) -> None: ...

    def lost(self, cause: str) -> None: ...


Duration = Callable[[Message | None, list[Message]], float]


@dataclass(frozen=True, slots=True)
class Weather:
    """How a virtual link behaves: faults by plan, and how long each piece of work takes.

    `duration` gets the message that was handled (None: own work) and the answers.
    """

    plan: Plan = calm
    duration: Duration = lambda _message, _answers: 0.0


class VirtualLink:
    """A core's link to a real engine in virtual time, without threads; messages pass as bytes.

    As in the engine's thread, work is done a piece at a time, and messages come before own work.
    """

    def __init__(self, engine: Engine, clock: Clock, peer: Peer, weather: Weather) -> None:
        self._engine = engine
        self._clock = clock
        self._peer = peer
        self._weather = weather
        self._life = 0
        self._up = False

    def connect(self) -> None:
        """Open the link; the Hello arrives like any message."""
        assert not self._up, "connected already"
        self._up = True
        self._busy = False
        self._inbox: deque[Message] = deque()
        self._lanes = {way: Lane(way, self._weather.plan) for way in ("out", "in")}
        self._carry("in", self._engine.hello(), self._peer.arrived)

    def send(self, message: Message) -> None:
        """To the engine; dropped if the link is down."""
        if self._up:
            self._carry("out", message, self._take)

    def cut(self, cause: str = "cut", notice_s: float = 0.0) -> None:
        """End the link: the engine is reset, and the core hears of it `notice_s` later."""
        if not self._up:
            return
        self._up = False
        self._life += 1
        self._engine.reset()
        self._later(notice_s, partial(self._peer.lost, cause))

    def stall(self, direction: Direction, seconds: float) -> None:
        """Hold everything sent in one direction from now on."""
        self._lanes[direction].stall(self._clock.now() + seconds)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._at(self._clock.now() + delay_s, call)

    def _at(self, time: float, call: Callable[[], None]) -> None:
        """Call unless the link has ended since."""
        life = self._life
        self._clock.call_at(time, lambda: call() if life == self._life else None)

    def _carry(self, way: Direction, message: Message, arrive: Callable[[Message], None]) -> None:
        frame = encode(message)
        arrivals = self._lanes[way].arrivals(self._clock.now(), message)
        if arrivals is None:
            self.cut()
        for due in arrivals or ():
            self._at(due, lambda: arrive(decode(frame)))

    def _take(self, message: Message) -> None:
        self._inbox.append(message)
        if not self._busy:
            self._turn()

    def _turn(self) -> None:
        """One message or one piece of work; its answers leave when its time is over."""
        message = self._inbox.popleft() if self._inbox else None
        try:
            answers = self._engine.work() if message is None else self._engine.handle(message)
        except ProtocolError as error:
            self.cut(f"protocol error: {error}")
            return
        self._busy = answers is not None
        if answers is not None:
            self._later(self._weather.duration(message, answers), partial(self._emit, answers))

    def _emit(self, answers: list[Message]) -> None:
        for answer in answers:
            if self._up:
                self._carry("in", answer, self._peer.arrived)
        if self._up:
            self._turn()
