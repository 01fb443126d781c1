"""What a step of the target costs beside what memory must charge: `python -m tests.bench.target`.

Whole steps go through the engine as the orchestrator sends them. `--json` prints one object.
Run it on an idle machine: beside another busy process a step takes several times as long.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from protos.codec import row_hash
from protos.host import tune_libraries
from protos.messages import Extend, Step, StepClose, StepOpen, Stepped, TreeNode
from protos.sampling import GREEDY
from services.terminal import err, out

ROWS = (1, 2, 4, 8)
CONTEXTS = (256, 1024)
BATCH = 8
PREFILL = 512
READ_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, its unit, and what it is meant to be."""

    name: str
    value: float
    unit: str
    goal: str = ""


class Driver:
    """Sends an engine its steps, and keeps what the sequences have come to."""

    def __init__(self, engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._number = 0
        self._tokens: dict[int, list[int]] = {}
        self._keep: dict[int, tuple[int, ...]] = {}
        self._cached: dict[int, int] = {}

    def open(self, seq: int, length: int, chunk: int = PREFILL) -> float:
        """A sequence of random tokens, prefilled; the seconds that took."""
        tokens = [(7919 * (seq + 1) * (i + 1)) % self._vocab_size for i in range(length)]
        self._tokens[seq], self._keep[seq], self._cached[seq] = tokens, (), 0
        self._step(opens=(StepOpen(seq, tuple(tokens), GREEDY, prefix_cache=False),))
        began = time.perf_counter()
        while self._cached[seq] < length:
            start = self._cached[seq]
            rows = tuple(tokens[start : start + chunk])
            self._cached[seq] += len(rows)
            self._take(self._step(extends=(Extend(seq, start, rows),)))
        return time.perf_counter() - began

    def round(self, rows: int) -> tuple[float, int]:
        """Each sequence's root and `rows - 1` guesses; the seconds and the tokens it gave."""
        extends = tuple(self._extend(seq, rows) for seq in self._tokens)
        before = sum(map(len, self._tokens.values()))
        began = time.perf_counter()
        stepped = self._step(extends=extends)
        took = time.perf_counter() - began
        self._take(stepped)
        return took, sum(map(len, self._tokens.values())) - before

    def close(self) -> None:
        """End all sequences."""
        self._step(closes=tuple(StepClose(seq) for seq in self._tokens))
        self._tokens.clear()

    def _extend(self, seq: int, rows: int) -> Extend:
        tokens, keep = self._tokens[seq], self._keep[seq]
        nodes = tuple(TreeNode(i - 1, (len(tokens) * 31 + i) % 1000) for i in range(rows - 1))
        start = self._cached[seq] + len(keep)
        self._cached[seq] = len(tokens)
        return Extend(seq, start, tuple(tokens[start:]), nodes, keep)

    def _take(self, stepped: Stepped) -> None:
        for verdict in stepped.verdicts:
            assert not verdict.error, verdict.error
            accepted = [(len(self._tokens[verdict.seq]) * 31 + i) % 1000 for i in verdict.walk]
            self._tokens[verdict.seq] += [*accepted, verdict.next_token]
            self._keep[verdict.seq] = verdict.walk

    def _step(self, opens=(), extends=(), closes=()) -> Stepped:
        self._number += 1
        step = Step(self._number, row_hash(opens, extends, closes), opens, extends, closes)
        (answer,) = self._engine.handle(step)
        return answer


def median_ms(work: Callable[[], object], times: int) -> float:
    """The median of so many runs after one that does not count."""
    work()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def bandwidth(times: int) -> float:
    """Bytes per second that all threads read from memory."""
    import torch

    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return 1e3 * READ_BYTES / median_ms(lambda: numbers.sum(), times)


class Bench:
    """Measures one loaded model."""

    def __init__(self, path: Path, threads: int, steps: int, **options: object) -> None:
        from target_workers.config import TargetConfig
        from target_workers.forward import load_target

        self.steps = steps
        config = TargetConfig(str(path), threads=(threads,), num_pages=2048, **options)
        self.engine = load_target(config, vocab_hash="", incarnation=1)
        self.decoder = self.engine._forward._decoder
        self.cache = self.engine._forward._cache
        self.driver = Driver(self.engine, self.engine.hello().vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Of the matrices that every step reads."""
        packed = [p for b in self.decoder._parts.blocks for p in (b.qkv, b.out, b.gate_up, b.down)]
        return sum(p.weights.nbytes + p.scale.nbytes for p in (*packed, self.decoder._parts.head))

    def step_ms(self, rows: int, context: int, batch: int = 1) -> float:
        """The median time of a step."""
        for _ in range(batch):
            self.driver.open(self.next_seq(), context)
        taken = [self.driver.round(rows)[0] for _ in range(self.steps + 2)][2:]
        self.driver.close()
        return 1e3 * statistics.median(taken)

    def tokens_per_s(self, batch: int, context: int) -> float:
        """Of plain decoding."""
        return 1e3 * batch / self.step_ms(1, context, batch)

    def prefill_per_s(self, tokens: int) -> float:
        """Tokens of one prompt."""
        taken = []
        for _ in range(max(3, self.steps // 6)):
            taken.append(self.driver.open(self.next_seq(), tokens))
            self.driver.close()
        return tokens / statistics.median(taken)

    def linears_ms(self, rows: int) -> float:
        """All matrices of a step, alone."""
        import numpy as np
        import torch

        from target_workers.model.native.linear import gated, linear

        kind = np.uint16 if self.decoder._in_pairs else np.float32
        threads, blocks, head = (
            torch.get_num_threads(),
            self.decoder._parts.blocks,
            self.decoder._parts.head,
        )
        config = self.decoder.config
        heads = config.num_heads * config.head_dim
        wide = heads + 2 * config.num_kv_heads * config.head_dim
        x, attended, inner = (
            np.zeros((rows, size), kind)
            for size in (config.hidden_size, heads, config.intermediate_size)
        )
        qkv, delta, logits = (
            np.empty((rows, size), np.float32)
            for size in (wide, config.hidden_size, config.vocab_size)
        )

        def work() -> None:
            for block in blocks:
                linear(block.qkv, x, qkv, threads)
                linear(block.out, attended, delta, threads)
                gated(block.gate_up, x, inner, threads)
                linear(block.down, inner, delta, threads)
            linear(head, x, logits, threads)

        return median_ms(work, self.steps)

    def attention_ms(self, context: int, batch: int) -> float:
        """Rotation, new keys and values, and attention of all layers: one row a sequence."""
        import numpy as np

        from target_workers.model.batch import build_batch
        from target_workers.model.native.attention import attend
        from target_workers.model.native.place import place
        from target_workers.model.run import Run

        runs = [
            Run(
                np.array([1]),
                context,
                np.array([first + context]),
                np.arange(first, first + context),
            )
            for first in range(0, batch * (context + 16), context + 16)
        ]
        rows = self.decoder._rows(build_batch(runs), self.cache)

        def work() -> None:
            for index, block in enumerate(self.decoder._parts.blocks):
                cached = self.decoder._cached(self.cache, index)
                place(
                    rows.qkv, rows.positions, rows.slots, block.heads, cached, rows.queries,
                    rows.threads,
                )  # fmt: skip
                attend(rows.queries, cached, rows.tiles, rows.attended, rows.threads)

        return median_ms(work, self.steps)

    def next_seq(self) -> int:
        """A sequence id that was not used."""
        self._seq = getattr(self, "_seq", 0) + 1
        return self._seq


def reference_ms(path: Path, rows: int, context: int, steps: int) -> float:
    """The same forward by torch's own operators, not exact."""
    import numpy as np
    import torch

    from target_workers.model.batch import build_batch
    from target_workers.model.kv_cache import KVCache
    from target_workers.model.loading import load_reference
    from target_workers.model.run import Run

    decoder = load_reference(path, dtype=torch.bfloat16)
    cache = KVCache(decoder.config, 2 * context, torch.bfloat16)
    slots = np.arange(2 * context)
    run = Run(np.arange(rows), context, slots[context : context + rows], slots[:context])
    return median_ms(lambda: decoder.logits(decoder.hidden(build_batch([run]), cache)), steps)


def measure(path: Path, threads: int, steps: int) -> list[Figure]:
    """All figures, in the order they are wanted."""
    import torch

    torch.set_num_threads(threads)
    read = bandwidth(10)
    figures = [Figure("memory read", read / 1e9, "GB/s")]
    _say("bf16 weights")
    bench = Bench(path, threads, steps)
    floor_ms = 1e3 * bench.weight_bytes / read
    figures += [
        Figure("weights", bench.weight_bytes / 1e6, "MB"),
        Figure("reading them once", floor_ms, "ms"),
    ]
    for context in CONTEXTS:
        taken = {rows: bench.step_ms(rows, context) for rows in ROWS}
        for rows, ms in taken.items():
            linears = bench.linears_ms(rows)
            name = f"step, context {context}, {rows} row{'s' if rows > 1 else ''}"
            figures += [
                Figure(name, ms, "ms"),
                Figure("  to reading the weights", ms / floor_ms, "x", "<= 2.2, reach 1.7"),
                Figure("  linears", linears, "ms"),
                Figure("  the rest", ms - linears, "ms"),
            ]
        figures.append(Figure("  8 rows to 1", taken[8] / taken[1], "x", "<= 1.35"))
    whole, attention = bench.step_ms(1, 1024, BATCH), bench.attention_ms(1024, BATCH)
    figures += [
        Figure("step, context 1024, batch 8", whole, "ms"),
        Figure("  attention and cache", 100 * attention / whole, "%", "<= 45"),
        Figure("plain decoding, 1 stream", bench.tokens_per_s(1, 256), "tokens/s", ">= 55"),
        Figure("plain decoding, 8 streams", bench.tokens_per_s(8, 256), "tokens/s", ">= 200"),
        Figure("prefill of 512", bench.prefill_per_s(PREFILL), "tokens/s", ">= 600"),
    ]
    exact = bench.step_ms(8, 256)
    del bench
    _say("torch's operators")
    plain = reference_ms(path, 8, 256, steps)
    figures.append(Figure("exact to plain torch, 8 rows", exact / plain, "x", "<= 1.3"))
    _say("int8 weights")
    narrow = Bench(path, threads, steps, weight_dtype="int8")
    figures += [
        Figure("int8: plain decoding, 1 stream", narrow.tokens_per_s(1, 256), "tokens/s", ">= 75"),
        Figure("int8: step of 8 rows", narrow.step_ms(8, 256), "ms"),
    ]
    del narrow
    _say("int8 keys and values")
    kept = Bench(path, threads, steps, kv_dtype="int8")
    figures.append(Figure("int8 cache: step, 1024, batch 8", kept.step_ms(1, 1024, BATCH), "ms"))
    return figures


def _say(stage: str) -> None:
    err.print(f"measuring {stage}", style="dim")


def show(figures: Sequence[Figure], threads: int) -> None:
    """A table for people."""
    from rich.table import Table

    table = Table("figure", "value", "unit", "goal", title=f"{machine()}, {threads} threads")
    table.columns[1].justify = "right"
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.2f}", figure.unit, figure.goal)
    out.print(table)


def machine() -> str:
    """The processor's name and its cores."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model or a folder")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=30, help="steps a figure is the median of")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    tune_libraries(asked.threads)  # read when torch is loaded, by what follows
    from services.pull import resolve

    figures = measure(resolve(asked.model), asked.threads, asked.steps)
    if asked.json:
        found = {"machine": machine(), "threads": asked.threads}
        print(json.dumps(found | {"figures": [asdict(figure) for figure in figures]}))
    else:
        show(figures, asked.threads)


if __name__ == "__main__":
    main()
