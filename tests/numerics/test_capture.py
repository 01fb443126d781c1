"""What a capture writes is what the target says alone, and what it thought at every token."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_workers.training import capture as capture_module
from drafter_workers.training.capture import Capture, CaptureConfig
from drafter_workers.training.conversation import Plan, Turn
from drafter_workers.training.corpus import Corpus, CorpusError, Document, Kept, Origin
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.plans import self_written
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_decoder
from target_workers.model.noise import gumbel
from target_workers.model.run import Run
from tests.tiny_engines import prefill
from tests.tiny_training import END, FRAME, STYLE, VOCAB, make_target

CONFIG = CaptureConfig(
    VOCAB, frozenset({END}), batch=5, max_length=48, kept=Kept(state_size=64, top=VOCAB)
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_target(tmp_path_factory.mktemp("target"))
    return load_decoder(folder, dtype=torch.float32)


def plans(count: int) -> list[Plan]:
    return list(islice(self_written(FRAME, [], STYLE, 1), count))


def captured(
    decoder: Decoder, config: CaptureConfig, asked: Iterable[Plan] | None = None
) -> dict[int, Document]:
    found: list[Document] = []
    Capture(decoder, config, torch.float32).run(iter(asked or plans(12)), found.append)
    return {document.number: document for document in found}


def same(document: Document, other: Document) -> bool:
    return (
        np.array_equal(document.tokens, other.tokens)
        and np.array_equal(document.answers, other.answers)
        and document.parts.keys() == other.parts.keys()
        and all(torch.equal(part, other.parts[name]) for name, part in document.parts.items())
    )


def drawn(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """The best token, of logits [vocab] with the noise of a seed and a position."""
    if temperature == 0:
        return int(logits.argmax())
    noise = gumbel(torch.tensor(seed), torch.tensor(position), torch.arange(VOCAB))
    return int((logits.double() / temperature + noise).argmax())


def alone(decoder: Decoder, plan: Plan, max_length: int) -> tuple[list[int], list[bool]]:
    """The conversation by whole forwards over all tokens so far, one token each."""
    tokens: list[int] = []
    answers: list[bool] = []
    for turn in plan.turns:
        given = list(turn.given[1:] if tokens[-1:] == [turn.given[0]] else turn.given)
        if len(tokens) + len(given) >= max_length:
            break
        tokens += given
        answers += [False] * len(given)
        for _ in range(min(turn.limit, max_length - len(tokens))):
            logits = prefill(decoder, tokens)[1][-1]
            tokens.append(drawn(logits, turn.temperature, plan.seed, len(tokens)))
            answers.append(turn.is_answer)
            if tokens[-1] == END:
                break
        if len(tokens) == max_length:
            break
    return tokens, answers


@pytest.mark.parametrize("max_length", [48, 40, 12])
def test_documents_are_what_the_target_says_alone(decoder: Decoder, max_length: int) -> None:
    documents = captured(decoder, replace(CONFIG, max_length=max_length), plans(20))
    assert sorted(documents) == list(range(20))
    for plan in plans(20):
        tokens, answers = alone(decoder, plan, max_length)
        assert documents[plan.number].tokens.tolist() == tokens
        assert documents[plan.number].answers.tolist() == answers
    temperatures = {turn.temperature for plan in plans(20) for turn in plan.turns}
    assert temperatures == {0.0, 0.5, 0.9}, "both kinds of choice were compared"
    assert any(len(plan.turns) == 4 for plan in plans(20))


def test_what_is_kept_is_what_one_forward_over_the_document_gives(decoder: Decoder) -> None:
    for document in captured(decoder, CONFIG, plans(4)).values():
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


def test_the_best_tokens_alone_are_kept(decoder: Decoder) -> None:
    few = captured(decoder, replace(CONFIG, kept=Kept(top=3)))
    for number, document in captured(decoder, CONFIG).items():
        parts = few[number].parts
        assert parts.keys() == {"top_ids", "top_logits", "log_sums"}
        assert torch.equal(parts["top_ids"], document.parts["top_ids"][:, :3])
        assert torch.equal(parts["top_logits"], document.parts["top_logits"][:, :3])
        assert torch.equal(parts["log_sums"], document.parts["log_sums"]), "of all tokens"
    assert all(not each.parts for each in captured(decoder, replace(CONFIG, kept=Kept())).values())


def test_ids_without_a_meaning_are_neither_said_nor_kept(decoder: Decoder) -> None:
    known = VOCAB - 20
    config = replace(CONFIG, vocab_size=known, kept=Kept(top=3))
    for document in captured(decoder, config).values():
        assert document.tokens.max() < known
        assert int(document.parts["top_ids"].max()) < known


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_company_changes_nothing(decoder: Decoder, batch: int) -> None:
    others = captured(decoder, replace(CONFIG, batch=batch))
    for number, document in captured(decoder, CONFIG).items():
        assert same(document, others[number])


def test_the_order_of_plans_changes_nothing(decoder: Decoder) -> None:
    others = captured(decoder, CONFIG, reversed(plans(12)))
    for number, document in captured(decoder, CONFIG).items():
        assert same(document, others[number])


def test_small_steps_and_small_pieces_change_nothing(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither how many rows a forward has, nor how many rows' logits are in memory."""
    questions = [
        Plan(n, n, (Turn(tuple(range(3, 3 + size)), 5, 0.5, is_answer=True),))
        for n, size in enumerate((30, 1, 11, 20, 2, 9))
    ]
    documents = captured(decoder, CONFIG, questions)
    sizes: list[int] = []
    hidden = decoder.hidden
    monkeypatch.setattr(capture_module, "STEP_ROWS", 12)
    monkeypatch.setattr(capture_module, "HEAD_ROWS", 4)
    with monkeypatch.context() as patch:

        def counted(batch: object, cache: KVCache) -> Tensor:
            rows = hidden(batch, cache)  # type: ignore[arg-type]
            sizes.append(len(rows))
            return rows

        patch.setattr(decoder, "hidden", counted)
        others = captured(decoder, CONFIG, questions)
    assert max(sizes) == 30, "one conversation's, which has more"
    assert sorted(sizes)[-3] <= 12
    assert len(others) == len(questions)
    assert all(same(document, others[number]) for number, document in documents.items())


