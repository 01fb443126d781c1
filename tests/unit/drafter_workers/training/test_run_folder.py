"""A run's folder: what is spoilt in it is named, and a disk without room says what to do."""

import errno
import json
from pathlib import Path

import pytest

from drafter_workers.training.checkpoints import FILE
from drafter_workers.training.errors import TrainingError
from drafter_workers.training.loop import Record
from drafter_workers.training.run_folder import JOB, LOG, alone, append, claim, records_until

RECORDS = [Record(step, {"loss": 1.0 / step}, 3.0) for step in (1, 2, 3)]


def test_a_log_is_read_up_to_a_step_whatever_else_is_in_it(tmp_path: Path) -> None:
    for record in RECORDS:
        append(tmp_path, record)
    spoilt = b'[1]\n"text"\n{"step": 2, "values": 3, "left_s": 1}\n{"step": 2}\n\xff\xfe\n{"st'
    (tmp_path / LOG).write_bytes((tmp_path / LOG).read_bytes() + spoilt)
    assert records_until(tmp_path, 2) == RECORDS[:2]
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert records_until(tmp_path, 0) == [] and (tmp_path / LOG).read_text() == ""


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_job_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / JOB).write_text(content)
    (tmp_path / FILE).write_bytes(b"")
    with pytest.raises(TrainingError, match=rf"{JOB} cannot be read .*give another folder"):
        claim(tmp_path, {"steps": 3}, ())


def test_a_run_without_a_checkpoint_may_become_another(tmp_path: Path) -> None:
    claim(tmp_path, {"steps": 3, "loop": {"rate": 1}}, ())
    claim(tmp_path, {"steps": 4, "loop": {"rate": 1}}, ())
    (tmp_path / FILE).write_bytes(b"")
    claim(tmp_path, {"steps": 4, "loop": {"rate": 2}}, ("loop.rate",))
    with pytest.raises(TrainingError, match="another steps"):
        claim(tmp_path, {"steps": 5, "loop": {"rate": 2}}, ("loop.rate",))


def test_a_disk_without_room_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, RECORDS[0])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Path, "write_text", full)
    for write in (
        lambda: append(tmp_path, RECORDS[1]),
        lambda: claim(tmp_path, {"steps": 3}, ()),
        lambda: records_until(tmp_path, 0),
    ):
        with pytest.raises(TrainingError, match=r"No space left .*run the same command again"):
            write()
    monkeypatch.undo()
    assert records_until(tmp_path, 1) == RECORDS[:1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(TrainingError, match=r"cannot write to .*same command again"),
        alone(tmp_path / "file" / "out"),
    ):
        pass
