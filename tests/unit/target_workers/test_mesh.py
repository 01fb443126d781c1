"""Ranks exchange bytes in step; whatever goes wrong names the rank, on every rank, in time."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from protos.messages import Join
from protos.worker import GroupBroken
from target_workers.door import MAX_CALLERS, admit, introduction
from target_workers.mesh import _HEADER, Mesh, _Frame, form, listen
from tests.ranks import LOOPBACK, Threads, joins_of

LARGE = 20_000_000  # far more than a socket holds


class Group:
    """Meshes of one group, with a thread for each; rank i's is `meshes[i]`."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.listeners = [listen(LOOPBACK) for _ in range(size)]
        self.threads = Threads(size)
        self.meshes: list[Mesh] = []

    def joins(self, generation: int = 1) -> list[Join]:
        return joins_of([each.getsockname()[1] for each in self.listeners], generation)

    def form(self) -> None:
        joins = self.joins()
        self.meshes = self.threads.each(
            lambda rank: form(self.listeners[rank], joins[rank], self.timeout_s)
        )

    def exchange(self, rank: int, sent: bytes, size: int | None = None) -> dict[int, bytes]:
        """Send to all and receive `size` bytes (none given: as many) from each."""
        mesh = self.meshes[rank]
        into = {peer: bytearray(len(sent) if size is None else size) for peer in mesh.others}
        views = {peer: memoryview(buffer) for peer, buffer in into.items()}
        mesh.exchange(dict.fromkeys(views, memoryview(sent)), views)
        return {peer: bytes(buffer) for peer, buffer in into.items()}

    def causes(self, call: Callable[[int], object]) -> list[str]:
        """Why each rank finds its group broken; nothing for one that does not."""

        def cause(rank: int) -> str:
            try:
                call(rank)
            except GroupBroken as broken:
                return str(broken)
            return ""

        return self.threads.each(cause)

    def stop(self) -> None:
        if self.meshes:
            self.threads.each(lambda rank: self.meshes[rank].close(""))
        for listener in self.listeners:
            listener.close()
        self.threads.stop()


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    with ExitStack() as stack:

        def formed(size: int, timeout_s: float = 5.0) -> Group:
            group = Group(size, timeout_s)
            stack.callback(group.stop)
            group.form()
            return group

        yield formed


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 1000, LARGE // 4])
def test_every_rank_hears_every_other(make: Callable[..., Group], size: int, length: int) -> None:
    group = make(size)
    for turn in range(3):
        got = group.threads.each(lambda i: group.exchange(i, bytes([10 * turn + i]) * length))  # noqa: B023
        for rank, heard in enumerate(got):
            others = {i: bytes([10 * turn + i]) * length for i in range(size) if i != rank}
            assert heard == others


def test_a_rank_that_is_gone_is_named_by_all(make: Callable[..., Group]) -> None:
    group = make(3)
    for connection in group.meshes[1]._sockets.values():
        connection.close()  # as a killed process leaves them
    causes = group.causes(lambda i: group.exchange(i, b"x" * LARGE) if i != 1 else None)
    assert causes[0] == causes[2] == "rank 1 is gone; its log may say why"


def test_a_silent_rank_is_named_by_all_in_time(make: Callable[..., Group]) -> None:
    group = make(3, timeout_s=0.3)
    causes = group.causes(lambda i: group.exchange(i, b"x") if i != 1 else None)
    assert causes[0] == causes[2] == "rank 1 took longer than 0.3 s"


def test_what_one_rank_says_at_its_end_all_hear(make: Callable[..., Group]) -> None:
    group = make(3)

    def fail(rank: int) -> None:
        if rank == 0:
            group.meshes[0].close("rank 0: planted")
        else:
            group.exchange(rank, b"x" * LARGE)

    assert group.causes(fail)[1:] == ["rank 0: planted"] * 2


def test_last_words_are_heard_in_the_middle_of_a_body(make: Callable[..., Group]) -> None:
    group = make(2)
    begun = threading.Event()

    def fail(rank: int) -> None:
        mesh = group.meshes[rank]
        if rank == 0:
            frame = _Frame(_HEADER.pack(1, LARGE), memoryview(b"x" * LARGE))
            assert not mesh._push(1, frame), "the socket is full"
            begun.set()
            mesh.close("rank 0: planted")
        elif begun.wait(10):
            group.exchange(rank, b"y" * LARGE)

    assert group.causes(fail) == ["", "rank 0: planted"]


@pytest.mark.parametrize("missing", [1, 10, 40, 300])
def test_last_words_are_not_taken_for_the_rest_of_a_body(
    make: Callable[..., Group], missing: int
) -> None:
    group = make(2)
    size = 400

    def fail(rank: int) -> None:
        if rank == 0:
            mesh = group.meshes[0]
            mesh._sockets[1].sendall(_HEADER.pack(1, size) + b"x" * (size - missing))
            mesh.close("rank 0: planted")
        else:
            group.exchange(rank, b"y" * size)

    assert group.causes(fail) == ["", "rank 0: planted"]


