"""All ranks of one target in threads of this process, driven together like one engine."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from protos.messages import Hello, Join, Joined, Message
from protos.worker import Engine
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.group import Group
from target_workers.model.decoder import Decoder
from target_workers.model.loading import Part, load_decoder
from target_workers.model.shard import Shard

LOOPBACK = "127.0.0.1"
T = TypeVar("T")


class Threads:
    """One thread for each rank."""

    def __init__(self, size: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]

    def each(self, call: Callable[[int], T]) -> list[T]:
        """Call with every rank at once; the answers by rank. Raises what the first raised."""
        calls = [thread.submit(call, rank) for rank, thread in enumerate(self._threads)]
        return [each.result(60) for each in calls]

    def stop(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class Ranks:
    """An Engine over the engines of all ranks: the same messages to each, the first one answers."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.threads = Threads(len(engines))
        self.generation = 0

    def join(self) -> None:
        """Form the next group."""
        self.generation += 1
        joins = joins_of([engine.hello().group_port for engine in self.engines], self.generation)
        answers = self.threads.each(lambda i: self.engines[i].handle(joins[i]))
        assert answers == [[Joined(self.generation)]] * len(joins)

    def hello(self) -> Hello:
        return self.engines[0].hello()

    def handle(self, message: Message) -> list[Message]:
        return self.threads.each(lambda i: self.engines[i].handle(message))[0]

    def work(self) -> list[Message] | None:
        return None

    def reset(self) -> None:
        self.threads.each(lambda i: self.engines[i].reset())

    def errors(self, *messages: Message) -> list[str]:
        """What every rank raises for its message (one: for all); nothing for one that answers."""

        def raised(i: int) -> str:
            try:
                self.engines[i].handle(messages[i % len(messages)])
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return ""

        return self.threads.each(raised)

    def stop(self) -> None:
        self.reset()
        self.threads.stop()


def joins_of(ports: Sequence[int], generation: int = 1) -> list[Join]:
    """What each rank is told to form a group on loopback."""
    peers = tuple(f"{LOOPBACK}:{port}" for port in ports)
    return [Join(generation, rank, peers, f"key {generation}") for rank in range(len(ports))]


@contextmanager
def ranked(config: TargetConfig, size: int) -> Iterator[Ranks]:
    """A target in `size` ranks that have formed a group; each has loaded its part alone."""
    shards = [Shard(rank, size) for rank in range(size)]
    configs = [replace(config, shard=shard, host=LOOPBACK) for shard in shards]
    ranks = Ranks([load_target(each, vocab_hash="", incarnation=1) for each in configs])
    try:
        ranks.join()
        yield ranks
    finally:
        ranks.stop()


@contextmanager
def grouped(size: int, timeout_s: float = 5.0) -> Iterator[tuple[list[Group], Threads]]:
    """The ends of a formed group, and a thread for each."""
    groups = [Group(Shard(rank, size), host=LOOPBACK, timeout_s=timeout_s) for rank in range(size)]
    threads = Threads(size)
    joins = joins_of([group.port for group in groups])
    try:
        threads.each(lambda rank: groups[rank].join(joins[rank]))
        yield groups, threads
    finally:
        threads.each(lambda rank: groups[rank].leave())
        threads.stop()


def load_parts(folder: Path, groups: Sequence[Group], dtype: torch.dtype) -> list[Decoder]:
    """The decoder of every rank."""
    parts = [Part(Shard(rank, len(groups)), group.reduce) for rank, group in enumerate(groups)]
    return [load_decoder(folder, dtype=dtype, part=part) for part in parts]
