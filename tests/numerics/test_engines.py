"""Both engines over tiny real models: caches equal a fresh prefill, trees equal plain decoding."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_workers.engine import DraftEngine
from protos.draft_tree import Node
from protos.messages import Advance, Extend, Grow, Open, Step, StepOpen, Stepped, TreeNode
from protos.sampling import GREEDY, Sampling
from target_workers.model.batch import build_batch
from target_workers.model.decoder import Decoder
from target_workers.model.kv_cache import KVCache
from target_workers.model.loading import load_decoder
from target_workers.model.run import Run
from target_workers.model.sampling import top_tokens
from tests.duo import Duo, audit, counts, step
from tests.tiny import make_tiny_llama
from tests.tiny_engines import VOCAB, Drafter, Target, make_drafter, make_target, plain, prefill

PROMPT = (5, 9, 200, 31, 7, 7, 118)
NOISY = Sampling(0.8, 21)
MODELS = ("target", "drafter")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only cost time on models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """A target of two layers and an unrelated drafter of one, in float64."""
    folder = tmp_path_factory.mktemp("tiny")
    return {name: load_decoder(_write(folder / name, name), dtype=torch.float64) for name in MODELS}


def _write(folder: Path, name: str) -> Path:
    return make_tiny_llama(
        folder, seed=MODELS.index(name), vocab=VOCAB, layers=2 - MODELS.index(name)
    )


@pytest.mark.parametrize("width", range(1, 10))
def test_a_block_gives_the_logits_of_one_token_at_a_time(tmp_path: Path, width: int) -> None:
    """Case B002, in float32."""
    decoder = load_decoder(_write(tmp_path, "target"), dtype=torch.float32)
    cache = KVCache(decoder.config, 64, torch.float32)
    slots = np.arange(64)
    tokens = np.array([*PROMPT, *range(40, 40 + width)])
    at = len(PROMPT)

    def logits(first: int, block: np.ndarray) -> Tensor:
        run = Run(block, first, slots[first : first + len(block)], slots[:first])
        return decoder.logits(decoder.hidden(build_batch([run]), cache))

    logits(0, tokens[:at])
    alone = torch.cat([logits(i, tokens[i : i + 1]) for i in range(at, at + width)])
    block = logits(at, tokens[at:])
    assert (block - alone).abs().max() <= 1e-4
    best = alone.topk(2).values
    sure = best[:, 0] - best[:, 1] > 1e-3
    assert torch.equal(block.argmax(-1)[sure], alone.argmax(-1)[sure])
    for i in range(1, width):
        changed = tokens[at:].copy()
        changed[i] += 1
        assert torch.equal(logits(at, changed)[:i], block[:i]), "a row depends on a later one"


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
@pytest.mark.parametrize(
    ("model", "width", "k"), [("target", 1, 6), ("target", 3, 12), ("drafter", 3, 12)]
)
def test_a_drafted_stream_equals_the_plain_one(
    decoders: dict[str, Decoder], model: str, width: int, k: int, sampling: Sampling
) -> None:
    target = make_target(decoders["target"], page_size=5)
    drafter = make_drafter(decoders[model], width)
    duo = Duo(target.engine, drafter.engine, k, "chain" if width == 1 else "tree")
    prompts = {seq: PROMPT[: seq + 1] * (seq + 1) for seq in range(4)}
    for seq, prompt in prompts.items():
        duo.open(seq, prompt, sampling)
    while min(len(line.output) for line in duo.lines.values()) < 40:
        duo.draft(5)
        duo.round()
        audit(target.engine)
        audit(drafter.engine)
    for seq, prompt in prompts.items():
        assert duo.lines[seq].output[:40] == plain(decoders["target"], prompt, 40, sampling)


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_exact_mode_gives_the_plain_stream_in_bf16(
    tmp_path: Path, sampling: Sampling, kv: torch.dtype
) -> None:
    decoder = load_decoder(_write(tmp_path, "target"), dtype=torch.bfloat16)
    target, drafter = make_target(decoder, kv=kv), make_drafter(decoder, width=3)
    duo = Duo(target.engine, drafter.engine, 9, "tree")
    lines = [duo.open(seq, PROMPT[seq:], sampling) for seq in range(3)]
    while min(len(line.output) for line in lines) < 60:
        duo.draft(4)
        duo.round()
    for seq, line in enumerate(lines):
        assert line.output[:60] == plain(decoder, PROMPT[seq:], 60, sampling, kv)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_no_guess_of_the_target_itself_is_rejected(
    decoders: dict[str, Decoder], k: int, sampling: Sampling
) -> None:
    """Case B050: whatever is missing in the drafter's cache shows as a rejection."""
    target, drafter = make_target(decoders["target"]), make_drafter(decoders["target"])
    duo = Duo(target.engine, drafter.engine, k)
    duo.credit = k
    line = duo.open(1, PROMPT, sampling)
    while len(line.output) < 300:
        duo.draft()
        duo.round()
    assert set(line.proposed) == set(line.accepted) == {k}


