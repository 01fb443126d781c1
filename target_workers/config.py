"""What a target worker is configured with: checked when it is made, never changed."""

from dataclasses import dataclass

from target_workers.model.config import DTYPE_BYTES, KV_DTYPES, WEIGHT_DTYPES
from target_workers.model.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model folder, how it is computed, and the memory and rows it may use.

    `num_pages` pages of `page_size` tokens fit in its cache, whose keys and values are kept as
    `kv_dtype` (empty: as `dtype`); matrices as `weight_dtype`, "int8" or empty. A step has at most
    `max_rows` rows.
    Only tokens below `vocab_size` are known to the tokenizer (0: all of the model's); the rows that
    pad an embedding are never chosen. `threads` are the numbers of threads that steps may ask for
    (none named: one, and all there are); exact mode is proven for each. A `shard` of several is
    one rank: it listens for the others at `host` (empty: everywhere) and waits for none longer than
    `rank_timeout_s`.
    """

    path: str
    device: str = "cpu"
    dtype: str = "bf16"
    exact: bool = True
    page_size: int = 16
    num_pages: int = 4096
    max_rows: int = 512
    max_context: int = 8192
    vocab_size: int = 0
    threads: tuple[int, ...] = ()
    kv_dtype: str = ""
    weight_dtype: str = ""
    shard: Shard = WHOLE
    host: str = ""
    rank_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value in (
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("max_rows", self.max_rows),
            ("max_context", self.max_context),
        ):
            if value < 1:
                raise ValueError(f"target.{name} is {value}: it must be at least 1")
        if self.rank_timeout_s <= 0:
            raise ValueError(f"target.rank_timeout_s is {self.rank_timeout_s}: it must be positive")
        if self.vocab_size < 0:
            raise ValueError(f"target.vocab_size is {self.vocab_size}: it must not be negative")
        if min(self.threads, default=1) < 1:
            raise ValueError(f"target.threads is {self.threads}: each must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"target.dtype is {self.dtype!r}: it must be one of {[*DTYPE_BYTES]}")
        if self.weight_dtype not in WEIGHT_DTYPES:
            kinds = 'empty or "int8"'
            raise ValueError(f"target.weight_dtype is {self.weight_dtype!r}: it must be {kinds}")
        if self.kv_dtype not in ("", *KV_DTYPES):
            kinds = f"empty or one of {[*KV_DTYPES]}"
            raise ValueError(f"target.kv_dtype is {self.kv_dtype!r}: it must be {kinds}")
