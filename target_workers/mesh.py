"""Connections between the ranks of one group: every rank to every other, bytes both ways.

Whatever goes wrong names the rank it comes from, within a bound. A frame says which exchange it
belongs to and how long it is, at both its ends, so ranks out of step are found out instead of
waiting or misreading, and what a rank says when it leaves is not taken for the rest of a body.
"""

import hmac
import math
import select
import socket
import struct
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from protos.messages import Join
from protos.worker import GroupBroken
from target_workers.door import NotThere, admit, introduction, proof

_HEADER = struct.Struct("!QQ")  # number of the exchange, bytes that follow
_FAREWELL = (1 << 64) - 1  # instead of a number: no exchange follows
_TAIL = struct.Struct("!I16s")  # bytes of the text before it, proof of the key
_MAX_TEXT_BYTES = 1000
_END_BYTES = _MAX_TEXT_BYTES + _TAIL.size
_LAST_WORDS_S = 0.2


class _Frame:
    """A frame on its way: `parts` are the buffers yet to be sent, or to be filled."""

    def __init__(self, header: bytes | bytearray, body: memoryview) -> None:
        self.header = header
        self.body = body
        self.trailer = type(header)(header)  # the header again
        self.parts = [memoryview(header), body, memoryview(self.trailer)]

    def advance(self, count: int) -> None:
        while self.parts and count >= len(self.parts[0]):
            count -= len(self.parts.pop(0))
        if count:
            self.parts[0] = self.parts[0][count:]

    def end(self) -> bytes:
        """The last bytes that have passed, the header's apart."""
        left = sum(map(len, self.parts))
        passed = max(0, len(self.body) + len(self.trailer) - left)
        of_body = min(passed, len(self.body))
        body = self.body[max(0, of_body - _END_BYTES) : of_body]
        return (bytes(body) + self.trailer[: passed - of_body])[-_END_BYTES:]


class Mesh:
    """One rank's connections; nothing waits longer than `timeout_s` for another rank."""

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], key: str, timeout_s: float
    ) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._proof = proof(key)
        self._timeout_s = timeout_s
        self._turn = 0
        self.spent_s = 0.0  # in exchanges, waiting included
        for connection in self._sockets.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def others(self) -> Collection[int]:
        """The ranks at the other ends; none after the end."""
        return self._sockets.keys()

    @property
    def exchanges(self) -> int:
        """How many there have been."""
        return self._turn

    def exchange(
        self,
        sends: Mapping[int, memoryview],
        receives: Mapping[int, memoryview],
        extra_s: float = 0.0,
    ) -> None:
        """Send to ranks and fill buffers from ranks, all at once; every rank calls it in turn.

        `extra_s` is for a wait on a rank that may itself wait for another. Raises GroupBroken;
        the connections are closed then.
        """
        if not self._sockets:
            raise GroupBroken(f"rank {self._rank}: its group has ended")
        self._turn += 1
        out = {i: _Frame(_HEADER.pack(self._turn, len(v)), v) for i, v in sends.items()}
        into = {i: _Frame(bytearray(_HEADER.size), v) for i, v in receives.items()}
        started = time.monotonic()
        deadline = started + self._timeout_s + extra_s
        try:
            while True:
                out = {i: frame for i, frame in out.items() if not self._push(i, frame)}
                into = {i: frame for i, frame in into.items() if not self._pull(i, frame)}
                if not out and not into:
                    self.spent_s += time.monotonic() - started
                    return
                self._wait(out.keys(), into.keys(), deadline)
        except GroupBroken as broken:
            self.close(str(broken))
            raise

    def close(self, cause: str) -> None:
        """End all connections; the others hear why, if they still listen."""
        text = cause.encode()[:_MAX_TEXT_BYTES]
        tail = text + _TAIL.pack(len(text), self._proof[:16])
        deadline = time.monotonic() + _LAST_WORDS_S
        for connection in self._sockets.values():
            with suppress(OSError):  # It is gone, or does not read.
                connection.settimeout(_left(deadline))
                connection.sendall(_HEADER.pack(_FAREWELL, len(tail)) + tail)
                connection.shutdown(socket.SHUT_WR)
        for connection in self._sockets.values():
            with connection:
                # To close before all is read would take back what was just said.
                _read_out(connection, deadline)
        self._sockets.clear()

    def _push(self, peer: int, frame: _Frame) -> bool:
        """Send what goes out at once; True if that is all."""
        try:
            while frame.parts:
                frame.advance(self._sockets[peer].sendmsg(frame.parts))
        except BlockingIOError:
            return False
        except OSError:
            raise self._lost(peer) from None
        return True

    def _pull(self, peer: int, frame: _Frame) -> bool:
        """Receive what is there; True if that is all."""
        try:
            while frame.parts:
                is_header = len(frame.parts) == 3
                count = self._sockets[peer].recv_into(frame.parts[0])
                if not count:
                    raise self._lost(peer, frame.end())
                frame.advance(count)
                if is_header and len(frame.parts) < 3:
                    self._check(peer, frame)
            if frame.trailer != frame.header:
                raise self._lost(peer, frame.end())
        except BlockingIOError:
            return False
        except OSError:
            raise self._lost(peer) from None
        return True

    def _check(self, peer: int, frame: _Frame) -> None:
        turn, size = _HEADER.unpack(frame.header)
        if turn == _FAREWELL:
            raise self._lost(peer)
        if (turn, size) != (self._turn, len(frame.body)):
            raise GroupBroken(
                f"rank {peer} sends {size} bytes as exchange {turn}, "
                f"rank {self._rank} expects {len(frame.body)} as exchange {self._turn}"
            )

    def _wait(self, out: Collection[int], into: Collection[int], deadline: float) -> None:
        """Until a socket can go on. Raises GroupBroken at the deadline."""
        poll = select.poll()
        for peer in {*out, *into}:
            wanted = select.POLLOUT * (peer in out) | select.POLLIN * (peer in into)
            poll.register(self._sockets[peer], wanted)
        if not poll.poll(math.ceil(1000 * _left(deadline))):
            raise GroupBroken(f"{_ranks({*out, *into})} took longer than {self._timeout_s:g} s")

    def _lost(self, peer: int, came: bytes = b"") -> GroupBroken:
        """Why a rank's connection has ended: its last words, which may name another, if any.

        They may have come in the place of a body that broke off.
        """
        words = _last_words(self._sockets[peer], came, self._proof)
        return GroupBroken(words or f"rank {peer} is gone; its log may say why")