@pytest.mark.parametrize("other", [2, 20_000])
def test_another_length_is_found_out_by_whoever_hears_it(
    make: Callable[..., Group], other: int
) -> None:
    """B096, at the level of bytes: nothing is misread, nobody waits."""
    group = make(2)
    causes = group.causes(lambda i: group.exchange(i, b"x" * (1000, other)[i], (1000, other)[i]))
    assert f"sends {other} bytes as exchange 1, rank 0 expects 1000 as exchange 1" in causes[0]
    assert causes[1]


def test_a_rank_in_another_turn_is_found_out(make: Callable[..., Group]) -> None:
    group = make(2)
    group.meshes[1]._turn += 1
    causes = group.causes(lambda i: group.exchange(i, b"x"))
    assert any("as exchange 2, rank 0 expects 1 as exchange 1" in cause for cause in causes)
    assert all(causes)


def test_a_group_that_has_ended_is_of_no_use(make: Callable[..., Group]) -> None:
    group = make(2)
    group.meshes[0].close("over")
    with pytest.raises(GroupBroken, match="rank 0: its group has ended"):
        group.exchange(0, b"x")


def test_a_rank_that_does_not_come_is_named(make: Callable[..., Group]) -> None:
    group = Group(3, timeout_s=0.3)
    joins = group.joins()
    causes = group.causes(
        lambda i: form(group.listeners[i], joins[i], 0.3) and None if i != 1 else None
    )
    assert causes[0] == "rank 1 did not join within 0.3 s"
    group.stop()


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as free, listen(LOOPBACK) as listener:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
        join = Join(1, 1, (f"{LOOPBACK}:{port}", "unused:0"), "key")
        with pytest.raises(GroupBroken, match=rf"rank 0 cannot be reached at .*{port} \(.*refused"):
            form(listener, join, 1.0)


@pytest.mark.parametrize(
    "said",
    [b"", b"short", b"x" * 44, "another key", "another generation"],
    ids=["nothing", "too little", "nonsense", "another key", "another generation"],
)
def test_strangers_and_stale_ranks_are_turned_away(said: bytes | str) -> None:
    group = Group(2, timeout_s=5.0)
    address = group.listeners[0].getsockname()
    with socket.create_connection(address) as stranger:
        if isinstance(said, bytes):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        else:
            stale = joins_of([address[1], 1], generation=2 if "generation" in said else 1)[1]
            key = "key 1" if "generation" in said else "guessed"
            join = Join(stale.generation, 1, stale.peers, key)
            with listen(LOOPBACK) as other:
                form(other, join, 1.0).close("")
        group.form()
        got = group.threads.each(lambda i: group.exchange(i, b"ab"[i : i + 1]))
    assert got == [{1: b"b"}, {0: b"a"}]
    group.stop()


def crowd(stack: ExitStack, address: tuple[str, int], count: int) -> None:
    """So many who connect and say nothing, or part of something."""
    for i in range(count):
        stranger = stack.enter_context(socket.create_connection(address))
        stranger.sendall(b"x" * (i % 3))


@pytest.mark.parametrize("count", [40, MAX_CALLERS + 40])
def test_silent_strangers_keep_no_rank_outside(count: int) -> None:
    group = Group(2, timeout_s=5.0)
    with ExitStack() as stack:
        crowd(stack, group.listeners[0].getsockname(), count)
        started = time.monotonic()
        group.form()
        got = group.threads.each(lambda i: group.exchange(i, b"ab"[i : i + 1]))
        assert time.monotonic() - started < 5.0
    assert got == [{1: b"b"}, {0: b"a"}]
    group.stop()


def test_strangers_who_come_later_turn_no_rank_away() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listen(LOOPBACK))
        address = listener.getsockname()
        first, second = joins_of([address[1], 1])
        rank = stack.enter_context(socket.create_connection(address))
        rank.sendall(introduction(second))
        crowd(stack, address, MAX_CALLERS + 40)
        found = admit(listener, first, [1], time.monotonic() + 5.0)
        assert found.keys() == {1}
        stack.enter_context(found[1])


def test_silent_strangers_do_not_move_the_bound() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listen(LOOPBACK))
        address = listener.getsockname()
        crowd(stack, address, 20)
        join = Join(1, 0, (f"{LOOPBACK}:{address[1]}", "unused:0"), "key")
        started = time.monotonic()
        with pytest.raises(GroupBroken, match=r"rank 1 did not join within 0\.3 s"):
            form(listener, join, 0.3)
        assert time.monotonic() - started < 3.0, "a stranger used to cost a second each"


def test_a_rank_may_listen_everywhere() -> None:
    with listen("") as listener:
        port = listener.getsockname()[1]
        socket.create_connection((LOOPBACK, port), 1.0).close()
