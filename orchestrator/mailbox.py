"""Updates on their way to one client; deltas it has not fetched yet are joined into one."""

import asyncio

from orchestrator.request import Delta, Finished, FinishReason, Stats, Update


class Mailbox:
    """Holds at most the request's own tokens and one last update."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: Update | None = None
        self._filled = asyncio.Event()

    def put(self, update: Update) -> None:
        """Add an update; after one that is not a Delta, what comes is dropped."""
        if self._last is not None:
            return
        if isinstance(update, Delta):
            self._tokens.extend(update.tokens)
        else:
            self._last = update
        self._filled.set()

    def cut_off(self) -> None:
        """The server cannot wait for the rest."""
        why = "the server is shutting down; resume with the tokens you have"
        self.put(Finished(FinishReason.UNAVAILABLE, Stats(), why))

    async def get(self) -> Update:
        """All new tokens, or when there are none, the last update."""
        await self._filled.wait()
        if self._tokens:
            delta, self._tokens = Delta(tuple(self._tokens)), []
            if self._last is None:
                self._filled.clear()
            return delta
        assert self._last is not None, "a filled mailbox holds something"
        return self._last
