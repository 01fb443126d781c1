"""One rank's end of its group: sums in rank order, the first rank's choice, and that all agree.

A group lives for one generation; the rank and its weights outlive it. Before the first one a rank
is by itself, as the self-test wants it, and after one that broke it is until it joins the next.
"""

import socket
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.codec import encode
from protos.messages import Join, Stepped
from protos.worker import GroupBroken, ProtocolError
from target_workers.mesh import Mesh, form, listen
from target_workers.model.shard import Shard
from target_workers.nccl import Nccl

WIDE = (torch.float32, torch.float64)
# The first rank may wait for another before it answers; whoever waits for it waits longer.
RELAY_S = 0.5
WORD_BITS = (1 << 64) - 1


class Group:
    """The Peers of a rank, and what its Forward needs. Every call raises GroupBroken.

    Tensors on a CPU travel over the mesh; partial sums on a GPU over NCCL.
    """

    def __init__(
        self, shard: Shard, *, host: str = "", device: str = "cpu", timeout_s: float = 5.0
    ) -> None:
        self._shard = shard
        self._device = device
        self._timeout_s = timeout_s
        self._listener: socket.socket = listen(host)
        self._mesh: Mesh | None = None
        self._nccl: Nccl | None = None
        self._history = 0

    @property
    def port(self) -> int:
        """Where the other ranks find this one."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def is_first(self) -> bool:
        return self._shard.rank == 0

    def join(self, join: Join) -> None:
        self.leave()
        asked, own = (join.rank, len(join.peers)), (self._shard.rank, self._shard.size)
        if asked != own:
            raise ProtocolError(
                f"asked to be rank {asked[0]} of {asked[1]}, it holds the part of {own[0]} of "
                f"{own[1]}; give every rank the part it is placed for"
            )
        self._history = 0
        self._mesh = form(self._listener, join, self._timeout_s)
        self.agree(join.generation)
        if self._device == "cuda":
            self._nccl = Nccl(self._mesh, self._shard, join, self._timeout_s)

    def leave(self) -> None:
        self._end(f"rank {self._shard.rank} left the group")

    @property
    def counts(self) -> dict[str, int]:
        mesh = self._mesh
        if mesh is None:
            return {}
        return {"exchanges": mesh.exchanges, "exchange_us": int(1e6 * mesh.spent_s)}

    def agree(self, *words: int) -> None:
        own = (*(word & WORD_BITS for word in words), self._history)
        layout = struct.Struct(f"!{len(own)}Q")
        mesh = self._joined()
        said = {peer: bytearray(layout.size) for peer in mesh.others}
        mesh.exchange(
            dict.fromkeys(said, memoryview(layout.pack(*own))),
            {peer: memoryview(room) for peer, room in said.items()},
        )
        for peer, theirs in said.items():
            if layout.unpack(theirs) != own:
                mine = f"rank {self._shard.rank} is at {own}"
                raise self.broken(f"rank {peer} is at {layout.unpack(theirs)}, {mine}")

    def answered(self, stepped: Stepped) -> None:
        # Only the first rank knows how sure it was, and why it failed.
        verdicts = tuple(
            replace(v, scores=(), error="error" * bool(v.error)) for v in stepped.verdicts
        )
        untimed = replace(stepped, verdicts=verdicts, prompts=(), forward_s=0.0, idle_s=0.0)
        self._history = zlib.crc32(encode(untimed), self._history)

    def broken(self, cause: str) -> GroupBroken:
        """End the group for this cause, which the other ranks hear."""
        self._end(cause)
        return GroupBroken(cause)

    def failed(self, error: Exception) -> GroupBroken:
        """End the group because this rank cannot do its part."""
        why = f"its forward failed: {type(error).__name__}: {error}"
        return self.broken(f"rank {self._shard.rank}: {why}")

    def reduce(self, partial: Tensor) -> Tensor:
        """A rank's partial sums to those of all, added up in rank order in float32 or wider."""
        if self._mesh is None:
            return partial
        part = partial if partial.dtype in WIDE else partial.float()
        parts = self._gather(part.contiguous())
        total = parts[0] + parts[1]
        for more in parts[2:]:
            total += more
        return total

    def join_columns(self, own: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Columns [n, width of each rank] on the CPU as [n, all], at the first rank alone."""
        mesh = self._joined()
        if not self.is_first:
            mesh.exchange({0: _bytes(own.contiguous())}, {})
            return None
        parts = [own, *(own.new_empty(len(own), width) for width in widths[1:])]
        mesh.exchange({}, {peer: _bytes(parts[peer]) for peer in mesh.others})
        return torch.cat(parts, 1)

    def spread(self, numbers: Tensor) -> Tensor:
        """The first rank's numbers (on the CPU), at every rank; the others give the room."""
        mesh = self._joined()
        if self.is_first:
            mesh.exchange(dict.fromkeys(mesh.others, _bytes(numbers)), {})
        else:
            mesh.exchange({}, {0: _bytes(numbers)}, RELAY_S)
        return numbers

    def settle(self) -> None:
        """Until what was computed on a GPU is there: a sum may wait for a rank that is gone."""
        if self._nccl is not None and not self._nccl.is_done_within(self._timeout_s):
            raise self.broken(f"sums over the ranks did not end within {self._timeout_s:g} s")

    def _gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, by rank."""
        if self._nccl is not None:
            return self._nccl.gather(part)
        mesh = self._joined()
        parts = [part if i == self._shard.rank else torch.empty_like(part) for i in self._ranks]
        mesh.exchange(
            dict.fromkeys(mesh.others, _bytes(part)),
            {peer: _bytes(parts[peer]) for peer in mesh.others},
        )
        return parts

    @property
    def _ranks(self) -> range:
        return range(self._shard.size)

    def _joined(self) -> Mesh:
        if self._mesh is None:
            raise GroupBroken(f"rank {self._shard.rank} is in no group; it must join one first")
        return self._mesh

    def _end(self, cause: str) -> None:
        mesh, self._mesh = self._mesh, None
        nccl, self._nccl = self._nccl, None
        if mesh is not None:
            mesh.close(cause)
        if nccl is not None:
            nccl.abort()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: NDArray[np.generic] = tensor.numpy()
    return array.data.cast("B")