def test_drafting_is_whole_again_after_a_time_without_guesses(
    decoders: dict[str, Decoder],
) -> None:
    """Case B052, with the target as its own drafter."""
    target, drafter = make_target(decoders["target"]), make_drafter(decoders["target"], feed=8)
    duo = Duo(target.engine, drafter.engine)
    line = duo.open(1, PROMPT)
    for k, rounds in ((4, 5), (0, 30), (4, 20)):
        duo.credit = 8 if k else 0
        for _ in range(rounds):
            duo.draft()
            duo.round(k=k)
    assert line.accepted == line.proposed
    assert line.proposed[:35] == [4] * 5 + [0] * 30
    assert line.proposed[36:] == [4] * 19


def assert_fresh(drafter: Drafter, seq: int, tokens: Sequence[int]) -> None:
    """Law 5: committed rows equal a fresh prefill, nodes a full recomputation of their path."""
    rows, _ = prefill(drafter.decoder, tokens)
    held = drafter.rows(seq)
    torch.testing.assert_close(held, rows[:, : held.shape[1]], atol=1e-9, rtol=0)
    tree = drafter.engine.tree(seq)
    paths: dict[Node | None, list[int]] = {None: []}
    sampling = drafter.model._sequences[seq].chooser.sampling
    temperature = torch.tensor([sampling.temperature], dtype=torch.float64)
    for node in tree.walk():
        above = paths[node.parent]
        paths[node] = [*above, node.token]
        _, logits = prefill(drafter.decoder, [*tokens, *above])
        ranked = top_tokens(logits[-1:], temperature, VOCAB)
        index = ranked.tokens[0].tolist().index(node.token)
        assert node.scores["drafter"] == pytest.approx(ranked.log_probs[0, index].item(), abs=1e-5)
        assert sampling.temperature or index < 3, "a node is one of the likeliest"


@pytest.mark.parametrize(
    ("sampling", "rank"), [(GREEDY, "noise"), (NOISY, "noise"), (NOISY, "argmax")]
)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_equals_a_fresh_one_after_any_history(
    decoders: dict[str, Decoder], seed: int, width: int, sampling: Sampling, rank: str
) -> None:
    draw = random.Random(seed)
    drafter = make_drafter(decoders["drafter"], width, rank, feed=5)
    tokens = {seq: list(PROMPT[:seq]) for seq in (1, 2, 7)}
    for seq, prompt in tokens.items():
        drafter.engine.handle(Open(seq, 1, tuple(prompt), sampling, 10))
    for _ in range(12):
        for _ in range(draw.randrange(6)):
            drafter.engine.work()
        seq = draw.choice(list(tokens))
        new = _walk(draw, drafter, seq)
        drafter.engine.handle(
            Advance(seq, 1, len(tokens[seq]), tuple(new), draw.choice((0, 10, 10)))
        )
        tokens[seq].extend(new)
        audit(drafter.engine)
    while drafter.engine.work() is not None:
        pass
    for seq, committed in tokens.items():
        assert_fresh(drafter, seq, committed)


def _walk(draw: random.Random, drafter: Drafter, seq: int) -> list[int]:
    """Some way down the tree, and often off it."""
    tokens: list[int] = []
    children = drafter.engine.tree(seq).children
    while children and draw.random() < 0.7:
        token = draw.choice(list(children))
        tokens.append(token)
        children = children[token].children
    return tokens if tokens and draw.random() < 0.3 else [*tokens, draw.randrange(VOCAB)]


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("second", range(5))
def test_the_next_draft_is_that_of_a_fresh_drafter(
    decoders: dict[str, Decoder], first: int, second: int
) -> None:
    """Case B049: K = 4, any number accepted, then any other."""
    drafter = make_drafter(decoders["drafter"])
    drafter.engine.handle(Open(1, 1, PROMPT, GREEDY, 4))
    tokens = list(PROMPT)
    for accepted in (first, second):
        guesses = _draft(drafter.engine)
        assert len(guesses) == 4
        wrong = (guesses[accepted] + 1) % VOCAB if accepted < 4 else 3
        new = (*guesses[:accepted], wrong)
        drafter.engine.handle(Advance(1, 1, len(tokens), new, 4))
        tokens.extend(new)
        state = drafter.model._sequences[1]
        assert state.computed == len(tokens) - (2 if accepted == 4 else 1)
        assert drafter.model.pending(1) == (1 if accepted == 4 else 0)
        assert len(drafter.model._free) == 1200 - state.computed
    fresh = make_drafter(decoders["drafter"])
    fresh.engine.handle(Open(1, 1, tuple(tokens), GREEDY, 4))
    assert _draft(drafter.engine) == _draft(fresh.engine)
    assert_fresh(drafter, 1, tokens)