def listen(host: str) -> socket.socket:
    """A socket at a free port of `host` (empty: at every address) for the other ranks."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def form(listener: socket.socket, join: Join, timeout_s: float) -> Mesh:
    """Connect to the lower ranks and wait for the higher ones. Raises GroupBroken."""
    deadline = time.monotonic() + timeout_s
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(join.rank):
            sockets[peer] = _dial(peer, join, deadline)
        sockets |= admit(listener, join, range(join.rank + 1, len(join.peers)), deadline)
    except NotThere as missing:
        _close(sockets.values())
        raise GroupBroken(f"{_ranks(missing.ranks)} did not join within {timeout_s:g} s") from None
    except BaseException:
        _close(sockets.values())
        raise
    return Mesh(join.rank, sockets, join.key, timeout_s)


def _dial(peer: int, join: Join, deadline: float) -> socket.socket:
    host, _, port = join.peers[peer].rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _left(deadline))
        connection.sendall(introduction(join))
    except OSError as error:
        why = f"cannot be reached at {join.peers[peer]} ({error.strerror or error})"
        raise GroupBroken(f"rank {peer} {why}") from error
    return connection


def _last_words(connection: socket.socket, end: bytes, key_proof: bytes) -> str:
    """What a rank said when it ended its connection properly; nothing if it did not."""
    end += _read_out(connection, time.monotonic() + _LAST_WORDS_S)
    if len(end) < _TAIL.size:
        return ""
    length, given = _TAIL.unpack(end[-_TAIL.size :])
    text = end[: -_TAIL.size][-length:] if length else b""
    return text.decode(errors="replace") if hmac.compare_digest(given, key_proof[:16]) else ""


def _read_out(connection: socket.socket, deadline: float) -> bytes:
    """Read to the end, whichever way it comes, or to the deadline; the last bytes."""
    end = b""
    with suppress(OSError):
        connection.settimeout(_left(deadline))
        while data := connection.recv(1 << 16):
            end = (end + data)[-_END_BYTES:]
            connection.settimeout(_left(deadline))
    return end


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _ranks(ranks: Iterable[int]) -> str:
    first, *more = map(str, sorted(ranks))
    return f"ranks {', '.join([first, *more])}" if more else f"rank {first}"


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
