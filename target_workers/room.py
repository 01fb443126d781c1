"""Whether a device has room for a worker's cache, which only the worker on it can tell."""

import torch

from target_workers.config import TargetConfig
from target_workers.model.config import ModelConfig, ModelError

SPARE = 0.1  # of what is free: for activations


def free_bytes(device: str) -> int | None:
    """What is free on a device of its own; None for the memory of the machine, planned before."""
    if device == "cpu":
        return None
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def check_room(config: TargetConfig, shape: ModelConfig, free: int | None) -> None:
    """Raises ModelError if a cache for the decoder's `shape` does not fit into `free` bytes."""
    if free is None:
        return
    usable, page_size, tp = int(free * (1 - SPARE)), config.page_size, config.shard.size
    each = page_size * shape.token_bytes(config.kv_dtype or config.dtype)
    needed = config.num_pages * each
    if needed <= usable:
        return
    tokens = usable // each * page_size
    if tokens > config.max_context:
        remedies = [f"target.num_pages to {tokens // page_size}"]
    else:
        remedies = [f"limits.max_context below {tokens}"] if tokens else []
    if config.num_pages * page_size * shape.token_bytes("int8") <= usable:
        remedies.append("target.kv_dtype to int8")
    remedies.append(f"target.tp to {tp * -(-needed // usable)}" if tokens else "target.tp higher")
    raise ModelError(
        f"the cache takes {needed >> 20} MiB and {usable >> 20} MiB of {config.device} are left for"
        f" it; set {', or '.join(remedies)}"
    )
