"""A target in several ranks computes what it computes in one piece."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protos.messages import AuditReply
from protos.sampling import GREEDY, Sampling
from protos.worker import Engine
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.batch import build_batch
from target_workers.model.config import ModelConfig
from target_workers.model.decoder import Decoder
from target_workers.model.loading import DTYPES, load_decoder
from target_workers.model.shard import Shard, portion
from tests.duo import Duo, audit
from tests.numerics.forward import Path as Tokens
from tests.numerics.forward import in_chunks, logits_of, new_cache, random_tokens
from tests.oracle import compared
from tests.ranks import grouped, load_parts, ranked
from tests.tiny import make_tiny
from tests.tiny_engines import make_drafter, plain

SMALL_PROMPT = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47)
PROMPT = (5, 9, 200, 31, 7, 7, 118)
SEEDED = Sampling(1.0, 77)
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama untied": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with one kv head": ("Llama", {"num_key_value_heads": 1}),
    "uneven": ("Llama", NINE_HEADS),
    "odd vocabulary": ("Llama", {"vocab_size": 333}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    family, overrides = SHAPES[name]
    folder = make_tiny(tmp_path, 3, family, **overrides)
    path = Tokens(random_tokens(150, 1, vocab=300), 2)
    expected = in_chunks(load_decoder(folder, dtype=torch.float32), path, [])
    shape = ModelConfig.from_folder(folder)
    widths = [len(portion(shape, Shard(rank, size)).vocab) for rank in range(size)]
    with grouped(size) as (groups, threads):
        decoders = load_parts(folder, groups, torch.float32)

        def compute(rank: int) -> torch.Tensor | None:
            own = logits_of(decoders[rank], new_cache(decoders[rank]), [path.run(0, 150)])
            return groups[rank].join_columns(own, widths)

        first, *others = threads.each(compute)
    assert others == [None] * (size - 1)
    assert first is not None
    assert (first - expected).abs().max() <= 1e-4
    assert expected.std() > 0.3, "the tiny model is degenerate"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_same_bits(tiny_llama: Path, dtype: torch.dtype) -> None:
    batch = build_batch([Tokens(random_tokens(100, 1), 2).run(0, 100)])
    with grouped(4) as (groups, threads):
        decoders = load_parts(tiny_llama, groups, dtype)
        states = threads.each(lambda i: decoders[i].hidden(batch, new_cache(decoders[i])))
    assert all(torch.equal(state, states[0]) for state in states)


def config(folder: Path, dtype: str, *, exact: bool = False) -> TargetConfig:
    return TargetConfig(str(folder), dtype=dtype, exact=exact, num_pages=120, max_context=512)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
def test_drafted_streams_agree_with_one_rank(
    tiny_llama: Path, size: int, dtype: str, sampling: Sampling
) -> None:
    whole = load_decoder(tiny_llama, dtype=DTYPES[dtype])
    drafter = make_drafter(whole, width=3)
    with ranked(config(tiny_llama, dtype), size) as ranks:
        duo = Duo(ranks, drafter.engine, 6, "tree")
        lines = [duo.open(seq, PROMPT[seq:] * (seq + 1), sampling) for seq in range(3)]
        while min(len(line.output) for line in lines) < 40:
            duo.draft(5)
            duo.round()
        accounts = ranks.threads.each(lambda i: audit(ranks.engines[i]))
    tables = [replace(account, counters=()) for account in accounts]
    assert tables == tables[:1] * size, "every rank has the same tables"
    assert _accepted(accounts[0]) > 20, "guesses are at stake"
    for seq, line in enumerate(lines):
        prompt = PROMPT[seq:] * (seq + 1)
        expected = plain(whole, prompt, 40, sampling)
        same = compared(whole, prompt, sampling, expected, line.output[:40])
        assert dtype != "fp64" or same == 40


def _accepted(account: AuditReply) -> int:
    return next(counter.value for counter in account.counters if counter.name == "accepted")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_in_exact_mode_ranks_give_the_same_bits_in_any_company(
    tiny_llama: Path, dtype: str, sampling: Sampling
) -> None:
    """B094: accepted counts and tokens are those of plain decoding, whatever is drafted."""
    drafter = make_drafter(load_decoder(tiny_llama, dtype=DTYPES[dtype]), width=3)
    with ranked(config(tiny_llama, dtype, exact=True), 2) as ranks:
        alone = Duo(ranks, k=0)
        line = alone.open(100, PROMPT, sampling)
        while len(line.output) < 60:
            alone.round()
        ranks.reset()
        ranks.join()
        duo = Duo(ranks, drafter.engine, 9, "tree")
        lines = [duo.open(seq, PROMPT, sampling) for seq in range(3)]
        while min(len(line.output) for line in lines) < 60:
            duo.draft(4)
            duo.round()
    assert [drafted.output[:60] for drafted in lines] == [line.output] * 3


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def one_rank(
    request: pytest.FixtureRequest, small_model: Path
) -> tuple[str, Decoder, list[list[int]]]:
    """A type, the small model in it, and its streams."""
    engine = load_target(config(small_model, request.param), vocab_hash="", incarnation=1)
    whole = load_decoder(small_model, dtype=DTYPES[request.param])
    return request.param, whole, streams(engine)


def streams(engine: Engine) -> list[list[int]]:
    """A greedy and a seeded stream, in one batch."""
    duo = Duo(engine, k=0)
    lines = [duo.open(i, SMALL_PROMPT, sampling) for i, sampling in enumerate((GREEDY, SEEDED))]
    for _ in range(16):
        duo.round()
    return [line.output for line in lines]


@pytest.mark.model
@pytest.mark.parametrize("size", [2, 3])
def test_the_small_model_agrees_with_one_rank(
    small_model: Path, one_rank: tuple[str, Decoder, list[list[int]]], size: int
) -> None:
    """It has nine heads in three groups: 6 + 3 heads on two ranks."""
    dtype, whole, expected = one_rank
    with ranked(config(small_model, dtype), size) as ranks:
        got = streams(ranks)
    for i, sampling in enumerate((GREEDY, SEEDED)):
        same = compared(whole, SMALL_PROMPT, sampling, expected[i], got[i])
        assert same > 8 or dtype == "bf16"
