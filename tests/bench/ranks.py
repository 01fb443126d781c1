"""What tensor parallelism costs on this machine: `python -m tests.bench.ranks`.

The same plain decoding steps by one process with all cores and by ranks that share them out, each
with its share of the time spent in exchanges.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from orchestrator.ports import WorkerPort
from orchestrator.sharded_port import ShardedPort
from orchestrator.stream_port import StreamPort
from protos.codec import row_hash
from protos.engine_thread import LinkLimits
from protos.host import LOOPBACK, Place, Recipe, WorkerHost, own_cores
from protos.messages import Audit, AuditReply, Extend, Step, StepOpen, Stepped
from protos.sampling import GREEDY
from services.pull import resolve
from target_workers.config import TargetConfig
from target_workers.model.shard import Shard

SECRET = "bench"
LIMITS = LinkLimits(connect_s=60.0)
WARM_UP = 10  # steps


def cores_of(rank: int, size: int) -> tuple[int, ...]:
    """A rank's share of this process's cores."""
    cores = own_cores()
    return tuple(cores[len(cores) * rank // size : len(cores) * (rank + 1) // size])


async def work(path: str, dtype: str, shard: Shard) -> None:
    """One rank in this process, until its input ends; its address is its first line."""
    cores = cores_of(shard.rank, shard.size)
    config = TargetConfig(
        path, dtype=dtype, num_pages=256, max_context=2048, threads=(len(cores),), shard=shard
    )
    recipe = Recipe("target_workers.forward:load_target", {"config": config, "vocab_hash": ""})
    host = WorkerHost(recipe, Place(cores, LIMITS, LOOPBACK))
    print(await host.start(SECRET, LOOPBACK), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await host.stop()


@asynccontextmanager
async def started(path: str, dtype: str, size: int) -> AsyncIterator[WorkerPort]:
    """A connected target in `size` processes."""
    command = [sys.executable, "-m", "tests.bench.ranks", "--path", path, "--dtype", dtype]
    processes, ports = [], []
    for rank in range(size):
        rank_of = ["--rank", str(rank), "--size", str(size)]
        pipe = asyncio.subprocess.PIPE
        processes.append(
            await asyncio.create_subprocess_exec(*command, *rank_of, stdin=pipe, stdout=pipe)
        )
    for rank, process in enumerate(processes):
        address = (await process.stdout.readline()).decode().strip()

        async def locate(address: str = address) -> str:
            return address

        ports.append(StreamPort(f"rank {rank}", locate, SECRET, LIMITS))
    port = ports[0] if size == 1 else ShardedPort("target", ports, 10.0)
    await port.connect()
    await port.receive()
    yield port
    await port.close()
    for process in processes:
        process.stdin.close()
        await process.wait()


async def measure(port: WorkerPort, context: int, steps: int) -> tuple[float, dict[str, int]]:
    """Median seconds of one decoding step after a context, and what it cost in exchanges."""
    tokens = [1 + i % 1000 for i in range(context)]
    opens: tuple[StepOpen, ...] = (StepOpen(1, tuple(tokens), GREEDY, prefix_cache=False),)
    times: list[float] = []
    cached, before = 0, {}
    for number in range(1, steps + 1):
        extend = Extend(1, cached, tuple(tokens[cached : cached + 256]))
        message = Step(number, row_hash(opens, (extend,), ()), opens, (extend,), ())
        began = time.perf_counter()
        port.send(message)
        stepped = await port.receive()
        assert isinstance(stepped, Stepped)
        cached, opens = cached + len(extend.tokens), ()
        if not stepped.verdicts:
            continue
        times.append(time.perf_counter() - began)
        tokens.append(stepped.verdicts[0].next_token)
        if len(times) == WARM_UP:
            before = await counters(port)
    after, times = await counters(port), times[WARM_UP:]
    spent = {name: (after[name] - before[name]) // len(times) for name in after if "exch" in name}
    return sorted(times)[len(times) // 2], spent


async def counters(port: WorkerPort) -> dict[str, int]:
    port.send(Audit(1))
    reply = await port.receive()
    assert isinstance(reply, AuditReply)
    return {counter.name: counter.value for counter in reply.counters}


async def compare(path: str, dtype: str, sizes: Sequence[int], as_json: bool) -> None:
    rows = []
    for size in sizes:
        async with started(path, dtype, size) as port:
            step_s, spent = await measure(port, context=256, steps=130)
        share = spent.get("exchange_us", 0) / 1e6 / step_s
        rows.append({"ranks": size, "step_ms": 1e3 * step_s, "exchange_share": share, **spent})
    for row in rows:
        row["times_one_rank"] = row["step_ms"] / rows[0]["step_ms"]
    print(json.dumps(rows) if as_json else table(rows, len(own_cores())))


def table(rows: list[dict[str, float]], cores: int) -> str:
    lines = [f"one row at context 256, {cores} cores shared out"]
    for row in rows:
        lines.append(
            f"{row['ranks']} ranks: {row['step_ms']:.1f} ms a step, {row['times_one_rank']:.2f} of"
            f" one rank, {row['exchange_share']:.0%} of it in {row.get('exchanges', 0)} exchanges"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    path = str(resolve(args.path))
    os.environ.setdefault("OMP_NUM_THREADS", str(len(own_cores())))
    if args.rank is not None:
        asyncio.run(work(path, args.dtype, Shard(args.rank, args.size)))
    else:
        asyncio.run(compare(path, args.dtype, (1, args.size), args.json))


if __name__ == "__main__":
    main()
