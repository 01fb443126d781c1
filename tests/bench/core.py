"""How long the core takes from a Stepped to the next Step: `python -m tests.bench.core [--json]`.

A drafter that is always ahead and always right: every event that a real run has, no model.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass

from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.events import DrafterSaid, Submitted, TargetSaid, ToTargetWorker
from orchestrator.k_policy import FixedK
from orchestrator.request import Request
from protos.messages import PROTOCOL, Grow, Guess, Hello, Step, Stepped, Verdict
from services.measure import percentile

K = 4
ROUNDS = 200


class Never:
    """A stopper that never stops."""

    def push(self, token: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds from a Stepped to its next Step, and events handled per second."""

    sequences: int
    p50_ms: float
    p99_ms: float
    events_per_s: float


def hello(role: str) -> Hello:
    return Hello(PROTOCOL, role, 1, "m", "v", 50_000, 8192, 16, 10**6, 4096)


class Bench:
    """A core with `count` sequences, and the answers its workers would give."""

    def __init__(self, count: int) -> None:
        config = CoreConfig(
            max_sequences=count, max_queue=count, step_rows=4096, k=K, patience_s=0.0, lookup=False
        )
        self.core = Core(config, FixedK(K), lambda request: Never())
        self.events = 0
        self.spent_s = 0.0
        self.next_id = dict.fromkeys(range(1, count + 1), 1)
        self.handle(TargetSaid(0.0, 0, hello("target")))
        self.handle(DrafterSaid(0.0, 0, hello("drafter")))
        commands = []
        for i in range(count):
            commands += self.handle(Submitted(0.0, Request(str(i), (1, 2, 3), 4000)))
        self.step = _step(commands)
        while len(self.step.extends) < count or any(e.start == 0 for e in self.step.extends):
            self.step = _step(self.handle(TargetSaid(0.0, 0, self.stepped())))

    def handle(self, event):
        began = time.perf_counter()
        commands = self.core.handle(event)
        self.spent_s += time.perf_counter() - began
        self.events += 1
        return commands

    def grow(self) -> None:
        """The drafter extends every tree by the K + 1 nodes that the verdict will use up."""
        for seq in self.core.sequences:
            first = self.next_id[seq.seq]
            leaf = 0 if not seq.tree.size else first - 1
            guesses = tuple(
                Guess(first + i, leaf if i == 0 else first + i - 1, 7, -0.1) for i in range(K + 1)
            )
            self.next_id[seq.seq] = first + K + 1
            self.handle(DrafterSaid(0.0, 0, Grow(seq.seq, 1, seq.frontier, guesses)))

    def stepped(self) -> Stepped:
        verdicts = tuple(
            Verdict(e.seq, e.start + len(e.tokens), tuple(range(len(e.nodes))), 7)
            for e in self.step.extends
        )
        free = self.core.capacity.ledgers[0].low
        return Stepped(self.step.step, verdicts, (), free, 0.01)

    def round(self) -> float:
        """Seconds from the Stepped to the next Step."""
        self.grow()
        stepped = self.stepped()
        began = time.perf_counter()
        self.step = _step(self.handle(TargetSaid(0.0, 0, stepped)))
        return time.perf_counter() - began


def _step(commands) -> Step:
    return next((c.message for c in reversed(commands) if isinstance(c, ToTargetWorker)), None)


def measure(count: int) -> Figures:
    """The figures for `count` sequences in one batch."""
    bench = Bench(count)
    times = [bench.round() * 1000 for _ in range(ROUNDS)]
    return Figures(
        count, percentile(times, 50), percentile(times, 99), bench.events / bench.spent_s
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    figures = [measure(count) for count in (1, 8, 64, 256)]
    if as_json:
        print(json.dumps([asdict(f) for f in figures]))
        return
    print(f"{'sequences':>9} {'p50 ms':>8} {'p99 ms':>8} {'events/s':>10}")
    for f in figures:
        print(f"{f.sequences:9} {f.p50_ms:8.2f} {f.p99_ms:8.2f} {f.events_per_s:10.0f}")


if __name__ == "__main__":
    main()
