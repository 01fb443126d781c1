"""The simulation's link: order, durations, faults and ends, all in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest

from protos.messages import Audit, AuditReply, Close, Grow, Hello, Message, Open
from protos.sampling import GREEDY
from tests.fakes import WRONG, ToyEngine
from tests.faults import Direction, Fate, calm, scripted, seeded
from tests.virtual_link import VirtualLink, Weather


@dataclass(slots=True)
class FakeClock:
    """Virtual time that runs until nothing is left to call."""

    time: float = 0.0
    calls: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0

    def now(self) -> float:
        return self.time

    def call_at(self, time: float, call: Callable[[], None]) -> None:
        heappush(self.calls, (time, self.count, call))
        self.count += 1

    def run(self) -> None:
        while self.calls:
            self.time, _, call = heappop(self.calls)
            call()


@dataclass(slots=True)
class Ear:
    """What the core's end heard, and when."""

    clock: FakeClock
    heard: list[tuple[float, Message]] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    def arrived(self, message: Message) -> None:
        self.heard.append((self.clock.time, message))

    def lost(self, cause: str) -> None:
        self.causes.append(cause)


def linked(
    weather: Weather | None = None, engine: ToyEngine | None = None
) -> tuple[FakeClock, Ear, VirtualLink]:
    clock = FakeClock()
    ear = Ear(clock)
    link = VirtualLink(engine or ToyEngine(), clock, ear, weather or Weather())
    link.connect()
    return clock, ear, link


def test_hello_first_then_answers_in_order_at_once() -> None:
    clock, ear, link = linked()
    for nonce in range(3):
        link.send(Audit(nonce))
    clock.run()
    assert isinstance(ear.heard[0][1], Hello)
    assert [m for _, m in ear.heard[1:]] == [AuditReply(n, 8, 8, 0) for n in range(3)]
    assert clock.time == 0.0


def test_work_takes_its_time_and_messages_come_before_it() -> None:
    def duration(message: Message | None, _answers: list[Message]) -> float:
        return 1.0 if message is None else 0.0

    clock, ear, link = linked(Weather(calm, duration))
    link.send(Open(1, 1, (5,), GREEDY, credit=9))
    clock.call_at(2.5, lambda: link.send(Close(1, 1)))
    clock.run()
    assert [time for time, message in ear.heard if isinstance(message, Grow)] == [1.0, 2.0, 3.0]


def test_a_delayed_message_is_overtaken_by_other_sequences_only() -> None:
    clock, ear, link = linked(Weather(scripted({("out", 0): Fate(delay_s=1.0)})))
    link.send(Open(1, 1, (5,), GREEDY, 1))
    link.send(Open(2, 1, (5,), GREEDY, 1))
    link.send(Close(1, 1))
    clock.run()
    grown = [(time, m.seq) for time, m in ear.heard if isinstance(m, Grow)]
    assert grown == [(0.0, 2)], "the Close of sequence 1 came after its late Open, before any work"
    assert clock.time == 1.0


def test_a_message_of_no_sequence_keeps_its_place_among_all() -> None:
    clock, ear, link = linked(Weather(scripted({("out", 0): Fate(delay_s=1.0)})))
    link.send(Open(1, 1, (5,), GREEDY, 0))
    link.send(Audit(1))
    clock.run()
    assert ear.heard[-1] == (1.0, AuditReply(1, 8, 7, 0))


def test_a_stall_holds_one_direction() -> None:
    clock, ear, link = linked()
    link.stall("in", 0.5)
    link.send(Audit(1))
    link.send(Audit(2))
    clock.run()
    assert [time for time, _ in ear.heard] == [0.0, 0.5, 0.5]


def test_copies_arrive_again_and_no_copies_never() -> None:
    script: dict[tuple[Direction, int], Fate] = {
        ("in", 1): Fate(copies=2),
        ("in", 2): Fate(copies=0),
    }
    clock, ear, link = linked(Weather(scripted(script)))
    for nonce in range(3):
        link.send(Audit(nonce))
    clock.run()
    nonces = [m.nonce for _, m in ear.heard if isinstance(m, AuditReply)]
    assert nonces == [0, 0, 2]


def test_a_cut_loses_what_is_on_its_way_and_resets_the_engine() -> None:
    engine = ToyEngine()
    clock, ear, link = linked(Weather(lambda *_: Fate(delay_s=1.0)), engine)
    link.send(Audit(1))
    clock.call_at(1.5, lambda: link.cut("cable", notice_s=0.25))
    clock.run()
    assert [type(m) for _, m in ear.heard] == [Hello]
    assert ear.causes == ["cable"]
    assert engine.resets == 1
    link.send(Audit(2))
    link.connect()
    clock.run()
    assert [type(m) for _, m in ear.heard] == [Hello, Hello]


def test_a_fate_can_cut_the_link() -> None:
    clock, ear, link = linked(Weather(scripted({("in", 2): Fate(cut=True)})))
    for nonce in range(3):
        link.send(Audit(nonce))
    clock.run()
    assert ear.causes == ["cut"]
    assert ear.heard[-1][1] == AuditReply(0, 8, 8, 0)


def test_a_protocol_error_ends_the_link() -> None:
    clock, ear, link = linked()
    link.send(Audit(WRONG))
    clock.run()
    assert ear.causes == ["protocol error: planted: a wrong message"]


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_plays_the_same_faults(seed: int) -> None:
    def play() -> list[tuple[float, Message]]:
        plan = seeded(seed, max_delay_s=0.1, again=0.3, stall=0.1)
        clock, ear, link = linked(Weather(plan))
        for seq in range(1, 6):
            link.send(Open(seq, 1, (5,), GREEDY, 3))
        clock.run()
        return ear.heard

    first = play()
    assert first == play()
    assert first != [(0.0, message) for _, message in first]
