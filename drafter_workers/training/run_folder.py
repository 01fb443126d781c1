"""The folder of a training run: of one job, for one process at a time, with a log that is whole."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from drafter_workers.training.checkpoints import FILE as CHECKPOINT
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import Record

JOB, LOG = "job.json", "log.jsonl"
FOLLOW_S = 0.5  # between two looks at a log that other processes write


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around what is written to a folder. Raises TrainingError if it cannot be."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _unwritable(folder, error) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds a folder for one run. Raises TrainingError if it holds a model of someone else's."""
    if (folder / "config.json").is_file() and not (folder / JOB).is_file():
        raise TrainingError(f"{folder} holds a model that no run here made; give another folder")
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise TrainingError(
            f"another run trains in {folder}; let it finish or end it, or give another folder"
        ) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def claim(folder: Path, job: Mapping[str, object], free: Sequence[str]) -> None:
    """Write down what is made in the folder; `free` names what may differ when it goes on.

    Raises TrainingError if something else has been begun there.
    """
    asked = json.loads(json.dumps(job, default=str))
    path = folder / JOB
    if path.is_file() and (folder / CHECKPOINT).is_file():
        known, new = _flat(_read(path)), _flat(asked)
        different = [name for name in new if known.get(name, new[name]) != new[name]]
        if named := ", ".join(name for name in different if name not in free):
            raise TrainingError(
                f"{folder} holds a run with another {named}; give another folder, or the same "
                "options to go on with it"
            )
    write_whole(path, json.dumps(asked, indent=1) + "\n")


def records_until(folder: Path, step: int) -> list[Record]:
    """What was told up to a step, 0: nothing. What an interrupted run told later is taken back."""
    kept = _told(folder) if step else []
    records = [record for record in kept if record.step <= step]
    write_whole(folder / LOG, "".join(map(_line, records)))
    return records


@contextmanager
def followed(folder: Path, told: Callable[[Record], object]) -> Iterator[None]:
    """Tells what other processes append to the log meanwhile, from a thread."""
    over, seen = threading.Event(), len(_told(folder))

    def follow() -> None:
        nonlocal seen
        is_over = False
        while not is_over:
            is_over = over.wait(FOLLOW_S)
            for record in _told(folder)[seen:]:
                seen += 1
                told(record)

    thread = threading.Thread(target=follow, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def append(folder: Path, record: Record) -> None:
    """Write one more line of the log."""
    with writing(folder), (folder / LOG).open("a") as log:
        log.write(_line(record))


def _line(record: Record) -> str:
    return json.dumps(asdict(record)) + "\n"


def _unwritable(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"cannot write to {folder} ({error}); make room there, or make it writable, and run the "
        "same command again: it goes on from the last checkpoint"
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole or old, whatever happens meanwhile. Raises TrainingError."""
    unfinished = path.with_name(f"{path.name}.part")
    with writing(path.parent):
        unfinished.write_text(text)
        unfinished.replace(path)


def _told(folder: Path) -> list[Record]:
    path = folder / LOG
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [record for line in lines if (record := _record(line))]


def _record(text: str) -> Record | None:
    """None for a line that was cut short."""
    try:
        raw = json.loads(text)
        return Record(int(raw["step"]), dict(raw["values"]), float(raw["left_s"]))
    except (ValueError, TypeError, KeyError):
        return None


def _read(path: Path) -> dict[str, object]:
    try:
        known: dict[str, object] = json.loads(path.read_text())
        if not isinstance(known, dict):
            raise ValueError("it is no JSON object")
        return known
    except ValueError as error:
        raise TrainingError(f"{path} cannot be read ({error}); give another folder") from error


def _flat(job: Mapping[str, object]) -> dict[str, object]:
    """Options in groups as group.option."""
    flat: dict[str, object] = {}
    for name, value in job.items():
        inner = _flat(value) if isinstance(value, dict) else {}
        flat |= {f"{name}.{key}": each for key, each in inner.items()} or {name: value}
    return flat
