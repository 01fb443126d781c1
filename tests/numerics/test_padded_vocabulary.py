"""An embedding with more rows than the tokenizer has entries: no such id is chosen or guessed."""

from pathlib import Path

import pytest
import torch

from drafter_workers.config import DrafterConfig, GrowthConfig
from drafter_workers.loading import load_drafter
from protos.messages import Grow, Open, StepOpen, Stepped
from protos.sampling import GREEDY, Sampling
from protos.worker import Engine
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.loading import load_decoder
from target_workers.model.sampling import choose, only_known
from tests.duo import Duo, step
from tests.tiny_engines import prefill

KNOWN = 40
PROMPT = (5, 9, 31, 7, 7)
NOISY = Sampling(0.8, 21)


def target_of(folder: Path, vocab_size: int) -> Engine:
    config = TargetConfig(
        str(folder), dtype="fp32", exact=False, num_pages=32, vocab_size=vocab_size
    )
    return load_target(config, vocab_hash="", incarnation=1)


def stream(engine: Engine, sampling: Sampling) -> list[int]:
    duo = Duo(engine, k=0)
    line = duo.open(1, PROMPT, sampling)
    for _ in range(30):
        duo.round()
    assert not line.errors
    return line.output


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_a_target_chooses_the_best_of_the_known_tokens(
    tiny_llama: Path, sampling: Sampling
) -> None:
    engine = target_of(tiny_llama, KNOWN)
    assert engine.hello().vocab_size == KNOWN
    output = stream(engine, sampling)
    assert max(output) < KNOWN
    decoder = load_decoder(tiny_llama, dtype=torch.float32)
    _, logits = prefill(decoder, [*PROMPT, *output])
    logits = logits[len(PROMPT) - 1 : -1, :KNOWN].clone()
    count = len(output)
    expected = choose(
        logits,
        torch.full((count,), sampling.temperature, dtype=torch.float64),
        torch.full((count,), sampling.seed),
        torch.arange(len(PROMPT), len(PROMPT) + count),
    )
    assert output == expected.tokens.tolist()


def test_without_a_size_every_row_of_the_model_counts(tiny_llama: Path) -> None:
    assert max(stream(target_of(tiny_llama, 0), GREEDY)) >= KNOWN, "the test has no teeth"


@pytest.mark.parametrize("engine", ["target", "drafter"])
def test_a_tokenizer_of_more_entries_leaves_the_models_own(tiny_llama: Path, engine: str) -> None:
    if engine == "target":
        built = target_of(tiny_llama, 10**6)
    else:
        built = drafter_of(tiny_llama, 10**6)
    assert built.hello().vocab_size == 512
    unknown = StepOpen(1, (600,), GREEDY)
    if engine == "target":
        (stepped,) = built.handle(step(1, [unknown]))
        assert isinstance(stepped, Stepped)
    else:
        built.handle(Open(1, 1, (600,), GREEDY, 4))
        assert built.work() == [Grow(1, 1, 1, ())]


def drafter_of(folder: Path, vocab_size: int) -> Engine:
    config = DrafterConfig(
        str(folder),
        dtype="fp32",
        num_slots=256,
        vocab_size=vocab_size,
        growth=GrowthConfig(width=3, floor=1e-300),
    )
    return load_drafter(config, vocab_hash="", incarnation=1)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_a_drafter_guesses_known_tokens_alone(tiny_llama: Path, sampling: Sampling) -> None:
    engine = drafter_of(tiny_llama, KNOWN)
    engine.handle(Open(1, 1, PROMPT, sampling, 30))
    guesses = []
    while (answers := engine.work()) is not None:
        guesses += [g for m in answers if isinstance(m, Grow) for g in m.nodes]
    assert len(guesses) == 30
    assert all(guess.token < KNOWN for guess in guesses)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("padding", [float("nan"), float("inf"), 100.0])
def test_no_padding_is_ever_chosen(temperature: float, padding: float) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    logits[:, KNOWN:] = padding
    choice = choose(
        only_known(logits, KNOWN),
        torch.full((20,), temperature, dtype=torch.float64),
        torch.arange(20),
        torch.arange(20),
    )
    assert choice.finite.all()
    assert ((choice.tokens >= 0) & (choice.tokens < KNOWN)).all()
