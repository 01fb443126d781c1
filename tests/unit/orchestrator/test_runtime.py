"""The shell around the core: links that end and return, bugs, timers, audits, drain and stop."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.events import DropDrafter, DropTarget, Event, Ticked, WakeAt
from orchestrator.k_policy import FixedK
from orchestrator.mailbox import Mailbox
from orchestrator.ports import WorkerLost
from orchestrator.request import Delta, Finished, FinishReason, Refused, Request, Stats, Update
from orchestrator.runtime import Runtime, RuntimeConfig, RuntimeFailed
from protos.messages import PROTOCOL, Audit, AuditReply, Hello, Message
from tests.simulation.scene import IdStopper

QUICK = RuntimeConfig(tick_s=0.01, retry_s=0.01, audit_s=0.05)
HELLO = Hello(PROTOCOL, "target", 1, "model", "vocab", 100, 256, 16, 64, 64)


class PlayPort:
    """A worker played by the test: it says hello at every connect, and what is put into `inbox`."""

    def __init__(self, name: str = "target", hello: Hello = HELLO) -> None:
        self.name = name
        self.hello = hello
        self.reachable = True
        self.answers_audits = True
        self.connects = 0
        self.closes = 0
        self.sent: list[Message] = []
        self.inbox: asyncio.Queue[Message | Exception] = asyncio.Queue()

    async def connect(self) -> None:
        self.connects += 1
        if not self.reachable:
            raise WorkerLost(f"{self.name}: not there")
        self.inbox = asyncio.Queue()
        self.inbox.put_nowait(self.hello)

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, Audit) and self.answers_audits:
            self.inbox.put_nowait(AuditReply(message.nonce, 64, 64, 0))

    async def receive(self) -> Message:
        heard = await self.inbox.get()
        if isinstance(heard, Exception):
            raise heard
        return heard

    async def close(self) -> None:
        self.closes += 1
        self.lose("closed")

    def lose(self, cause: str) -> None:
        self.inbox.put_nowait(WorkerLost(f"{self.name}: {cause}"))


def drafter(name: str = "drafter", vocab: str = "vocab") -> PlayPort:
    return PlayPort(name, dataclasses.replace(HELLO, role="drafter", vocab_hash=vocab))


@asynccontextmanager
async def running(target: PlayPort, *drafters: PlayPort, **core: int) -> AsyncIterator[Runtime]:
    runtime = Runtime(
        Core(CoreConfig(max_context=256, **core), FixedK(2), IdStopper), [target], drafters, QUICK
    )
    await runtime.start()
    try:
        async with asyncio.timeout(5):
            yield runtime
    finally:
        await runtime.stop()


async def until_up(runtime: Runtime, names: set[str]) -> None:
    while runtime.up != names:  # noqa: ASYNC110 - a loss is told to nobody
        await asyncio.sleep(0.005)


async def last(runtime: Runtime, request_id: str = "r") -> Update:
    return [each async for each in runtime.generate(Request(request_id, (1, 2), 4))][-1]


async def test_a_lost_worker_is_connected_again() -> None:
    port = PlayPort()
    async with running(port) as runtime:
        await runtime.wait_ready(1)
        port.reachable = False
        port.lose("cable cut")
        await until_up(runtime, set())
        assert not runtime.has_target
        port.reachable = True
        await until_up(runtime, {"target"})
        assert port.connects >= 2


async def test_waiting_names_who_is_missing_and_why() -> None:
    port, absent = PlayPort(), drafter()
    absent.reachable = False
    async with running(port, absent) as runtime:
        with pytest.raises(TimeoutError, match=r"not connected.*: drafter \(drafter: not there\)"):
            await runtime.wait_ready(0.1)
        await runtime.wait_ready(0.1, optional={"drafter"})


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_hash", "other"), ("vocab_hash", "other"), ("vocab_size", 99), ("page_size", 8)],
)
async def test_a_target_that_returns_with_another_model_is_refused(
    field: str, value: object
) -> None:
    port = PlayPort()
    async with running(port) as runtime:
        await runtime.wait_ready(1)
        port.hello = dataclasses.replace(HELLO, incarnation=2, **{field: value})
        port.lose("restarted")
        await until_up(runtime, set())
        with pytest.raises(TimeoutError, match=f"now has {field}"):
            await runtime.wait_ready(0.1)
        port.hello = dataclasses.replace(HELLO, incarnation=3)
        await runtime.wait_ready(1)


async def test_a_worker_of_the_wrong_role_is_refused() -> None:
    async with running(drafter("target")) as runtime:
        with pytest.raises(TimeoutError, match="is a drafter, not a target"):
            await runtime.wait_ready(0.1)


async def test_a_drafter_of_another_tokenizer_is_refused_whoever_comes_first() -> None:
    port, other = PlayPort(), drafter(vocab="other")
    port.reachable = False
    async with running(port, other) as runtime:
        await until_up(runtime, {"drafter"})
        port.reachable = True
        await until_up(runtime, {"target"})
        with pytest.raises(TimeoutError, match="has another tokenizer than the target"):
            await runtime.wait_ready(0.1)


class Buggy(Exception):
    pass


async def test_a_bug_in_the_core_ends_the_runtime_and_tells_every_client() -> None:
    async with running(PlayPort()) as runtime:
        await runtime.wait_ready(1)
        asking = asyncio.create_task(last(runtime))
        await asyncio.sleep(0)

        def broken(_event: Event) -> list[object]:
            raise Buggy("planted")

        runtime.core.handle = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(RuntimeFailed, match="Buggy: planted"):
            await runtime.failed()
        told = await asking
        assert isinstance(told, Finished) and told.reason is FinishReason.ERROR
        assert isinstance(await last(runtime, "later"), Refused)
        assert runtime.up == frozenset() and not runtime.has_target
        await runtime.drain(5)


async def test_a_port_that_raises_anything_but_a_lost_worker_is_a_bug() -> None:
    port = PlayPort()
    async with running(port) as runtime:
        await runtime.wait_ready(1)
        port.inbox.put_nowait(Buggy("in the port"))
        with pytest.raises(RuntimeFailed, match="in the port"):
            await runtime.failed()


async def test_a_later_alarm_does_not_cancel_an_earlier_one() -> None:
    runtime = Runtime(Core(CoreConfig(), FixedK(2), IdStopper), [], [], QUICK)
    ticked = asyncio.Event()

    def handle(event: Event) -> list[object]:
        assert isinstance(event, Ticked)
        ticked.set()
        return []

    runtime.core.handle = handle  # type: ignore[assignment, method-assign]
    now = asyncio.get_running_loop().time()
    runtime._carry_out(WakeAt(now + 0.02))
    runtime._carry_out(WakeAt(now + 60))
    await asyncio.wait_for(ticked.wait(), 1)
    runtime._carry_out(WakeAt(now + 60))
    runtime._carry_out(WakeAt(now + 0.05))
    ticked.clear()
    await asyncio.wait_for(ticked.wait(), 1)
    await runtime.stop()


async def test_an_audit_says_what_came_and_names_the_rest() -> None:
    port, mute = PlayPort(), drafter()
    mute.answers_audits = False
    async with running(port, mute) as runtime:
        await runtime.wait_ready(1)
        replies = await runtime.audit()
        assert replies["drafter"] is None
        assert replies["target"] is not None and replies["target"].free_pages == 64


async def test_a_drop_closes_the_link_and_it_is_connected_again() -> None:
    port, helper = PlayPort(), drafter()
    async with running(port, helper) as runtime:
        await runtime.wait_ready(1)
        before = len(runtime._tasks)
        for dropped in (DropTarget(0, "nonsense"), DropDrafter(0, "nonsense")):
            runtime._carry_out(dropped)
        while min(port.connects, helper.connects) < 2:  # noqa: ASYNC110 - until it has happened
            await asyncio.sleep(0.005)
        await runtime.wait_ready(1)
        assert port.closes == helper.closes == 1
        assert len(runtime._tasks) == before, "closed links leave no task"


async def test_a_drain_refuses_the_new_and_waits_for_the_running() -> None:
    async with running(PlayPort()) as runtime:
        await runtime.wait_ready(1)
        asking = asyncio.create_task(last(runtime))
        await asyncio.sleep(0)
        draining = asyncio.create_task(runtime.drain(5))
        await asyncio.sleep(0)
        assert isinstance(await last(runtime, "late"), Refused)
        assert not draining.done()
        asking.cancel()
        await draining
        with suppress(asyncio.CancelledError):
            await asking


async def test_stopping_ends_what_still_runs() -> None:
    async with running(PlayPort()) as runtime:
        await runtime.wait_ready(1)
        asking = asyncio.create_task(last(runtime))
        await asyncio.sleep(0)
        await runtime.stop()
        told = await asking
        assert isinstance(told, Finished) and told.reason is FinishReason.CANCELLED


async def test_a_mailbox_joins_tokens_and_keeps_its_first_last_word() -> None:
    mailbox = Mailbox()
    done = Finished(FinishReason.LENGTH, Stats())
    for update in (Delta((1,)), Delta((2, 3)), done, Delta((4,)), Refused):
        mailbox.put(update)  # type: ignore[arg-type]
    assert [await mailbox.get(), await mailbox.get()] == [Delta((1, 2, 3)), done]
