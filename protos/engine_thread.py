"""One thread per engine: built, called and reset there only, and serving one link at a time.

Messages are taken in order and before own work; every way a link can end has a named cause.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from protos.messages import Message
from protos.worker import GROUP_BROKEN, Engine, GroupBroken, ProtocolError

log = logging.getLogger(__name__)

Emit = Callable[[list[Message]], None]
Ended = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of a link. `inbox` and `outbox` count messages; a full one ends the link.

    A silent peer is noticed within twice `keepalive_s` (and not before a second is over);
    `stop_s` bounds the wait for a running piece of work when an engine is stopped.
    """

    inbox: int = 4096
    outbox: int = 4096
    connect_s: float = 5.0
    keepalive_s: float = 2.0
    stop_s: float = 5.0

    def __post_init__(self) -> None:
        smallest = min(self.inbox, self.outbox, self.connect_s, self.keepalive_s, self.stop_s)
        if smallest <= 0:
            raise ValueError(f"every limit of a link must be positive: {self}")


class Link:
    """One peer's turn with the engine. `ended` hears the cause once; later messages are dropped."""

    def __init__(self, owner: "EngineThread", emit: Emit, ended: Ended) -> None:
        self._owner = owner
        self.emit = emit
        self.ended = ended

    def send(self, message: Message) -> None:
        """Queue a message for the engine; a full inbox ends the link."""
        self._owner.accept(self, message)

    def end(self, cause: str) -> None:
        """End the link; the engine is reset in its own thread."""
        self._owner.release(self, cause)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the thread does next: one message of `link`, or a piece of own work if there is none."""

    link: Link | None
    message: Message | None


class EngineThread:
    """Runs one engine. `ready` resolves once it is built, `finished` when the thread ends.

    `finished` carries an exception if the engine can never serve again: it could not be built,
    or not be reset. `nice` lowers the thread's priority (Linux).
    """

    def __init__(self, build: Callable[[], Engine], limits: LinkLimits, nice: int = 0) -> None:
        self._build = build
        self._limits = limits
        self._nice = nice
        self._wake = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._link: Link | None = None
        self._closed = ""
        self._since: float | None = None
        self.ready: Future[None] = Future()
        self.finished: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def connect(self, emit: Emit, ended: Ended) -> Link:
        """Begin a link: its Hello is emitted once the engine is free. An older link ends first.

        `emit` and `ended` are called from any thread and must not block.
        """
        link = Link(self, emit, ended)
        with self._wake:
            closed = self._closed
            old = self._replace(None if closed else link)
        if old is not None:
            old.ended("a newer link took over")
        if closed:
            ended(closed)
        return link

    def accept(self, link: Link, message: Message) -> None:
        """Queue a message of `link`; used by Link."""
        with self._wake:
            if link is not self._link:
                return
            if len(self._inbox) < self._limits.inbox:
                self._inbox.append(message)
                self._wake.notify()
                return
        link.end(f"inbox full: {self._limits.inbox} messages wait for the engine")

    def release(self, link: Link, cause: str) -> None:
        """End `link` if it is the current one; used by Link."""
        with self._wake:
            if link is not self._link:
                return
            self._replace(None)
        link.ended(cause)

    @property
    def busy_s(self) -> float:
        """How long the present piece of work has run; 0 between pieces."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def closed(self) -> bool:
        """True once no link can begin: the engine was stopped or is dead."""
        return self._closed != ""

    def stop(self) -> bool:
        """End the link and the thread; False if work still runs after `stop_s`."""
        self._close("the worker was stopped")
        self._thread.join(self._limits.stop_s)
        return not self._thread.is_alive()

    def _replace(self, link: Link | None) -> Link | None:
        """Under the lock: make `link` the current one and return the one before."""
        old, self._link = self._link, link
        self._inbox.clear()
        self._wake.notify()
        return old

    def _close(self, cause: str) -> None:
        with self._wake:
            self._closed = self._closed or cause
            link = self._replace(None)
        if link is not None:
            link.ended(cause)

    def _run(self) -> None:
        if self._nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        try:
            engine = self._build()
            self.ready.set_result(None)
            self._serve(engine)
        except Exception as error:
            log.exception("the engine cannot serve any more")
            self._close(f"the engine is dead: {_name(error)}")
            self.finished.set_exception(error)
            if not self.ready.done():
                self.ready.set_exception(error)
        else:
            self.finished.set_result(None)

    def _serve(self, engine: Engine) -> None:
        served: Link | None = None
        idle = True
        while (turn := self._next(served, idle)) is not None:
            if turn.link is not served and served is not None:
                engine.reset()
            fresh = turn.link is not served
            served = turn.link
            idle = served is None or self._take(engine, served, turn, fresh)

    def _next(self, served: Link | None, idle: bool) -> _Turn | None:
        """The next turn; waits for one only if the engine is idle. None when stopped."""
        with self._wake:
            while idle and not self._closed and self._link is served and not self._inbox:
                self._wake.wait()
            if self._closed:
                return None
            return _Turn(self._link, self._inbox.popleft() if self._inbox else None)

    def _take(self, engine: Engine, link: Link, turn: _Turn, fresh: bool) -> bool:
        """One turn of `link`; True if the engine has no work of its own."""
        self._since = time.monotonic()
        try:
            if fresh:
                link.emit([engine.hello()])
            message = turn.message
            answers = engine.work() if message is None else engine.handle(message)
            if answers:
                link.emit(answers)
            return answers is None
        except ProtocolError as error:
            link.end(f"protocol error: {error}")
        except GroupBroken as error:
            log.error("%s%s", GROUP_BROKEN, error)
            link.end(f"{GROUP_BROKEN}{error}")
        except Exception as error:
            log.exception("the engine failed; its link ends")
            link.end(f"the engine failed: {_name(error)}")
        finally:
            self._since = None
        return True


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
