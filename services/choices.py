"""The updates of several requests as one stream, which ends them all together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from orchestrator.request import Update


async def merged(
    streams: Sequence[AsyncGenerator[Update, None]],
) -> AsyncGenerator[tuple[int, Update], None]:
    """Every stream's updates as they come, with its number.

    Closing it closes every stream; what one of them raises ends them all.
    """
    # One of each at most: what comes meanwhile waits, joined, where it comes from.
    waiting = asyncio.Queue[tuple[int, Update | Exception | None]](maxsize=len(streams))

    async def forward(number: int) -> None:
        try:
            async with aclosing(streams[number]) as updates:
                async for update in updates:
                    await waiting.put((number, update))
        except Exception as error:
            await waiting.put((number, error))
        else:
            await waiting.put((number, None))

    tasks = [asyncio.create_task(forward(number)) for number in range(len(streams))]
    left = len(streams)
    try:
        while left:
            number, update = await waiting.get()
            if isinstance(update, Exception):
                raise update
            if update is None:
                left -= 1
            else:
                yield number, update
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
