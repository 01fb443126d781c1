"""Audit mode: a token and the logits it is drawn from are the same bits however they are computed.

Every request is decoded plainly, one token a step and nobody beside it; then with guesses among
others in shared, scarce pages; then as one prompt that is prefilled in chunks of any size.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np
import pytest

from protos.sampling import GREEDY, Sampling
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_reference
from target_workers.model.run import Run
from tests.duo import counts
from tests.numerics.crowd import Asked, Crowd, Line, Recorder, Server, digests, serve_alone
from tests.numerics.forward import Path, in_chunks, random_sizes

PAGE = 16
MAX_ROWS = 2048
DTYPES = ("bf16", "fp32")
AT_STAKE = ("accepted", "rejected", "mixed", "found", "copied", "evicted", "paused")


@dataclass(frozen=True, slots=True)
class Mix:
    """So many requests for some `tokens`, in a cache of `pages`.

    The `lengths` of their prompts come in turn, but every third begins with one of a few shared
    heads. Answers to the longest prompts cross an edge of attention's chunks.
    """

    count: int
    pages: int
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    tokens: tuple[int, int]

    def requests(self, vocab_size: int) -> list[Asked]:
        """Greedy and seeded in turn."""
        draw, asked = random.Random(self.count), []
        heads = [_tokens(draw, length, vocab_size) for length in self.heads]
        for i in range(self.count):
            length = draw.randint(*self.lengths[i % len(self.lengths)])
            prompt = _tokens(draw, length, vocab_size)
            if i % 3 == 2:
                prompt = [*draw.choice(heads), *prompt[: draw.randint(1, 30)]]
            sampling = Sampling(0.8, draw.getrandbits(63)) if i % 2 else GREEDY
            asked.append(Asked(tuple(prompt), sampling, draw.randint(*self.tokens)))
        return asked


def _tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]


SHORT = ((2, 12), (12, 60), (2, 40))
FEW = Mix(12, 24, (*SHORT, (2, 40), (251, 255), (2, 12), (12, 60)), (37, 60), (4, 9))
MANY = Mix(
    200, 44, (*SHORT, (60, 150), (236, 256), (150, 300), (12, 60)) * 3 + ((496, 512),),
    (37, 100, 200), (12, 24),
)  # fmt: skip


def start(folder: FilePath, dtype: str, pages: int) -> Server:
    """A target with `target.exact`, which passed its self-test."""
    config = TargetConfig(
        str(folder), dtype=dtype, exact=True, page_size=PAGE, num_pages=pages, max_rows=MAX_ROWS
    )
    engine = load_target(config, vocab_hash="", incarnation=1)
    engine._forward._decoder = Recorder(engine._forward._decoder)
    return Server(engine, engine._forward._decoder)


def check_company(server: Server, alone: Sequence[Line]) -> Counter[str]:
    """Guesses and company change neither a token nor a bit behind it; counts what was at stake."""
    before, crowd = Counter(counts(server.engine)), Crowd(server, alone, seed=1)
    pairs = list(zip(alone, crowd.serve(), strict=True))
    assert [one.index for one, other in pairs if one.output != other.output] == []
    assert [one.index for one, other in pairs if one.bits != other.bits[: len(one.bits)]] == []
    pages = {tuple(i.tokens[:end]) for i in alone for end in range(PAGE, len(i.tokens), PAGE)}
    seen = Counter(counts(server.engine)) - before + crowd.counts
    seen["rejected"] = seen["nodes"] - seen["accepted"]
    seen["evicted"] = len(pages) - server.num_pages  # or more: each is found by its tokens once
    assert all(seen[name] > 0 for name in AT_STAKE), seen
    return seen


def check_prefill(server: Server, alone: Sequence[Line]) -> None:
    """Prompt and answer prefilled in random chunks give the logits of token-by-token decoding."""
    differing = {}
    for line in alone:
        path = Path(np.array(line.tokens), line.index)
        sizes = random_sizes(len(line.tokens), line.index)
        logits = in_chunks(server.recorder.decoder, path, sizes)
        bits = digests(logits[len(line.asked.prompt) - 1 : -1])
        positions = [i for i, (a, b) in enumerate(zip(bits, line.bits, strict=True)) if a != b]
        if positions:
            differing[line.index] = positions
    assert differing == {}


@pytest.fixture(scope="module", params=DTYPES)
def few(request: pytest.FixtureRequest, small_model: FilePath) -> tuple[Server, list[Line]]:
    """A dozen requests, each served alone."""
    server = start(small_model, request.param, FEW.pages)
    return server, serve_alone(server, FEW.requests(server.vocab_size))


@pytest.mark.model
@pytest.mark.timeout(300)
def test_guesses_and_company_change_no_bit(few: tuple[Server, list[Line]]) -> None:
    check_company(*few)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_one_prefill_gives_the_bits_of_decoding(few: tuple[Server, list[Line]]) -> None:
    check_prefill(*few)


@pytest.mark.model
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES)
def test_200_requests_keep_every_bit(
    small_model: FilePath, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also prints what exact steps cost beside torch's own operators, which promise no bits."""
    server = start(small_model, dtype, MANY.pages)
    alone = serve_alone(server, MANY.requests(server.vocab_size))
    assert len({tuple(line.output) for line in alone}) > 150, "answers vary"
    seen = check_company(server, alone)
    check_prefill(server, alone)
    exact = server.recorder.decoder
    with capsys.disabled():
        figures = ("forwards", "rows", "verdicts", *AT_STAKE)
        print(f"\n{dtype}:", ", ".join(f"{seen[name]} {name}" for name in figures))
        for name, ratio in prices(exact, load_reference(small_model, dtype=exact.dtype)):
            print(f"{dtype}: {name}: {ratio:.2f} x the time of torch's operators")


def prices(exact: Decoder, plain: Decoder) -> Iterator[tuple[str, float]]:
    """Forwards by name, and how many times as long they take exactly, by turns with plainly."""
    shapes = {"1 row": (1, 256, 1), "8 rows": (8, 256, 8), "a prefill of 256 rows": (256, 0, 1)}
    slots = np.arange(512)
    caches = [(each, KVCache(each.config, len(slots), each.dtype)) for each in (exact, plain)]
    for name, (rows, context, drawn) in shapes.items():
        run = Run(np.arange(rows), context, slots[context : context + rows], slots[:context])
        taken: list[list[float]] = [[], []]
        for _ in range(13):
            for times, (decoder, cache) in zip(taken, caches, strict=True):
                began = time.perf_counter()
                decoder.logits(decoder.hidden(build_batch([run]), cache)[-drawn:])
                times.append(time.perf_counter() - began)
        medians = [statistics.median(times[1:]) for times in taken]  # the first one warms up
        yield name, medians[0] / medians[1]
