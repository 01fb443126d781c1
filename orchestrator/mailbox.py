"""Updates on their way to one client; what it has not fetched yet is joined."""

import asyncio

from orchestrator.request import Delta, Finished, FinishReason, PromptScored, Stats, Update
from protos.sampling import Score


class Mailbox:
    """Holds at most the scores of the request's prompt, its own tokens and one last update."""

    def __init__(self) -> None:
        self._scored_from = 0
        self._prompt: list[Score] = []
        self._tokens: list[int] = []
        self._scores: list[Score] = []
        self._last: Update | None = None
        self._filled = asyncio.Event()

    def put(self, update: Update) -> None:
        """Add an update; after the last one, what comes is dropped."""
        if self._last is not None:
            return
        match update:
            case Delta():
                self._tokens.extend(update.tokens)
                self._scores.extend(update.scores)
            case PromptScored():
                if not self._prompt:
                    self._scored_from = update.start
                self._prompt.extend(update.scores)
            case _:
                self._last = update
        self._filled.set()

    def cut_off(self) -> None:
        """The server cannot wait for the rest."""
        why = "the server is shutting down; resume with the tokens you have"
        self.put(Finished(FinishReason.UNAVAILABLE, Stats(), why))

    async def get(self) -> Update:
        """All new scores of the prompt, then all new tokens, or when there are none, the last."""
        await self._filled.wait()
        update = self._taken()
        if self._last is None and not self._prompt and not self._tokens:
            self._filled.clear()
        return update

    def _taken(self) -> Update:
        if self._prompt:
            scores, self._prompt = tuple(self._prompt), []
            return PromptScored(self._scored_from, scores)
        if self._tokens:
            delta = Delta(tuple(self._tokens), tuple(self._scores))
            self._tokens, self._scores = [], []
            return delta
        assert self._last is not None, "a filled mailbox holds something"
        return self._last
