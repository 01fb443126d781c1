"""What the command line shows while it works: progress, streamed text, errors with a remedy."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# gRPC's own log says nothing a user can act on. It is read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class StageBars:
    """One bar per stage; call it with (stage, done, total)."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=total or None)
        self._progress.update(self._bars[stage], completed=done, total=total or None)


@contextmanager
def stage_bars() -> Iterator[StageBars]:
    """Bars on standard error for as long as the work lasts: the time it took, and what is left."""
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=False) as progress:
        yield StageBars(progress)


def stream(text: str) -> None:
    """Show text as it comes, as it is."""
    out.file.write(text)
    out.file.flush()


def fail(error: Exception) -> None:
    """Say what went wrong, in one line."""
    err.print("error:", style="bold red", end=" ")
    err.print(str(error) or type(error).__name__, markup=False, soft_wrap=True)
