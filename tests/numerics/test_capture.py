"""What a capture writes is what the target says alone, and what it thought at every token."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_workers.training.capture import Capture, CaptureConfig
from drafter_workers.training.conversation import Plan
from drafter_workers.training.corpus import Corpus, CorpusError, Document, Kept
from drafter_workers.training.plans import self_written
from services.capturing import CaptureJob, capture
from services.errors import ConfigError
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_decoder
from target_workers.model.run import Run
from target_workers.model.sampling import choose
from tests.tiny import make_tiny_llama
from tests.tiny_engines import prefill
from tests.tiny_training import END, FRAME, STYLE, VOCAB, make_target
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder

CONFIG = CaptureConfig(
    VOCAB, frozenset({END}), batch=5, max_length=48, kept=Kept(state_size=64, top=VOCAB)
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_target(tmp_path_factory.mktemp("target"))
    return load_decoder(folder, dtype=torch.float32)


def plans(count: int) -> Iterator[Plan]:
    return islice(self_written(FRAME, [], STYLE, 1), count)


def captured(decoder: Decoder, config: CaptureConfig, count: int = 12) -> dict[int, Document]:
    found: list[Document] = []
    Capture(decoder, config, torch.float32).run(plans(count), found.append)
    return {document.number: document for document in found}


def alone(decoder: Decoder, plan: Plan) -> list[int]:
    """The conversation by whole forwards over all tokens so far, one token each."""
    tokens: list[int] = []
    for turn in plan.turns:
        given = list(turn.given)
        tokens += given[1:] if tokens and tokens[-1] == given[0] else given
        for _ in range(turn.limit):
            if len(tokens) >= CONFIG.max_length:
                return tokens
            logits = prefill(decoder, tokens)[1][-1:]
            temperature = torch.tensor([turn.temperature], dtype=torch.float64)
            at = torch.tensor([len(tokens)])
            tokens.append(int(choose(logits, temperature, torch.tensor([plan.seed]), at).tokens))
            if tokens[-1] == END:
                break
    return tokens


def test_documents_are_what_the_target_says_alone(decoder: Decoder) -> None:
    documents = captured(decoder, CONFIG)
    assert sorted(documents) == list(range(12))
    for plan in plans(12):
        assert documents[plan.number].tokens.tolist() == alone(decoder, plan)


def test_what_is_kept_is_what_one_forward_over_the_document_gives(decoder: Decoder) -> None:
    for document in captured(decoder, CONFIG, 4).values():
        slots = np.arange(len(document.tokens))
        run = Run(document.tokens, 0, slots, slots[:0])
        cache = KVCache(decoder.config, len(slots), torch.float32)
        hidden = decoder.hidden(build_batch([run]), cache)
        logits = decoder.logits(hidden)
        parts, last = document.parts, len(document.tokens) - 1
        assert torch.equal(parts["states"][:last], hidden[:last].bfloat16())
        ids, order = parts["top_ids"][:last].long().sort(-1)
        assert torch.equal(ids, torch.arange(VOCAB).expand(last, -1))
        top = parts["top_logits"][:last].gather(-1, order)
        assert torch.equal(top, logits[:last].half())
        assert torch.allclose(parts["log_sums"][:last], logits[:last].logsumexp(-1), atol=1e-5)
        assert not bool(parts["states"][last:].any()), "the last token was never computed"


@pytest.mark.parametrize("batch", [1, 12])
def test_company_changes_nothing(decoder: Decoder, batch: int) -> None:
    others = captured(decoder, replace(CONFIG, batch=batch))
    for number, document in captured(decoder, CONFIG).items():
        other = others[number]
        assert np.array_equal(document.tokens, other.tokens)
        assert np.array_equal(document.answers, other.answers)
        assert torch.equal(document.parts["states"], other.parts["states"])


def test_a_target_that_gives_no_numbers_is_named(tmp_path: Path) -> None:
    broken = load_decoder(make_target(tmp_path), dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        nothing = torch.full((1, VOCAB), torch.nan)
        patch.setattr(broken, "logits", lambda hidden: nothing.repeat(len(hidden), 1))
        with pytest.raises(CorpusError, match="not finite"):
            captured(broken, CONFIG)


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


def test_a_corpus_is_captured_and_goes_on(job: CaptureJob, tmp_path: Path) -> None:
    said = run_job(job)
    assert said[0].startswith("2000 tokens, 0 of them there: ") and "MB" in said[0]
    first = documents(job.out)
    assert sum(map(len, first)) >= 2000
    assert run_job(replace(job, tokens=4000))[0].startswith("4000 tokens, 2")
    more = documents(job.out)
    whole = replace(job, tokens=4000, out=tmp_path / "whole")
    run_job(whole)
    at_once = documents(whole.out)
    assert all(document in at_once for document in first)
    assert len(more) > len(first)


def test_given_prompts_are_answered_and_checked(job: CaptureJob, tmp_path: Path) -> None:
    data, benchmark = tmp_path / "data.jsonl", tmp_path / "benchmark.jsonl"
    data.write_text('{"turns": ["the cat sat", "on the mat"]}\n{"prompt": "stop here"}\n')
    benchmark.write_text('{"prompt": "The cat sat!"}\n')
    run_job(replace(job, data=data))
    assert len(documents(job.out)) == 2
    with pytest.raises(ConfigError, match=r"data\.jsonl holds a prompt that is kept out"):
        run_job(replace(job, data=data, out=tmp_path / "other", kept_out=(benchmark,)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ('{"text": "x"}\n', "line 1: has none of .*; it has text"),
        ('{"prompt": "x"}\n[1]\n', "line 2: is no JSON object"),
        ("{\n", "line 1: "),
        ('{"turns": []}\n', "line 1: has none of"),
        ('{"prompt": " "}\n', "line 1: has an empty turn"),
    ],
)
def test_bad_data_is_named_by_its_line(
    job: CaptureJob, tmp_path: Path, text: str, said: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    with pytest.raises(ConfigError, match=rf"data\.jsonl.*{said}"):
        run_job(replace(job, data=data))


def test_what_cannot_work_is_refused_before_it_starts(job: CaptureJob) -> None:
    with pytest.raises(ConfigError, match="--keep must be"):
        run_job(replace(job, keep="everything"))
    with pytest.raises(ConfigError, match=r"has room for .* ask for fewer tokens"):
        run_job(replace(job, tokens=1 << 50))
    bare = make_tiny_llama(job.out / "bare", 1, vocab=VOCAB_SIZE)
    for name in ("tokenizer.json", "generation_config.json"):
        (bare / name).write_bytes((Path(job.target) / name).read_bytes())
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ConfigError, match="no chat template"):
        run_job(replace(job, target=str(bare)))
