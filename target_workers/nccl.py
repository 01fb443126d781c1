"""Partial sums between GPUs over NCCL, beside the mesh of the same group. Not yet run."""

import time
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from protos.messages import Join
from target_workers.mesh import Mesh
from target_workers.model.shard import Shard

POLL_S = 0.0002
_PORT_BYTES = 4


class Nccl:
    """One generation's communicator; its operations end within a bound or are aborted."""

    def __init__(self, mesh: Mesh, shard: Shard, join: Join, timeout_s: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        self._size = shard.size
        store = PrefixStore(join.key, _store(mesh, shard, join, timedelta(seconds=timeout_s)))
        options = ProcessGroupNCCL.Options()
        self._group = ProcessGroupNCCL(store, shard.rank, shard.size, options)

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, by rank, in stream order."""
        parts = part.new_empty(self._size, *part.shape)
        self._group._allgather_base(parts, part).wait()  # type: ignore[attr-defined]
        return list(parts)

    def is_done_within(self, timeout_s: float) -> bool:
        """Wait for all that was asked of this GPU so far; False if it takes too long."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def abort(self) -> None:
        """End the communicator, whatever it waits for."""
        self._group.abort()


def _store(mesh: Mesh, shard: Shard, join: Join, timeout: timedelta) -> TCPStore:
    """Where the ranks find NCCL's id: a store of the first rank, its port told over the mesh."""
    host = join.peers[0].rpartition(":")[0].strip("[]")
    port = bytearray(_PORT_BYTES)
    if shard.rank:
        mesh.exchange({}, {0: memoryview(port)})
        return TCPStore(host, int.from_bytes(port, "big"), timeout=timeout)
    store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    told = memoryview(store.port.to_bytes(_PORT_BYTES, "big"))
    mesh.exchange(dict.fromkeys(mesh.others, told), {})
    return store
