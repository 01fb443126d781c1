"""The door of a group of ranks: who connects says which rank it is; strangers take nobody's time.

Everyone at the door is listened to at once, within one bound for all.
"""

import hashlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Collection
from contextlib import suppress

from protos.messages import Join

_INTRODUCTION = struct.Struct("!32sQI")  # proof of the key, generation, rank
MAX_CALLERS = 64  # who waits longest without a word is turned away first


class NotThere(Exception):
    """Ranks that did not introduce themselves in time."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__()
        self.ranks = ranks


def proof(key: str) -> bytes:
    """What shows that one knows the key."""
    return hashlib.sha256(key.encode()).digest()


def introduction(join: Join) -> bytes:
    """What a rank says first to another."""
    return _INTRODUCTION.pack(proof(join.key), join.generation, join.rank)


def admit(
    listener: socket.socket, join: Join, awaited: Collection[int], deadline: float
) -> dict[int, socket.socket]:
    """Wait until every awaited rank has introduced itself; their connections.

    Raises NotThere at the deadline; nothing is left open then.
    """
    found: dict[int, socket.socket] = {}
    callers: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    try:
        while missing := sorted(set(awaited) - found.keys()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotThere(missing)
            _listen(listener, callers, join, found, left)
    except BaseException:
        _close(found.values())
        raise
    finally:
        _close(callers)
    _close([found.pop(rank) for rank in found.keys() - set(awaited)])
    return found


def _listen(
    listener: socket.socket,
    callers: dict[socket.socket, bytes],
    join: Join,
    found: dict[int, socket.socket],
    wait_s: float,
) -> None:
    """Hear whoever has something to say."""
    for ready in _ready(listener, callers, wait_s):
        if ready is listener:
            _answer(listener, callers)
        else:
            _hear(ready, callers, join, found)


def _ready(
    listener: socket.socket, callers: Collection[socket.socket], wait_s: float
) -> list[socket.socket]:
    """Whose turn it is; the listener comes last. None if the wait is over."""
    with selectors.DefaultSelector() as selector:
        for each in (*callers, listener):
            selector.register(each, selectors.EVENT_READ)
        ready = {key.fileobj for key, _ in selector.select(wait_s)}
    return [each for each in (*callers, listener) if each in ready]


def _answer(listener: socket.socket, callers: dict[socket.socket, bytes]) -> None:
    """Take in one who is outside: all are heard before the next, so none goes unheard."""
    with suppress(OSError):  # It went away again.
        caller, _ = listener.accept()
        caller.setblocking(False)
        callers[caller] = b""
        if len(callers) > MAX_CALLERS:
            longest = next(iter(callers))
            del callers[longest]
            longest.close()


def _hear(
    caller: socket.socket,
    callers: dict[socket.socket, bytes],
    join: Join,
    found: dict[int, socket.socket],
) -> None:
    """Listen to a caller; once it has said all, it is found to be a rank, or turned away."""
    if caller not in callers:
        return  # Turned away since.
    try:
        more = caller.recv(_INTRODUCTION.size - len(callers[caller]))
    except BlockingIOError:
        return
    except OSError:
        more = b""
    callers[caller] += more
    said = callers[caller]
    if more and len(said) < _INTRODUCTION.size:
        return
    del callers[caller]
    rank = _rank(said, join) if len(said) == _INTRODUCTION.size else -1
    if rank < 0 or rank in found:
        caller.close()
    else:
        found[rank] = caller


def _rank(said: bytes, join: Join) -> int:
    """-1 for who does not know the key, and for a rank of another generation."""
    given, generation, rank = _INTRODUCTION.unpack(said)
    is_ours = hmac.compare_digest(given, proof(join.key)) and generation == join.generation
    return int(rank) if is_ours else -1


def _close(connections: Collection[socket.socket]) -> None:
    for connection in connections:
        connection.close()
