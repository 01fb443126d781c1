"""The shell around the core: links become events, commands become messages and updates.

Everything runs on one event loop; the core is called directly and never awaited. A bug anywhere
in it ends all of it: every client is told, and `failed` says why.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.core import Core
from orchestrator.events import (
    Cancelled,
    Command,
    Draining,
    DropDrafter,
    DropTarget,
    Event,
    Round,
    Submitted,
    Tell,
    Ticked,
    ToDrafterWorker,
    ToTargetWorker,
    WakeAt,
)
from orchestrator.mailbox import Mailbox
from orchestrator.ports import WorkerLost, WorkerPort
from orchestrator.request import Finished, FinishReason, Refusal, Refused, Request, Stats, Update
from orchestrator.roster import Link, Roster
from protos.messages import Audit, AuditReply, Hello, Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Times in seconds. `rounds` is how many rounds the trace remembers."""

    tick_s: float = 0.25
    retry_s: float = 0.5
    audit_s: float = 5.0
    rounds: int = 4096


class RuntimeFailed(Exception):
    """A bug ended the orchestrator; its cause is the exception that was met."""


class Runtime:
    """Serves generations with a core and the ports to its workers."""

    def __init__(
        self,
        core: Core,
        targets: Sequence[WorkerPort],
        drafters: Sequence[WorkerPort],
        config: RuntimeConfig = RuntimeConfig(),
    ) -> None:
        self.core = core
        self.rounds: deque[Round] = deque(maxlen=config.rounds)
        self._config = config
        self._roster = Roster(targets, drafters)
        self._mailboxes: dict[str, Mailbox] = {}
        self._audits: dict[tuple[str, int], asyncio.Future[AuditReply]] = {}
        self._nonce = 0
        self._wake: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    # Life

    async def start(self) -> None:
        """Begin connecting to every worker; `wait_ready` tells when a target is there."""
        for link in self._roster.all:
            self._spawn(self._keep(link))
        self._spawn(self._tick())

    async def wait_ready(self, timeout_s: float, *, optional: Collection[str] = ()) -> None:
        """Until every worker but those named `optional` has said hello.

        Raises TimeoutError naming those that have not, and RuntimeFailed.
        """
        needed = [link for link in self._roster.all if link.name not in optional]
        try:
            async with asyncio.timeout(timeout_s):
                while not all(link.is_up for link in needed):
                    await self._change()
        except TimeoutError:
            missing = ", ".join(f"{i.name} ({i.trouble})" for i in needed if not i.is_up)
            raise TimeoutError(f"not connected after {timeout_s:g} s: {missing}") from None

    async def failed(self) -> None:
        """Until a bug has ended the orchestrator: raises RuntimeFailed, never returns."""
        while True:
            await self._change()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the running ones; when time is up, cut them off."""
        self.dispatch(Draining(self._now()))
        with suppress(TimeoutError, RuntimeFailed):
            async with asyncio.timeout(timeout_s):
                while self._mailboxes:
                    await self._change()
        for mailbox in self._mailboxes.values():
            mailbox.cut_off()

    async def stop(self) -> None:
        """End every link and task; requests still running are told they were cut off."""
        for request_id in [*self._mailboxes]:
            self.dispatch(Cancelled(self._now(), request_id))
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._wake is not None:
            self._wake.cancel()
        for link in self._roster.all:
            await link.port.close()

    @property
    def up(self) -> frozenset[str]:
        """The names of the workers that are connected; none after a failure."""
        if self._failure is not None:
            return frozenset()
        return frozenset(link.name for link in self._roster.all if link.is_up)

    @property
    def has_target(self) -> bool:
        """True while at least one target is connected."""
        return any(link.name in self.up for link in self._roster.targets)

    @property
    def has_drafter(self) -> bool:
        return any(link.name in self.up for link in self._roster.drafters)

    # Requests

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        """Serve a request. The last update is Finished or Refused; closing the iterator cancels."""
        if request.request_id in self._mailboxes:
            yield Refused(Refusal.DUPLICATE, f"request {request.request_id!r} is being served")
            return
        if self._failure is not None:
            yield Refused(Refusal.NO_TARGET, "the server has failed and ends", self._config.retry_s)
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

    async def audit(self) -> dict[str, AuditReply | None]:
        """Every connected worker's account of its memory, by name; None if it gave none in time."""
        self._nonce += 1
        asked: dict[tuple[str, int], asyncio.Future[AuditReply]] = {}
        for link in self._roster.all:
            if link.is_up:
                asked[link.name, self._nonce] = asyncio.get_running_loop().create_future()
                link.port.send(Audit(self._nonce))
        self._audits |= asked
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=self._config.audit_s)
        finally:
            self._audits = {key: it for key, it in self._audits.items() if key not in asked}
        return {key[0]: it.result() if it.done() else None for key, it in asked.items()}

    # The loop

    def dispatch(self, event: Event) -> None:
        """Hand one event to the core and carry out its commands; after a failure, nothing."""
        if self._failure is not None:
            return
        try:
            for command in self.core.handle(event):
                self._carry_out(command)
        except Exception as bug:
            self._fail(bug)
            raise

    def _carry_out(self, command: Command) -> None:
        match command:
            case ToTargetWorker(index, message):
                self._roster.targets[index].port.send(message)
            case ToDrafterWorker(index, message):
                self._roster.drafters[index].port.send(message)
            case Tell(request_id, update):
                if request_id in self._mailboxes:
                    self._mailboxes[request_id].put(update)
            case Round():
                self.rounds.append(command)
            case WakeAt(at):
                self._wake_at(at)
            case DropTarget(index, cause):
                self._drop(self._roster.targets[index], cause)
            case DropDrafter(index, cause):
                self._drop(self._roster.drafters[index], cause)

    def _wake_at(self, at: float) -> None:
        """Tick at this time, and at an earlier one that was asked for before."""
        if self._wake is not None:
            if self._wake.when() <= at:
                return
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_at(at, self._awake)

    def _awake(self) -> None:
        self._wake = None
        self.dispatch(Ticked(self._now()))

    def _drop(self, link: Link, cause: str) -> None:
        log.error("closing the link to %s: %s", link.name, cause)
        self._spawn(link.port.close())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            self.dispatch(Ticked(self._now()))

    async def _keep(self, link: Link) -> None:
        """Connect, listen until the link ends, and again."""
        while True:
            try:
                await link.port.connect()
                while True:
                    self._heard(link, await link.port.receive())
            except WorkerLost as lost:
                self._ended(link, str(lost))
            await asyncio.sleep(self._config.retry_s)

    def _heard(self, link: Link, message: Message) -> None:
        if isinstance(message, AuditReply):
            waiting = self._audits.get((link.name, message.nonce))
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            return
        if isinstance(message, Hello):
            self._greet(link, message)
        self.dispatch(link.said(self._now(), message))

    def _greet(self, link: Link, hello: Hello) -> None:
        """A worker said hello. Raises WorkerLost if it is none this service can go on with."""
        for other in self._roster.greet(link, hello):
            self._drop(other, "it has another tokenizer than the target")
        log.info("connected to %s", link.name)
        self._changed.set()

    def _ended(self, link: Link, cause: str) -> None:
        if link.is_up or link.trouble != cause:
            log.warning("no link to %s: %s", link.name, cause)
        link.trouble = cause
        if link.is_up:
            link.is_up = False
            self.dispatch(link.lost(self._now(), cause))

    # Failure

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._fail(bug)

    def _fail(self, bug: BaseException) -> None:
        """What was believed does not hold: nothing more is served."""
        if self._failure is not None:
            return
        log.critical("a bug ends the orchestrator", exc_info=bug)
        self._failure = bug
        for mailbox in self._mailboxes.values():
            mailbox.put(Finished(FinishReason.ERROR, Stats(), "the server has failed"))
        self._changed.set()

    async def _change(self) -> None:
        """Until something has changed. Raises RuntimeFailed."""
        if self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            bug = self._failure
            raise RuntimeFailed(f"{type(bug).__name__}: {bug}") from bug

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
