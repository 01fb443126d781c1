"""What one rank of a tensor-parallel decoder holds. Pure: shapes in, ranges out.

Heads are split by whole groups (one key/value head and the query heads that share it), unevenly if
need be; where ranks outnumber groups, several ranks hold a group's keys and values and share out
its query heads. The columns of the MLP and the rows of the vocabulary are split in whole blocks.
"""

from dataclasses import dataclass, replace

from target_workers.model.config import ModelConfig, ModelError

BLOCK = 16  # whole vectors for the kernels, whatever the number of ranks


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: it must be below the number")


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Portion:
    """The query heads, key/value heads, columns of the MLP and rows of the head of one rank."""

    heads: range
    kv_heads: range
    inner: range
    vocab: range


def portion(config: ModelConfig, shard: Shard) -> Portion:
    """What a rank holds of a model. Raises ModelError for more ranks than can have a part."""
    heads, kv_heads = _heads(config, shard)
    return Portion(
        heads,
        kv_heads,
        _blocks("columns of the MLP", config.intermediate_size, shard),
        _blocks("tokens", config.vocab_size, shard),
    )


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The shape of the decoder that a rank computes with; the vocabulary is that of the whole."""
    held = portion(config, shard)
    return replace(
        config,
        num_heads=len(held.heads),
        num_kv_heads=len(held.kv_heads),
        intermediate_size=len(held.inner),
    )


def described(config: ModelConfig, shard: Shard) -> str:
    """What a rank holds, for people."""
    held = portion(config, shard)
    parts = {
        "heads": (held.heads, config.num_heads),
        "key/value heads": (held.kv_heads, config.num_kv_heads),
        "columns of the MLP": (held.inner, config.intermediate_size),
        "tokens of the head": (held.vocab, config.vocab_size),
    }
    return ", ".join(f"{len(part)} of {total} {name}" for name, (part, total) in parts.items())


def _heads(config: ModelConfig, shard: Shard) -> tuple[range, range]:
    """A rank's query heads and the key/value heads they attend to."""
    groups, size = config.num_kv_heads, shard.size
    if size > config.num_heads:
        raise ModelError(
            f"{size} ranks cannot share {config.num_heads} attention heads; "
            f"set target.tp to {config.num_heads} or less"
        )
    if size <= groups:
        kv_heads = _part(groups, shard)
        heads = range(kv_heads.start * config.group, kv_heads.stop * config.group)
        return heads, kv_heads
    group = next(g for g in range(groups) if shard.rank in _part(size, Shard(g, groups)))
    sharers = _part(size, Shard(group, groups))
    part = _part(config.group, Shard(shard.rank - sharers.start, len(sharers)))
    first = group * config.group
    return range(first + part.start, first + part.stop), range(group, group + 1)


def _blocks(what: str, total: int, shard: Shard) -> range:
    blocks = -(-total // BLOCK)
    if shard.size > blocks:
        raise ModelError(
            f"{shard.size} ranks cannot share {total} {what} in blocks of {BLOCK}; "
            f"set target.tp to {blocks} or less"
        )
    part = _part(blocks, shard)
    return range(part.start * BLOCK, min(part.stop * BLOCK, total))


def _part(total: int, shard: Shard) -> range:
    """A rank's share of `total` things in a row; the first ranks have one more if need be."""
    each, more = divmod(total, shard.size)
    start = shard.rank * each + min(shard.rank, more)
    return range(start, start + each + (shard.rank < more))
