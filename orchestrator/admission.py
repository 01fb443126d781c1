"""Requests that do not run yet: refused by name, or waiting in a bounded queue, oldest first."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from orchestrator.config import CoreConfig
from orchestrator.request import FinishReason, Refusal, Refused, Request
from orchestrator.sequence import Sequence
from orchestrator.target_desk import TargetDesk

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may begin, since when it has waited, and the target that takes it."""

    request: Request
    since: float
    target: int


class Admission:
    """Decides who runs; the core makes it so."""

    def __init__(self, config: CoreConfig, targets: TargetDesk) -> None:
        self.draining = False
        self._config = config
        self._targets = targets
        self._queue: deque[tuple[float, Request]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def limit(self, request: Request) -> int:
        """How many tokens, the prompt's included, the request may come to."""
        return min(len(request.prompt) + request.max_tokens, self._config.max_context)

    def submit(self, request: Request, now: float, running: int) -> Refused | None:
        """Queue a request beside `running` sequences, or say why not."""
        refused = self._refusal(request, running)
        if refused is None:
            self._queue.append((now, request))
        return refused

    def admit(self, running: Collection[Sequence]) -> Admitted | None:
        """Take the oldest request off the queue, if it may begin now."""
        if not self._queue or len(running) >= self._config.max_sequences:
            return None
        since, request = self._queue[0]
        target = self._targets.capacity.place(request, self.limit(request), running)
        if target is None:
            return None
        self._queue.popleft()
        return Admitted(request, since, target)

    def remove(self, request_id: str) -> None:
        """Take a request off the queue."""
        self._queue = deque(item for item in self._queue if item[1].request_id != request_id)

    def overdue(self, now: float) -> Iterator[tuple[str, FinishReason]]:
        """The requests that have waited too long, or for a target that does not come back."""
        is_hopeless = self._targets.all_given_up(now)
        for since, request in [*self._queue]:
            if now - since >= self._config.max_request_s:
                yield request.request_id, FinishReason.TIMEOUT
            elif is_hopeless:
                yield request.request_id, FinishReason.UNAVAILABLE

    def _refusal(self, request: Request, running: int) -> Refused | None:
        capacity, waiting = self._targets.capacity, len(self._queue)
        if self.draining:
            return Refused(Refusal.DRAINING, "the server is shutting down", RETRY_S)
        if not self._targets.connected:
            return Refused(Refusal.NO_TARGET, "no target worker is connected", RETRY_S)
        if not capacity.could_hold(self.limit(request)):
            return Refused(
                Refusal.TOO_LARGE,
                f"{self.limit(request)} tokens exceed the target's memory of "
                f"{capacity.tokens} tokens; ask for fewer, or give it more pages",
            )
        if waiting >= self._config.max_queue + max(0, self._config.max_sequences - running):
            return Refused(
                Refusal.QUEUE_FULL,
                f"{running} requests run and {waiting} wait: no more fit",
                RETRY_S,
            )
        return None
