"""What a target worker is configured with: checked when it is made, never changed."""

from dataclasses import dataclass

from target_workers.model.config import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model folder, how it is computed, and the memory and rows it may use.

    `num_pages` pages of `page_size` tokens fit in its cache; a step has at most `max_rows` rows.
    Only tokens below `vocab_size` are known to the tokenizer (0: all of the model's); the rows that
    pad an embedding are never chosen. `threads` are the numbers of threads that steps may ask for
    (none named: one, and all there are); exact mode is proven for each.
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

    def __post_init__(self) -> None:
        for name, value in (
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("max_rows", self.max_rows),
            ("max_context", self.max_context),
        ):
            if value < 1:
                raise ValueError(f"target.{name} is {value}: it must be at least 1")
        if self.vocab_size < 0:
            raise ValueError(f"target.vocab_size is {self.vocab_size}: it must not be negative")
        if min(self.threads, default=1) < 1:
            raise ValueError(f"target.threads is {self.threads}: each must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"target.dtype is {self.dtype!r}: it must be one of {[*DTYPE_BYTES]}")
