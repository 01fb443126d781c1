"""What follows from the shapes of the models alone: what cannot run, and who keeps how much."""

from collections.abc import Sequence
from pathlib import Path

from services.config import Config, TargetConfig
from services.errors import ConfigError
from services.memory_plan import Holder
from services.plan import Plan
from services.preflight import Models
from target_workers.model.config import ModelConfig, ModelError, read_config
from target_workers.model.files import ends_hash
from target_workers.model.footprint import Footprint
from target_workers.model.shard import Shard, local_config, portion


def check_kernels(target: TargetConfig, shape: ModelConfig) -> None:
    """Refuse what only our own CPU kernels give, where they do not run."""
    if target.device == "cpu" and shape.has_kernels(target.dtype):
        return
    needs = "needs a CPU, bf16 or fp32, and heads of a multiple of 16"
    if target.weight_dtype:
        raise ConfigError(f"target.weight_dtype: {target.weight_dtype} {needs}; leave it empty")
    if target.is_exact:
        raise ConfigError(f"target.exact: exact mode {needs}; set it to false")


def check_borrowed(models: Models) -> None:
    """Refuse a drafter that borrows the embedding and head of another target."""
    lender = ends_hash(models.target)
    for index, folder in enumerate(models.drafters):
        if read_config(folder).get("borrows_from", lender) != lender:
            raise ConfigError(
                f"drafter.{index}.path: {folder} is a student of another model than "
                f"{models.target}; take one that was made for this target"
            )


def draft_vocab(folder: Path) -> int:
    """How many tokens a student can propose; 0: all. Raises ConfigError."""
    size = read_config(folder).get("draft_vocab_size", 0)
    if not isinstance(size, int) or size < 0:
        raise ConfigError(f"{folder}: draft_vocab_size is {size!r}; export the student again")
    return size


def holders(
    config: Config, plan: Plan, shapes: Sequence[ModelConfig], folders: Sequence[Path]
) -> list[Holder]:
    """Who keeps what: every rank of the target its part, every drafter its model."""
    target, found = config.target, []
    for seat in plan.target_seats:
        footprint = _rank_footprint(target, shapes[0], seat.rank)
        found.append(Holder(seat.name, footprint, target=True, shared=target.device == "cpu"))
    for seat in plan.drafters:
        on_cpu = config.drafter[seat.group].device == "cpu"
        footprint = Footprint(
            shapes[1 + seat.group],
            target.dtype,
            head_rows=draft_vocab(folders[seat.group]),
            weight_dtype=config.drafter[seat.group].weight_dtype,
            on_cpu=on_cpu,
        )
        found.append(Holder(seat.name, footprint, shared=on_cpu))
    return found


def _rank_footprint(target: TargetConfig, shape: ModelConfig, rank: int) -> Footprint:
    shard = Shard(rank, target.tp)
    try:
        part, head_rows = local_config(shape, shard), len(portion(shape, shard).vocab)
    except ModelError as error:
        raise ConfigError(f"target.tp: {error}") from error
    return Footprint(
        part,
        target.dtype,
        target.kv_dtype,
        head_rows,
        weight_dtype=target.weight_dtype,
        on_cpu=target.device == "cpu",
    )
