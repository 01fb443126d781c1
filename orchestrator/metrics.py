"""Counters the core fills; the shell exports them."""

from dataclasses import dataclass

from orchestrator.sequence import Committed


@dataclass(slots=True)
class Counters:
    """How often each thing happened since the core started."""

    requests: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    committed: int = 0
    looked_up: int = 0
    grows: int = 0
    guesses: int = 0
    guesses_gone: int = 0
    guesses_repeated: int = 0
    guesses_foreign: int = 0
    grows_stale: int = 0
    openings: int = 0
    reopenings: int = 0
    needs: int = 0
    drafter_faults: int = 0
    target_faults: int = 0
    drafters_lost: int = 0
    targets_lost: int = 0
    waits: int = 0
    waits_in_vain: int = 0
    stepped_stale: int = 0
    preemptions: int = 0
    opened_tokens: int = 0
    cached_tokens: int = 0

    def add_round(self, drafted: int, done: Committed) -> None:
        """Count one verdict on so many guesses."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += done.accepted
        self.hits += done.hit
        self.committed += len(done.tokens)
