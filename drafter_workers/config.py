"""What a drafter is configured with: checked when it is made, never changed."""

from dataclasses import dataclass

from target_workers.model.config import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """Limits of growth: nodes per forward, children per node, rows of catching up per forward.

    A candidate with less than `floor` of a chance to be reached waits until it has more. Every
    `report_every` forwards the drafter reports.
    """

    batch: int = 16
    width: int = 1
    feed_rows: int = 256
    floor: float = 5e-4
    report_every: int = 32

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.batch),
            ("width", self.width),
            ("feed_rows", self.feed_rows),
            ("report_every", self.report_every),
        ):
            if value < 1:
                raise ValueError(f"drafter.{name} is {value}: it must be at least 1")
        if not 0.0 < self.floor < 1.0:
            raise ValueError(f"drafter.floor is {self.floor}: it must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter: its method, its weights and the memory it may use.

    `lender` is the target's folder, for a model that borrows from it; `weight_dtype` "int8" keeps
    matrices so. `num_slots` tokens fit in its cache. `vocab_size` is the number of tokens it
    shares with the target (0: all of its own). `rank` orders children at temperature > 0: "argmax"
    by their probability, "noise" by the noise the target draws with.
    """

    path: str
    method: str = "small_model"
    device: str = "cpu"
    dtype: str = "bf16"
    num_slots: int = 65536
    max_rows: int = 512
    max_context: int = 8192
    vocab_size: int = 0
    rank: str = "noise"
    lender: str = ""
    weight_dtype: str = ""
    growth: GrowthConfig = GrowthConfig()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"drafter.dtype is {self.dtype!r}: it must be one of {[*DTYPE_BYTES]}")
        if self.rank not in ("argmax", "noise"):
            raise ValueError(f"drafter.rank is {self.rank!r}: it must be 'argmax' or 'noise'")
        if min(self.num_slots, self.max_rows, self.max_context) < 1 or self.vocab_size < 0:
            raise ValueError("drafter.num_slots, max_rows and max_context must be at least 1")
        if self.max_rows < max(self.growth.batch, self.growth.feed_rows):
            raise ValueError(
                f"drafter.max_rows is {self.max_rows}: it must hold a batch of "
                f"{self.growth.batch} and {self.growth.feed_rows} rows of catching up"
            )