def _draft(engine: DraftEngine) -> list[int]:
    tokens: list[int] = []
    while (answers := engine.work()) is not None:
        for message in answers:
            if isinstance(message, Grow):
                tokens.extend(guess.token for guess in message.nodes)
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_targets_rows_equal_a_fresh_prefill_after_any_tree(
    decoders: dict[str, Decoder], share: float, sampling: Sampling
) -> None:
    """Law 5 for the target; case B051 where no guess is right."""
    draw = random.Random(17)
    target = make_target(decoders["target"], page_size=4, num_pages=40)
    right = plain(decoders["target"], PROMPT, 120, sampling)
    tokens = list(PROMPT)
    cached = 0
    opens: tuple[StepOpen, ...] = (StepOpen(1, PROMPT, sampling),)
    keep: tuple[int, ...] = ()
    for number in range(1, 13):
        nodes = _tree(draw, right[len(tokens) - len(PROMPT) :], share)
        extend = Extend(1, cached, tuple(tokens[cached:]), nodes, keep)
        (verdict,) = _step(target, step(number, opens, [extend])).verdicts
        held = len(tokens)
        rows, _ = prefill(decoders["target"], tokens)
        torch.testing.assert_close(target.rows(1, held), rows, atol=1e-9, rtol=0)
        cached, keep, opens = held + len(verdict.walk), verdict.walk, ()
        tokens += [*(nodes[i].token for i in verdict.walk), verdict.next_token]
        assert tokens == [*PROMPT, *right][: len(tokens)]
        audit(target.engine)


def _tree(draw: random.Random, right: Sequence[int], share: float) -> tuple[TreeNode, ...]:
    """Eight nodes; by chance the next right one, else a wrong one anywhere."""
    nodes: list[TreeNode] = []
    at = -1
    depth = 0
    for i in range(8):
        if draw.random() < share:
            nodes.append(TreeNode(at, right[depth]))
            at, depth = i, depth + 1
        else:
            parent = draw.randrange(-1, i)
            taken = {node.token for node in nodes if node.parent == parent} | set(right)
            nodes.append(TreeNode(parent, min(set(range(100)) - taken)))
    return tuple(nodes)


def test_logits_that_are_not_finite_leave_the_other_sequences_as_they_were(
    decoders: dict[str, Decoder],
) -> None:
    verdicts = []
    for spoilt in (False, True):
        target = make_target(decoders["target"])
        duo = Duo(target.engine, k=0)
        lines = [duo.open(seq, PROMPT[seq:]) for seq in (1, 2)]
        duo.round()
        if spoilt:
            target.cache.layer(0)[int(target.engine._pages.slots(1)[0])] = float("nan")
        verdicts.append([duo.round()[1] for _ in range(3)])
        assert bool(lines[0].errors) == spoilt
        assert not lines[1].errors
        audit(target.engine)
    assert verdicts[0] == verdicts[1]


def test_a_guess_whose_row_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    """Masked keys of one attention call count 0 x NaN, so the guess spoils the row of the root."""
    decoder = load_decoder(_write(tmp_path, "target"), dtype=torch.float64)
    right = plain(decoder, PROMPT, 6, GREEDY)
    spoilt = next(token for token in range(VOCAB) if token not in (*PROMPT, *right))
    decoder.embedding.data = decoder.embedding.clone()  # the head goes on with the sound one
    decoder.embedding[spoilt] = float("nan")
    target = make_target(decoder)
    tokens, cached = list(PROMPT), 0
    opens: tuple[StepOpen, ...] = (StepOpen(1, PROMPT, GREEDY),)
    for number in range(1, 6):
        nodes = (TreeNode(-1, spoilt), TreeNode(0, 3))
        extend = Extend(1, cached, tuple(tokens[cached:]), nodes)
        (verdict,) = _step(target, step(number, opens, [extend])).verdicts
        assert (verdict.error, verdict.walk) == ("", ())
        cached, opens = len(tokens), ()
        tokens.append(verdict.next_token)
        assert target.rows(1, cached).isfinite().all()
    assert tokens[len(PROMPT) :] == right[:5]
    assert counts(target.engine)["bared"] == 5


def _step(target: Target, message: Step) -> Stepped:
    (stepped,) = target.engine.handle(message)
    assert isinstance(stepped, Stepped)
    return stepped
