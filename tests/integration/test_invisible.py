"""Whatever is asked for, speculation changes no token and no score (exact mode, rule match)."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.request import Delta, Finished, FinishReason, Request
from orchestrator.runtime import Runtime
from protos.sampling import Score
from services.grammar import ANY_JSON, choice_grammar, regex_grammar
from tests.integration.test_equality import serving
from tests.random_requests import Requests
from tests.tiny import make_tiny_llama
from tests.unit.services.tiny_folder import VOCAB_SIZE, byte_level_folder

GRAMMARS = (
    regex_grammar("[a-c ]{4,30}"),
    choice_grammar(["the cat", "the dog", "a b c"]),
    ANY_JSON,
)
# Drafter seed (1: the target itself), shape, rows of a step, sequences at once.
SCENES = [
    (1, "tree", 64, 16),
    (1, "chain", 1, 1),
    (2, "tree", 3, 2),
    (2, "chain", 16, 8),
    (1, "tree", 8, 4),
    (1, "chain", 5, 2),
]
ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request led to; without `scores` where none were asked for."""

    tokens: tuple[int, ...]
    scores: tuple[Score, ...]
    finished: Finished


async def answer(runtime: Runtime, request: Request) -> Answer:
    tokens: list[int] = []
    scores: list[Score] = []
    finished = None
    async for update in runtime.generate(request):
        if isinstance(update, Delta):
            tokens += update.tokens
            scores += update.scores
        elif isinstance(update, Finished):
            finished = update
    assert finished is not None
    return Answer(tuple(tokens), tuple(scores), finished)


def check(request: Request, plain: Answer, drafted: Answer) -> None:
    """The same end, and the same tokens and scores after those it was resumed with."""
    begun = len(request.resumed)
    assert drafted.finished.reason == plain.finished.reason, request
    assert drafted.finished.error == plain.finished.error, request
    assert drafted.tokens == plain.tokens[begun:], request
    assert drafted.scores == plain.scores[begun:], request
    stats = drafted.finished.stats
    assert sum(stats.histogram) == stats.rounds
    assert sum(count * a for a, count in enumerate(stats.histogram)) == stats.accepted
    assert len(drafted.scores) == len(drafted.tokens) * (request.scoring.output >= 0)
    if plain.finished.reason in ENDS:
        assert len(drafted.tokens) == stats.accepted + stats.rounds - stats.cut


async def compare(folders: Path, seed: int, scene: tuple[int, str, int, int], count: int) -> int:
    """Random requests without and with speculation; how many guesses stood."""
    drafter_seed, shape, rows, batch = scene
    target, drafter = folders / "1", folders / str(drafter_seed)
    requests = Requests(seed, VOCAB_SIZE, GRAMMARS)
    async with serving(target, drafter, "fp32") as runtime:
        asked = [requests.next(f"{i}") for i in range(count)]
        plain = [await answer(runtime, request) for request in asked]
    again = [
        requests.speculated(request, told.tokens)
        for request, told in zip(asked, plain, strict=True)
    ]
    limits = {"step_rows": max(rows, batch), "max_sequences": batch, "max_queue": count}
    async with serving(target, drafter, "fp32", shape=shape, **limits) as runtime:
        drafted = await asyncio.gather(*(answer(runtime, request) for request in again))
        for account in (await runtime.audit()).values():
            assert account.held == ()
    for request, before, after in zip(again, plain, drafted, strict=True):
        check(request, before, after)
    return sum(told.finished.stats.accepted for told in drafted)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with a tokenizer, by seed."""
    root = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        make_tiny_llama(byte_level_folder(root / str(seed)), seed, vocab=VOCAB_SIZE)
    return root


@pytest.mark.parametrize("scene", SCENES, ids=str)
async def test_speculation_is_invisible(folders: Path, scene: tuple[int, str, int, int]) -> None:
    accepted = await compare(folders, sum(map(ord, str(scene))), scene, 16)
    drafter_seed, _, rows, batch = scene
    assert accepted > 0 or drafter_seed != 1 or rows <= batch, "guesses must be at stake"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 100 + len(SCENES)))
async def test_speculation_is_invisible_at_length(folders: Path, seed: int) -> None:
    """More than five hundred requests, a hundred in each scene."""
    assert await compare(folders, seed, SCENES[seed - 100], 100) >= 0
