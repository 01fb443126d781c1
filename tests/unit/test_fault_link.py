"""The misbehaving link does what its plan says, and nothing else."""

import asyncio

import pytest

from orchestrator.ports import WorkerLost
from protos.messages import Audit, AuditReply, Grow, Hello, Open
from protos.sampling import GREEDY
from tests.fakes import FaultLink, ToyEngine
from tests.faults import Fate, scripted
from tests.opened import local


async def test_a_fault_link_delays_only_what_its_script_names() -> None:
    plan = scripted({("out", 0): Fate(delay_s=0.02), ("in", 2): Fate(copies=2)})
    async with local(ToyEngine) as inner:
        port = FaultLink(inner, plan)
        await port.connect()
        assert isinstance(await port.receive(), Hello)
        port.send(Open(1, 1, (5,), GREEDY, 1))
        port.send(Open(2, 1, (5,), GREEDY, 1))
        grown = [await port.receive() for _ in range(3)]
        assert [m.seq for m in grown if isinstance(m, Grow)] == [2, 1, 1]
        await port.close()


async def test_a_fault_link_stalls_one_direction_and_can_be_cut() -> None:
    async with local(ToyEngine) as inner:
        port = FaultLink(inner)
        await port.connect()
        await port.receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        port.stall("in", 0.05)
        for nonce in range(3):
            port.send(Audit(nonce))
        assert [await port.receive() for _ in range(3)] == [
            AuditReply(nonce, 8, 8, 0) for nonce in range(3)
        ]
        assert loop.time() - began >= 0.05
        waiting = asyncio.create_task(port.receive())
        await asyncio.sleep(0)
        port.cut("cable")
        with pytest.raises(WorkerLost, match="cable"):
            await waiting
        await port.connect()
        assert isinstance(await port.receive(), Hello)
        await port.close()
