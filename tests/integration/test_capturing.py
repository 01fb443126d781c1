"""`paceline capture` from a model's folder to a corpus, and what it says when it cannot."""

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from drafter_workers.training import corpus_writer
from drafter_workers.training.corpus import Corpus, CorpusError, Kept
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.overlap import words
from services import capturing
from services.capturing import CaptureJob, capture
from services.errors import ConfigError
from services.prompts import text_of
from services.tokenizer import load_tokenizer
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = byte_level_folder(tmp_path_factory.mktemp("whole"))
    return make_tiny_llama(made, 1, vocab=VOCAB_SIZE)


@pytest.fixture
def job(folder: Path, tmp_path: Path) -> CaptureJob:
    return CaptureJob(str(folder), tmp_path / "out", 2000, dtype="fp32", batch=16, max_length=96)


def run_job(job: CaptureJob) -> list[str]:
    said: list[str] = []
    capture(job, said.append, lambda stage, done, total: None)
    return said


def documents(folder: Path) -> list[list[int]]:
    corpus = Corpus(folder)
    return [corpus.tokens(span).tolist() for span in corpus.documents]


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_corpus_is_captured_and_goes_on(job: CaptureJob, tmp_path: Path) -> None:
    said = run_job(job)
    assert said[0].startswith("2000 tokens, 0 of them there: ") and "MB" in said[0]
    assert f"tokens in {job.out}; left out: 0 asked before, " in said[-1]
    first = documents(job.out)
    assert sum(map(len, first)) >= 2000
    assert run_job(replace(job, tokens=4000))[0].startswith("4000 tokens, 2")
    more = documents(job.out)
    whole = replace(job, tokens=4000, out=tmp_path / "whole")
    run_job(whole)
    at_once = documents(whole.out)
    assert all(document in at_once for document in first)
    assert len(more) > len(first)


def test_a_corpus_that_is_whole_is_left_alone(job: CaptureJob) -> None:
    run_job(job)
    first = documents(job.out)
    assert "0 MB more" in run_job(job)[0]
    assert documents(job.out) == first


def test_progress_is_shown_from_what_is_there_to_the_end(job: CaptureJob) -> None:
    shown: list[tuple[str, int, int]] = []
    capture(job, lambda line: None, lambda *each: shown.append(each))
    assert shown[0] == ("tokens", 0, 2000)
    assert shown[-1] == ("tokens", 2000, 2000)
    assert [done for _, done, _ in shown] == sorted(done for _, done, _ in shown)
    there = Corpus(job.out).size
    shown.clear()
    capture(replace(job, tokens=4000), lambda line: None, lambda *each: shown.append(each))
    assert shown[0] == ("tokens", there, 4000)


def test_an_interrupted_run_goes_on_to_the_same_documents(job: CaptureJob, tmp_path: Path) -> None:
    rows = [{"prompt": f"the cat sat {n}"} for n in range(12)]
    job = replace(job, data=write_lines(tmp_path / "data.jsonl", *rows), batch=3)

    def stop(stage: str, done: int, total: int) -> None:
        if done > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(job, lambda line: None, stop)
    assert 0 < len(documents(job.out)) < 12
    run_job(job)
    run_job(replace(job, out=tmp_path / "whole"))
    assert documents(job.out) == documents(tmp_path / "whole")


def test_a_disk_that_is_full_half_way_is_named_and_gone_on_from(
    job: CaptureJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "CorpusWriter", partial(CorpusWriter, shard_tokens=500))
    save, saved = corpus_writer.save_file, list[Path]()

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(path)
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(corpus_writer, "save_file", full)
        with pytest.raises(CorpusError, match=r"No space left.*run the same command again"):
            run_job(job)
    first = documents(job.out)
    assert sum(map(len, first)) >= 1000
    run_job(job)
    assert sum(map(len, documents(job.out))) >= 2000
    assert all(document in documents(job.out) for document in first)


def test_given_prompts_are_answered(job: CaptureJob, tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "data.jsonl", {"turns": ["the cat sat", "on the mat"]}, {"prompt": "stop here"}
    )
    job = replace(job, data=data, max_length=700)
    said = run_job(job)
    assert said[0].startswith("1400 tokens, 0 of them there"), "no more than the prompts can give"
    tokenizer = load_tokenizer(Path(job.target))
    first, second = (text_of(tokenizer, tokens).split() for tokens in documents(job.out))
    assert first[:3] == ["the", "cat", "sat"]
    assert second[:2] == ["stop", "here"]
    library = tokenizer.library
    asked = library.encode("<|user|>the cat sat<|end|><|assistant|>").ids
    again = library.encode("<|user|>on the mat<|end|><|assistant|>").ids
    tokens = documents(job.out)[0]
    assert tokens[: len(asked)] == asked
    assert any(tokens[i : i + len(again)] == again for i in range(len(tokens)))


def test_a_prompt_is_answered_once_and_never_asked_again(job: CaptureJob, tmp_path: Path) -> None:
    cat, dog = {"prompt": "the cat"}, {"prompt": "the dog"}
    job = replace(job, data=write_lines(tmp_path / "data.jsonl", cat, cat, dog, dog), batch=1)
    assert "left out: 2 asked before" in run_job(job)[-1]
    assert len(documents(job.out)) == 2
    assert "left out: 0 asked before" in run_job(job)[-1]


