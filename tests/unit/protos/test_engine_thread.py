"""The engine's thread: order, bounds, and a named end of every link."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from protos.engine_thread import EngineThread, Link, LinkLimits
from protos.messages import Audit, AuditReply, Close, Grow, Hello, Message, Open
from protos.sampling import GREEDY
from protos.worker import GROUP_BROKEN, Engine, GroupBroken
from tests.fakes import BROKEN, WRONG, ToyEngine

WAIT_S = 5.0
LIMITS = LinkLimits(inbox=4, stop_s=WAIT_S)

Run = Callable[[Callable[[], Engine]], EngineThread]


@dataclass(slots=True)
class Ear:
    """One peer: what it was told, and why it ended."""

    said: SimpleQueue[Message] = field(default_factory=SimpleQueue)
    causes: SimpleQueue[str] = field(default_factory=SimpleQueue)

    def connect(self, engine: EngineThread) -> Link:
        return engine.connect(self._emit, self.causes.put)

    def _emit(self, batch: list[Message]) -> None:
        for message in batch:
            self.said.put(message)

    def hear(self) -> Message:
        return self.said.get(timeout=WAIT_S)

    def cause(self) -> str:
        return self.causes.get(timeout=WAIT_S)


class HeldEngine(ToyEngine):
    """A toy engine that stops inside `handle` until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.threads: set[int] = set()

    def handle(self, message: Message) -> list[Message]:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return super().handle(message)

    def reset(self) -> None:
        self.threads.add(threading.get_ident())
        super().reset()


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[EngineThread] = []

    def start(build: Callable[[], Engine]) -> EngineThread:
        started.append(EngineThread(build, LIMITS))
        return started[-1]

    yield start
    assert all(engine.stop() for engine in started)


def test_the_first_message_is_hello_and_answers_keep_the_order(run: Run) -> None:
    ear = Ear()
    link = ear.connect(run(ToyEngine))
    assert isinstance(ear.hear(), Hello)
    for nonce in range(100):
        link.send(Audit(nonce))
        assert ear.hear() == AuditReply(nonce, 8, 8, 0)


def test_work_goes_on_without_messages_until_there_is_none(run: Run) -> None:
    ear = Ear()
    link = ear.connect(run(ToyEngine))
    ear.hear()
    link.send(Open(1, 1, (5, 6), GREEDY, credit=3))
    grown = [ear.hear() for _ in range(3)]
    assert [m.nodes[0].id for m in grown if isinstance(m, Grow)] == [1, 2, 3]
    link.send(Audit(7))
    assert isinstance(ear.hear(), AuditReply)


def test_a_message_comes_before_further_work(run: Run) -> None:
    engine = HeldEngine()
    ear = Ear()
    link = ear.connect(run(lambda: engine))
    ear.hear()
    link.send(Open(1, 1, (5,), GREEDY, credit=9))
    assert engine.entered.wait(WAIT_S)
    link.send(Close(1, 1))
    link.send(Audit(1))
    engine.go_on.set()
    assert isinstance(ear.hear(), AuditReply), "no guess was grown before the Close was taken"


def test_a_full_inbox_ends_the_link_and_says_so(run: Run) -> None:
    engine = HeldEngine()
    ear = Ear()
    link = ear.connect(run(lambda: engine))
    ear.hear()
    link.send(Audit(0))
    assert engine.entered.wait(WAIT_S)
    for nonce in range(5):
        link.send(Audit(nonce))
    assert ear.cause() == "inbox full: 4 messages wait for the engine"
    engine.go_on.set()


def test_a_wrong_message_ends_the_link_with_its_cause(run: Run) -> None:
    ear = Ear()
    link = ear.connect(run(ToyEngine))
    link.send(Audit(WRONG))
    assert ear.cause() == "protocol error: planted: a wrong message"


def test_a_bug_ends_the_link_and_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    ear = Ear()
    link = ear.connect(run(ToyEngine))
    link.send(Audit(BROKEN))
    assert ear.cause() == "the engine failed: RuntimeError: planted: a bug"
    assert "planted: a bug" in caplog.text


def test_a_broken_group_ends_the_link_with_its_cause(run: Run) -> None:
    engine = ToyEngine()

    def handle(_message: Message) -> list[Message]:
        raise GroupBroken("rank 1 is gone")

    engine.handle = handle
    ear = Ear()
    link = ear.connect(run(lambda: engine))
    link.send(Audit(1))
    assert ear.cause() == f"{GROUP_BROKEN}rank 1 is gone"


