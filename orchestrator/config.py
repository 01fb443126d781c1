"""The orchestrator's limits and speculation settings."""

from dataclasses import dataclass

from orchestrator.request import Mode

SHAPES = ("chain", "tree")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Bounds and settings of the core; times in seconds, `credit` in live nodes per drafter.

    `cores_alone` is the target's share of CPU cores while no drafter works for it,
    `cores_shared` while one does; 0 leaves them as they are.
    """

    max_sequences: int = 8
    max_queue: int = 64
    max_context: int = 8192
    max_request_s: float = 600.0
    step_rows: int = 256
    mode: Mode = Mode.ASYNC
    k: int = 4
    shape: str = "chain"
    credit: int = 32
    patience_s: float = 0.01
    sync_patience_s: float = 1.0
    lookup: bool = True
    recovery_s: float = 30.0
    step_timeout_s: float = 120.0
    cores_alone: int = 0
    cores_shared: int = 0

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_context", "step_rows", "credit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.step_rows < self.max_sequences:
            raise ValueError("step_rows must be at least max_sequences: a row for each of them")
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {SHAPES}, not {self.shape!r}")
        if self.k < 0 or self.max_queue < 0 or self.patience_s < 0 or self.sync_patience_s < 0:
            raise ValueError("k, max_queue and patience must not be negative")