def test_other_prompts_are_another_corpus(job: CaptureJob, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", {"prompt": "the cat"})
    run_job(replace(job, data=data))
    (tmp_path / "moved").mkdir()
    moved = data.rename(tmp_path / "moved" / "data.jsonl")
    run_job(replace(job, data=moved))
    write_lines(moved, {"prompt": "the dog"})
    with pytest.raises(
        CorpusError, match=r"another corpus \(source 'data\.jsonl [0-9a-f]{16}', not"
    ):
        run_job(replace(job, data=moved))


def test_prompts_that_are_kept_out_are_refused(job: CaptureJob, tmp_path: Path) -> None:
    turns = {"turns": ["stop here", "and the cat sat on"]}
    data = write_lines(tmp_path / "data.jsonl", {"prompt": "stop there"}, turns)
    benchmark = write_lines(tmp_path / "benchmark.jsonl", {"prompt": "The cat sat!"})
    with pytest.raises(ConfigError, match=r"prompt 2 of .*data\.jsonl is kept out .*'the cat sat'"):
        run_job(replace(job, data=data, kept_out=(benchmark,)))
    assert not job.out.exists()


def test_what_the_target_says_of_them_is_left_out(job: CaptureJob, tmp_path: Path) -> None:
    run_job(job)
    tokenizer = load_tokenizer(Path(job.target))
    texts = [text_of(tokenizer, tokens) for tokens in documents(job.out)]
    some = next(words(text)[:3] for text in texts if len(words(text)) > 3)
    benchmark = write_lines(tmp_path / "benchmark.jsonl", {"prompt": " ".join(some)})
    job = replace(job, out=tmp_path / "other", kept_out=(benchmark,))
    assert " 0 with words of prompts" not in run_job(job)[-1]
    for tokens in documents(job.out):
        own = words(text_of(tokenizer, tokens))
        assert some not in [own[i : i + 3] for i in range(len(own))]


def test_words_of_two_turns_are_two(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.library.encode("the mat<|end|><|assistant|>hello").ids
    assert words(text_of(tokenizer, ids)) == ["the", "mat", "hello"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt; give a file of JSON lines"),
        ('{"text": "x"}\n', "line 1: has none of .*; it has text"),
        ('{"prompt": "x"}\n[1]\n', "line 2: is no JSON object"),
        ("{\n", "line 1: "),
        ('{"turns": []}\n', "line 1: has none of"),
        ('{"prompt": " "}\n', "line 1: has an empty turn"),
        ('{"prompt": "' + "the cat " * 50 + '"}\n', r"takes \d+ tokens .* a larger --max-length"),
    ],
)
def test_bad_data_is_named_by_its_line(
    job: CaptureJob, tmp_path: Path, text: str, said: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        run_job(replace(job, data=data))
    assert str(data) in str(raised.value) and "\n" not in str(raised.value)
    assert not job.out.exists()


def test_data_that_is_not_there_is_named(job: CaptureJob, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.jsonl"):
        run_job(replace(job, data=tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keep": "everything"}, "--keep must be states, top or nothing, is 'everything'"),
        ({"max_length": 8}, r"--max-length 8 has no room .* give \d+ or more"),
        ({"threads": 1 << 20}, r"--threads 1048576 are too many: the machine has \d+ cores"),
        ({"batch": 1 << 40}, r"take .* of memory, the machine has .* smaller --batch"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(
    job: CaptureJob, change: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_job(replace(job, **change))  # type: ignore[arg-type]
    assert not job.out.exists()


def test_the_least_length_that_is_named_is_enough(job: CaptureJob) -> None:
    with pytest.raises(ConfigError) as raised:
        run_job(replace(job, max_length=8))
    least = int(str(raised.value).split("give ")[1].split()[0])
    with pytest.raises(ConfigError, match=f"give {least} or more"):
        run_job(replace(job, max_length=least - 1))
    run_job(replace(job, max_length=least, tokens=500))


def test_a_disk_without_room_is_refused_before_it_starts(job: CaptureJob) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"has room for .* ask for fewer tokens"):
        capture(replace(job, tokens=1 << 50), said.append, lambda *each: None)
    assert len(said) == 1 and said[0].startswith(f"{1 << 50} tokens, 0 of them there")
    run_job(replace(job, keep="nothing"))  # as the message says, into the same folder
    assert Corpus(job.out).origin.kept == Kept()


def test_a_folder_is_one_capture_s(job: CaptureJob) -> None:
    job.out.mkdir()
    with (
        FileLock(job.out / ".lock"),
        pytest.raises(ConfigError, match=r"another capture writes to .*; let it finish"),
    ):
        run_job(job)
    run_job(job)


def test_a_folder_that_cannot_be_made_is_named(job: CaptureJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .* give another folder"):
        run_job(replace(job, out=tmp_path / "file" / "out"))


def test_a_folder_with_a_model_is_left_alone(job: CaptureJob) -> None:
    before = set(Path(job.target).iterdir())
    with pytest.raises(ConfigError, match="holds a model; give another folder"):
        run_job(replace(job, out=Path(job.target)))
    assert set(Path(job.target).iterdir()) == before


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template; capture needs an instruct model"),
        ("{{ raise_exception('no') }}", "does not fit the model's chat template"),
        ("{{ messages[0]['content'] }}", "does not show every turn once"),
    ],
)
def test_a_model_that_does_not_chat_is_refused(
    job: CaptureJob, tmp_path: Path, template: str | None, said: str
) -> None:
    bare = make_tiny_llama(tmp_path / "bare", 1, vocab=VOCAB_SIZE)
    for name in ("tokenizer.json", "generation_config.json"):
        (bare / name).write_bytes((Path(job.target) / name).read_bytes())
    settings = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=said):
        run_job(replace(job, target=str(bare)))
    assert not job.out.exists()
