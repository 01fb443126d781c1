"""A run's course as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafter_workers.training.loop import Record


def draw(records: Sequence[Record], path: Path) -> None:
    """Losses and, below, what was measured on held-out text, over steps: a PNG."""
    figure = Figure(figsize=(7, 6), layout="tight")
    above, below = figure.subplots(2, 1, sharex=True)
    _lines(above, [record for record in records if "loss" in record.values], ("loss",))
    _lines(
        below,
        [record for record in records if "agreement" in record.values],
        ("agreement", "acceptance"),
    )
    above.set_ylabel("loss")
    below.set_ylabel("on held-out text")
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, records: Sequence[Record], names: Sequence[str]) -> None:
    steps = [record.step for record in records]
    for name in names:
        axes.plot(steps, [record.values[name] for record in records], label=name)
    axes.grid(alpha=0.3)
    axes.legend()
