"""Several streams as one: every update comes, and they end together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from orchestrator.request import Delta, Finished, FinishReason, Stats, Update
from services.choices import merged

END = Finished(FinishReason.STOP, Stats())


class Streams:
    """Streams of so many tokens each; one may break, or never end."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.begun: list[int] = []

    async def make(
        self, number: int, count: int, error: Exception | None = None
    ) -> AsyncGenerator[Update, None]:
        self.begun.append(number)
        try:
            for token in range(count):
                await asyncio.sleep(0)
                yield Delta((token,))
            if error is not None:
                raise error
            yield END
        finally:
            self.closed.append(number)


async def taken(streams: Sequence[AsyncGenerator[Update, None]]) -> list[tuple[int, Update]]:
    async with aclosing(merged(streams)) as updates:
        return [pair async for pair in updates]


async def test_every_update_of_every_stream_comes_in_its_order() -> None:
    streams = Streams()
    counts = (3, 0, 5)
    found = await taken([streams.make(i, count) for i, count in enumerate(counts)])
    for number, count in enumerate(counts):
        own = [update for i, update in found if i == number]
        assert own == [*(Delta((token,)) for token in range(count)), END]
    assert streams.begun == [0, 1, 2], "the first one is there for the others to begin with"
    assert sorted(streams.closed) == [0, 1, 2]


async def test_what_one_raises_ends_all() -> None:
    streams = Streams()
    with pytest.raises(ValueError, match="planted"):
        await taken([streams.make(0, 10_000), streams.make(1, 2, ValueError("planted"))])
    assert sorted(streams.closed) == [0, 1]


async def test_who_stops_listening_closes_all() -> None:
    streams = Streams()
    async with aclosing(merged([streams.make(i, 10_000) for i in range(3)])) as updates:
        async for _ in updates:
            break
    assert sorted(streams.closed) == [0, 1, 2]
