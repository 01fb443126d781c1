"""What a training run leaves for people: a card, a picture, and lines while it works."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from drafter_workers.training.curves import draw
from drafter_workers.training.loop import Record
from drafter_workers.training.run_folder import write_whole

CURVES, CARD = "curves.png", "README.md"


def line(record: Record) -> str:
    """One record, for a terminal."""
    values = ", ".join(f"{name} {value:.4g}" for name, value in record.values.items())
    left = "" if math.isnan(record.left_s) else f"; {record.left_s / 60:.1f} min left"
    return f"step {record.step}: {values}{left}"


def card(folder: Path, job: Mapping[str, object], tokens: int, records: Sequence[Record]) -> None:
    """Write the run's picture and the student's card."""
    draw(records, folder / CURVES)
    losses = [record for record in records if "loss" in record.values]
    looks = [record for record in records if "agreement" in record.values]
    loss = losses[-1].values["loss"] if losses else math.nan
    quality = looks[-1].values if looks else {}
    measured = "\n".join(f"| {name} | {value:.3f} |" for name, value in quality.items())
    write_whole(
        folder / CARD,
        f"# A student of {job['target']}\n\n"
        f"Trained for {records[-1].step if records else 0} steps on {tokens} tokens of "
        f"conversations in which the target answers; the last mean loss is {loss:.4f}.\n\n"
        f"On held-out documents, teacher-forced:\n\n| | |\n|---|---|\n{measured}\n\n"
        f"![curves]({CURVES})\n\n"
        f"Options of the run:\n\n```json\n{json.dumps(job, indent=1, default=str)}\n```\n",
    )
