"""The shell around the core: links become events, commands become messages and updates.

Everything runs on one event loop; the core is called directly and never awaits.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.core import Core
from orchestrator.events import (
    Cancelled,
    Command,
    DrafterLost,
    DrafterSaid,
    Draining,
    DropDrafter,
    DropTarget,
    Event,
    Round,
    Submitted,
    TargetLost,
    TargetSaid,
    Tell,
    Ticked,
    ToDrafterWorker,
    ToTargetWorker,
    WakeAt,
)
from orchestrator.mailbox import Mailbox
from orchestrator.ports import WorkerLost, WorkerPort
from orchestrator.request import Finished, Refusal, Refused, Request, Update
from protos.messages import Audit, AuditReply, Hello, Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Times in seconds. `rounds` is how many rounds the trace remembers."""

    tick_s: float = 0.25
    retry_s: float = 0.5
    audit_s: float = 5.0
    rounds: int = 4096


class _Link:
    """One worker's port, and the events that what it says becomes."""

    def __init__(
        self,
        port: WorkerPort,
        said: Callable[[float, Message], Event],
        lost: Callable[[float, str], Event],
    ) -> None:
        self.port = port
        self.said = said
        self.lost = lost
        self.is_up = False


class Runtime:
    """Serves generations with a core and the ports to its workers."""

    def __init__(
        self,
        core: Core,
        targets: Sequence[WorkerPort],
        drafters: Sequence[WorkerPort],
        config: RuntimeConfig | None = None,
    ) -> None:
        self.core = core
        self.rounds: deque[Round] = deque(maxlen=(config or RuntimeConfig()).rounds)
        self._config = config or RuntimeConfig()
        self._targets = [
            _Link(p, partial(_target_said, i), partial(_target_lost, i))
            for i, p in enumerate(targets)
        ]
        self._drafters = [
            _Link(p, partial(_drafter_said, i), partial(_drafter_lost, i))
            for i, p in enumerate(drafters)
        ]
        self._mailboxes: dict[str, Mailbox] = {}
        self._audits: dict[tuple[str, int], asyncio.Future[AuditReply]] = {}
        self._nonce = 0
        self._wake: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Begin connecting to every worker; `wait_ready` tells when a target is there."""
        links = [*self._targets, *self._drafters]
        self._tasks = [asyncio.create_task(self._keep(link)) for link in links]
        self._tasks.append(asyncio.create_task(self._tick()))

    async def wait_ready(self, timeout_s: float) -> None:
        """Until every worker has said hello. Raises TimeoutError naming those that have not."""
        links = [*self._targets, *self._drafters]
        try:
            async with asyncio.timeout(timeout_s):
                while not all(link.is_up for link in links):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = ", ".join(link.port.name for link in links if not link.is_up)
            raise TimeoutError(f"not connected after {timeout_s:.0f} s: {missing}") from None

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the running ones have ended, or the time is up."""
        self.dispatch(Draining(self._now()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._mailboxes:
                    self._changed.clear()
                    await self._changed.wait()

    async def stop(self) -> None:
        """End every link and task; requests still running are told they were cut off."""
        for request_id in [*self._mailboxes]:
            self.dispatch(Cancelled(self._now(), request_id))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._wake is not None:
            self._wake.cancel()
        for link in [*self._targets, *self._drafters]:
            await link.port.close()

    @property
    def has_target(self) -> bool:
        """True while at least one target is connected."""
        return any(link.is_up for link in self._targets)

    @property
    def has_drafter(self) -> bool:
        return any(link.is_up for link in self._drafters)

    # Requests

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        """Serve a request. The last update is Finished or Refused; closing the iterator cancels."""
        if request.request_id in self._mailboxes:
            yield Refused(Refusal.DUPLICATE, f"request {request.request_id!r} is being served")
            return
        mailbox = self._mailboxes[request.request_id] = Mailbox()
        try:
            self.dispatch(Submitted(self._now(), request))
            while True:
                update = await mailbox.get()
                yield update
                if isinstance(update, Finished | Refused):
                    return
        finally:
            self.dispatch(Cancelled(self._now(), request.request_id))
            del self._mailboxes[request.request_id]
            self._changed.set()

    async def audit(self) -> dict[str, AuditReply]:
        """Every connected worker's account of its memory, by name."""
        self._nonce += 1
        replies = {}
        for link in [*self._targets, *self._drafters]:
            if link.is_up:
                key = (link.port.name, self._nonce)
                self._audits[key] = asyncio.get_running_loop().create_future()
                link.port.send(Audit(self._nonce))
                replies[link.port.name] = key
        try:
            async with asyncio.timeout(self._config.audit_s):
                return {name: await self._audits[key] for name, key in replies.items()}
        finally:
            for key in replies.values():
                self._audits.pop(key, None)

    # The loop

    def dispatch(self, event: Event) -> None:
        """Hand one event to the core and carry out its commands."""
        for command in self.core.handle(event):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToTargetWorker(index, message):
                self._targets[index].port.send(message)
            case ToDrafterWorker(index, message):
                self._drafters[index].port.send(message)
            case Tell(request_id, update):
                if request_id in self._mailboxes:
                    self._mailboxes[request_id].put(update)
            case Round():
                self.rounds.append(command)
            case WakeAt(at):
                self._wake_at(at)
            case DropTarget(index, cause):
                self._drop(self._targets[index], cause)
            case DropDrafter(index, cause):
                self._drop(self._drafters[index], cause)

    def _wake_at(self, at: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        loop = asyncio.get_running_loop()
        self._wake = loop.call_at(at, lambda: self.dispatch(Ticked(self._now())))

    def _drop(self, link: _Link, cause: str) -> None:
        log.error("closing the link to %s: %s", link.port.name, cause)
        self._tasks.append(asyncio.create_task(link.port.close()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            self.dispatch(Ticked(self._now()))

    async def _keep(self, link: _Link) -> None:
        """Connect, listen until the link ends, and again."""
        while True:
            try:
                await link.port.connect()
                while True:
                    self._heard(link, await link.port.receive())
            except WorkerLost as lost:
                self._ended(link, str(lost))
            await asyncio.sleep(self._config.retry_s)

    def _heard(self, link: _Link, message: Message) -> None:
        if isinstance(message, AuditReply):
            waiting = self._audits.get((link.port.name, message.nonce))
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            return
        if isinstance(message, Hello):
            log.info("connected to %s", link.port.name)
            link.is_up = True
            self._changed.set()
        self.dispatch(link.said(self._now(), message))

    def _ended(self, link: _Link, cause: str) -> None:
        if link.is_up:
            log.warning("lost %s: %s", link.port.name, cause)
            link.is_up = False
            self.dispatch(link.lost(self._now(), cause))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _target_said(index: int, now: float, message: Message) -> Event:
    return TargetSaid(now, index, message)  # type: ignore[arg-type]


def _target_lost(index: int, now: float, cause: str) -> Event:
    return TargetLost(now, index, cause)


def _drafter_said(index: int, now: float, message: Message) -> Event:
    return DrafterSaid(now, index, message)  # type: ignore[arg-type]


def _drafter_lost(index: int, now: float, cause: str) -> Event:
    return DrafterLost(now, index, cause)