def test_it_says_how_long_the_engine_has_been_at_a_piece_of_work(run: Run) -> None:
    engine = HeldEngine()
    thread = run(lambda: engine)
    ear = Ear()
    link = ear.connect(thread)
    ear.hear()
    assert thread.busy_s == 0.0
    link.send(Audit(1))
    assert engine.entered.wait(WAIT_S)
    first, second = thread.busy_s, thread.busy_s
    assert 0.0 < first <= second
    engine.go_on.set()
    ear.hear()
    assert thread.stop()
    assert thread.busy_s == 0.0


def test_the_next_link_finds_a_reset_engine(run: Run) -> None:
    engine = ToyEngine()
    thread = run(lambda: engine)
    first, second = Ear(), Ear()
    link = first.connect(thread)
    link.send(Open(1, 1, (5,), GREEDY, credit=0))
    link.send(Audit(WRONG))
    first.cause()
    link = second.connect(thread)
    assert isinstance(second.hear(), Hello)
    assert engine.resets == 1
    link.send(Audit(2))
    assert second.hear() == AuditReply(2, 8, 8, 0)


def test_a_newer_link_takes_over_and_hears_nothing_of_the_older(run: Run) -> None:
    engine = HeldEngine()
    thread = run(lambda: engine)
    old, new = Ear(), Ear()
    link = old.connect(thread)
    link.send(Audit(1))
    assert engine.entered.wait(WAIT_S)
    newer = new.connect(thread)
    assert old.cause() == "a newer link took over"
    link.send(Audit(2))
    newer.send(Audit(3))
    engine.go_on.set()
    assert isinstance(new.hear(), Hello)
    assert new.hear() == AuditReply(3, 8, 8, 0)
    assert engine.resets == 1


def test_a_link_that_ended_is_told_once(run: Run) -> None:
    ear = Ear()
    link = ear.connect(run(ToyEngine))
    link.end("first")
    link.end("second")
    assert ear.cause() == "first"
    assert ear.causes.empty()


def test_the_engine_lives_in_one_thread(run: Run) -> None:
    engine = HeldEngine()
    built_in: list[int] = []

    def build() -> Engine:
        built_in.append(threading.get_ident())
        return engine

    thread = run(build)
    engine.go_on.set()
    for _ in range(3):
        ear = Ear()
        ear.connect(thread).send(Audit(1))
        ear.hear()
        ear.hear()
    assert engine.threads == set(built_in)
    assert threading.get_ident() not in built_in


def test_stop_ends_the_link_and_the_thread() -> None:
    ear = Ear()
    thread = EngineThread(ToyEngine, LIMITS)
    ear.connect(thread)
    assert thread.stop()
    assert ear.cause() == "the worker was stopped"
    assert thread.finished.done()
    late = Ear()
    late.connect(thread)
    assert late.cause() == "the worker was stopped"


def test_stop_does_not_wait_longer_than_its_bound() -> None:
    engine = HeldEngine()
    ear = Ear()
    thread = EngineThread(lambda: engine, LinkLimits(stop_s=0.01))
    ear.connect(thread).send(Audit(1))
    assert engine.entered.wait(WAIT_S)
    assert not thread.stop()
    engine.go_on.set()
    assert thread.finished.result(WAIT_S) is None


def test_an_engine_that_cannot_be_built_tells_every_link() -> None:
    def build() -> Engine:
        raise ValueError("no such model")

    thread = EngineThread(build, LIMITS)
    with pytest.raises(ValueError, match="no such model"):
        thread.ready.result(WAIT_S)
    assert thread.finished.exception(WAIT_S) is not None
    ear = Ear()
    ear.connect(thread)
    assert ear.cause() == "the engine is dead: ValueError: no such model"


def test_an_engine_that_cannot_be_reset_is_dead() -> None:
    class Stuck(ToyEngine):
        def reset(self) -> None:
            raise RuntimeError("planted")

    thread = EngineThread(Stuck, LIMITS)
    first = Ear()
    link = first.connect(thread)
    first.hear()
    link.end("over")
    assert isinstance(thread.finished.exception(WAIT_S), RuntimeError)
    ear = Ear()
    ear.connect(thread)
    assert ear.cause() == "the engine is dead: RuntimeError: planted"


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LinkLimits(inbox=0)
