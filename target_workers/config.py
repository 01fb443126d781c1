"""What a target worker is configured with: checked when it is made, never changed."""

from dataclasses import dataclass

DTYPES = ("bf16", "fp16", "fp32", "fp64")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model folder, how it is computed, and the memory and rows it may use.

    `num_pages` pages of `page_size` tokens fit in its cache; a step has at most `max_rows` rows.
    """

    path: str
    device: str = "cpu"
    dtype: str = "bf16"
    exact: bool = True
    page_size: int = 16
    num_pages: int = 4096
    max_rows: int = 512
    max_context: int = 8192

    def __post_init__(self) -> None:
        for name, value in (
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("max_rows", self.max_rows),
            ("max_context", self.max_context),
        ):
            if value < 1:
                raise ValueError(f"target.{name} is {value}: it must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"target.dtype is {self.dtype!r}: it must be one of {DTYPES}")
