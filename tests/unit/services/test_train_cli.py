"""What the commands that train say to a person, and what they keep out of training."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services import capturing, distilling
from services.capturing import CaptureJob
from services.cli import main
from services.distilling import DistillJob
from services.train_cli import kept_out

LINE = "step 10: " + ", ".join(f"loss_{n} [0.1234]" for n in range(20))

Called = Callable[..., int]


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Called:
    """The command with these arguments; its exit status."""

    def call() -> int:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return call


@pytest.fixture
def distil(monkeypatch: pytest.MonkeyPatch) -> Called:
    return called(
        monkeypatch, "train", "distill", "--target", "t", "--data", "d", "--out", "o", "--seed", "3"
    )


def test_a_line_is_a_line_however_long(
    distil: Called, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[DistillJob] = []

    def run(job: DistillJob, say: Callable[[str], object], told: object) -> None:
        jobs.append(job)
        say(LINE)

    monkeypatch.setattr(distilling, "distill", run)
    assert distil() == 0
    assert capsys.readouterr().err.splitlines() == [LINE]
    assert jobs[0].loop.seed == jobs[0].batches.seed == 3


def test_an_interrupt_says_that_nothing_is_lost(
    distil: Called, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(distilling, "distill", run)
    assert distil() == 130
    assert "stopped; the same command goes on" in capsys.readouterr().err


def test_prompts_are_kept_out_wherever_the_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = tmp_path / "mine.jsonl"
    assert kept_out([named])[0] == named
    assert Path(__file__).parents[2] / "data/prompts.jsonl" in kept_out(None)
    jobs: list[CaptureJob] = []
    monkeypatch.setattr(capturing, "capture", lambda job, say, progress: jobs.append(job))
    assert called(monkeypatch, "capture", "--target", "t", "--out", "o")() == 0
    assert jobs[0].kept_out == kept_out(None)


def test_a_seed_below_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "capture", "--target", "t", "--out", "o", "--seed", "-1")() == 2
    assert "--seed" in capsys.readouterr().err