def test_a_conversation_that_cannot_begin_is_named(decoder: Decoder) -> None:
    plan = Plan(7, 1, (Turn((5,) * 48, 4, 0.0, is_answer=True),))
    with pytest.raises(CorpusError, match=r"conversation 7 begins with 48 tokens and may have 48"):
        captured(decoder, CONFIG, [plan])
    assert captured(decoder, replace(CONFIG, max_length=49), [plan])[7].tokens.shape == (49,)


def write(decoder: Decoder, folder: Path, last: int = 99) -> None:
    """Capture into a folder; stopped when document number `last` is done."""
    kept = CONFIG.kept
    writer = CorpusWriter(folder, Origin("t", VOCAB, 1, "self-written", kept), shard_tokens=60)

    def done(document: Document) -> None:
        writer.add(document)
        if document.number == last:
            raise KeyboardInterrupt

    todo = [plan for plan in plans(12) if plan.number not in writer.done]
    Capture(decoder, CONFIG, torch.float32).run(iter(todo), done)
    writer.flush()


def test_an_interrupted_capture_ends_with_the_same_documents(
    decoder: Decoder, tmp_path: Path
) -> None:
    write(decoder, tmp_path / "whole")
    for last in (4, 9):
        with pytest.raises(KeyboardInterrupt):
            write(decoder, tmp_path / "parts", last)
    assert 0 < len(Corpus(tmp_path / "parts").documents) < 12
    write(decoder, tmp_path / "parts")
    whole, parts = Corpus(tmp_path / "whole"), Corpus(tmp_path / "parts")
    assert len(parts.documents) == 12
    for one, other in zip(whole.documents, parts.documents, strict=True):
        assert np.array_equal(whole.tokens(one), parts.tokens(other))
        assert np.array_equal(whole.answers(one), parts.answers(other))
        for name in CONFIG.kept.parts:
            assert torch.equal(whole.part(name, one), parts.part(name, other))


def test_a_target_that_gives_no_numbers_is_named(tmp_path: Path) -> None:
    broken = load_decoder(make_target(tmp_path), dtype=torch.float32)
    logits, calls = broken.logits, [0]

    def sometimes(hidden: Tensor) -> Tensor:
        calls[0] += 1
        found = logits(hidden)
        return torch.full_like(found, torch.nan) if calls[0] == 20 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broken, "logits", sometimes)
        config = replace(CONFIG, kept=Kept(), batch=1)
        with pytest.raises(CorpusError, match=r"not finite in conversation \d+; fetch"):
            captured(broken, config)
    assert calls == [20], "it stops at once"
