"""Payloads carry what waits together, within their bound; the queue in front of them is bounded."""

import asyncio
import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.codec import DecodeError, encode
from protos.frames import MAX_PAYLOAD_BYTES, LinkEnded, Outbox, check_hello, pack, unpack
from protos.messages import PROTOCOL, Advance, Audit, Hello, Message, Open
from protos.sampling import GREEDY

HELLO = Hello(PROTOCOL, "toy", 1, "m", "v", 16, 64, 16, 8, 4)
LARGE = Open(1, 1, (70000,) * (MAX_PAYLOAD_BYTES // 12), GREEDY, 1)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_a_batch_travels_as_one_payload(nonces: list[int]) -> None:
    batch: list[Message] = [Audit(nonce) for nonce in nonces]
    (payload,) = pack(batch)
    assert unpack(payload) == batch


def test_a_batch_beyond_the_bound_is_split_in_order() -> None:
    batch: list[Message] = [Audit(1), LARGE, LARGE, LARGE, Advance(1, 1, 0, (), 0)]
    payloads = list(pack(batch))
    assert [len(unpack(payload)) for payload in payloads] == [3, 2]
    assert max(map(len, payloads)) <= MAX_PAYLOAD_BYTES
    assert [m for payload in payloads for m in unpack(payload)] == batch


def test_a_message_beyond_a_frame_is_refused_when_packed() -> None:
    with pytest.raises(ValueError, match="exceeds a frame"):
        list(pack([Open(1, 1, LARGE.tokens * 3, GREEDY, 1)]))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5])
def test_a_cut_payload_is_refused(cut: int) -> None:
    (payload,) = pack([Audit(1)])
    with pytest.raises(DecodeError):
        unpack(payload[:cut])


@given(st.binary(max_size=40))
def test_random_payloads_raise_only_decode_error(payload: bytes) -> None:
    try:
        batch = unpack(payload)
    except DecodeError:
        return
    assert all(encode(message) in payload for message in batch)


def test_another_protocol_is_refused_naming_both() -> None:
    check_hello(HELLO)
    with pytest.raises(LinkEnded, match=f"speaks protocol 9, this orchestrator {PROTOCOL}"):
        check_hello(dataclasses.replace(HELLO, protocol=9))
    with pytest.raises(LinkEnded, match="the first message is Audit, not Hello"):
        check_hello(Audit(1))


async def test_what_is_put_from_another_thread_is_taken_in_order() -> None:
    outbox = Outbox(limit=1000)

    def fill() -> None:
        for nonce in range(1000):
            outbox.put([Audit(nonce)])

    thread = threading.Thread(target=fill)
    thread.start()
    taken: list[Message] = []
    while len(taken) < 1000:
        taken += await outbox.take()
    thread.join()
    assert taken == [Audit(n) for n in range(1000)]


async def test_a_full_queue_ends_with_its_cause() -> None:
    outbox = Outbox(limit=2)
    outbox.put([Audit(1), Audit(2)])
    outbox.put([Audit(3)])
    with pytest.raises(LinkEnded, match="outgoing queue full: more than 2 messages wait"):
        await outbox.take()


async def test_a_closed_queue_wakes_who_waits_and_keeps_its_first_cause() -> None:
    outbox = Outbox(limit=2)
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close("first")
    outbox.close("second")
    for take in (waiting, outbox.take()):
        with pytest.raises(LinkEnded, match="first"):
            await take


async def test_a_closed_queue_holds_nothing_and_takes_nothing_more() -> None:
    outbox = Outbox(limit=2)
    for nonce in range(100):
        outbox.put([Audit(nonce)])
    assert not outbox._waiting


async def test_a_pump_ends_when_its_queue_is_closed_although_a_write_is_blocked() -> None:
    outbox = Outbox(limit=2)
    blocked = asyncio.Event()

    async def write(_payload: bytes) -> None:
        blocked.set()
        await asyncio.Event().wait()

    pumping = asyncio.create_task(outbox.pump(write))
    outbox.put([Audit(1)])
    await blocked.wait()
    for nonce in range(3):
        outbox.put([Audit(nonce)])
    assert (await asyncio.wait_for(pumping, 1)).startswith("outgoing queue full")


async def test_a_pump_raises_what_its_write_raises() -> None:
    outbox = Outbox(limit=2)

    async def write(_payload: bytes) -> None:
        raise OSError("gone")

    outbox.put([Audit(1)])
    with pytest.raises(OSError, match="gone"):
        await asyncio.wait_for(outbox.pump(write), 1)
