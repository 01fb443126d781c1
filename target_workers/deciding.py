"""From the logits of a forward to what every Extend led to: where the rules meet the engine.

Rows that no processor changes cost what they always did.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protos.sampling import Score
from target_workers.drawn import Drawn, by_match, checked
from target_workers.model.noise import as_int64
from target_workers.model.processors import Context, process
from target_workers.model.sampling import choose, only_known
from target_workers.model.scores import score
from target_workers.rows import Block, Draws, PromptRows, ancestors
from target_workers.rules import RULES
from target_workers.rules import Block as Guesses


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The logits of all draws [n, vocab], before processors where somebody asks, and after.

    `tokens` are by rule `match`, -1 where there is none.
    """

    raw: Tensor
    logits: Tensor
    is_sound: list[bool]
    tokens: list[int]


@torch.inference_mode()
def decide(logits: Tensor, draws: Draws, vocab_size: int) -> list[Drawn]:
    """What each block of draws led to, from float32 logits [draws, vocab], which it changes."""
    rows = _chosen(only_known(logits, vocab_size), draws)
    return [_with_scores(block, _drawn(block, rows), rows) for block in draws.blocks]


@torch.inference_mode()
def score_prompt(logits: Tensor, prompt: PromptRows, vocab_size: int) -> tuple[Score, ...]:
    """Of a prompt's tokens, from the logits before them [n, vocab], which it changes."""
    return tuple(score(only_known(logits, vocab_size), prompt.tokens, prompt.best))


def _chosen(logits: Tensor, draws: Draws) -> _Rows:
    samplings = [block.chooser.sampling for block in draws.blocks for _ in block.draws]
    contexts = [context for block in draws.blocks for context in _contexts(block)]
    raw, is_sound = logits, logits.amax(-1).isfinite().tolist()
    if any(contexts):
        if any(block.chooser.scoring.output >= 0 for block in draws.blocks):
            raw = logits.clone()
        process(logits, contexts)
    choice = choose(
        logits,
        torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64),
        as_int64(sampling.seed for sampling in samplings),
        torch.tensor(draws.positions),
    )
    return _Rows(raw, logits, is_sound, choice.tokens.tolist())


def _contexts(block: Block) -> Iterator[Context | None]:
    """For each row of a block, what its processors go by; None without any."""
    history, nodes = block.chooser.history, block.extend.nodes
    if history is None:
        yield from (None for _ in block.draws)
        return
    yield Context(history, ())
    for i in range(len(nodes)):
        yield Context(history, tuple(nodes[j].token for j in (*ancestors(nodes, i), i)))


def _drawn(block: Block, rows: _Rows) -> Drawn:
    own = slice(block.draws.start, block.draws.stop)
    tokens, is_sound = rows.tokens[own], rows.is_sound[own]
    if block.chooser.rule == "match":
        return by_match(block, tokens, is_sound)
    sampling, extend = block.chooser.sampling, block.extend
    guesses = Guesses(
        extend.nodes,
        rows.logits[own],
        sampling.temperature,
        sampling.seed,
        block.end,
        extend.dists,
    )
    try:
        drawn = Drawn(*RULES[block.chooser.rule](guesses))
    except ValueError as error:
        return Drawn(error=str(error))
    return checked(block, drawn, tokens, is_sound)


def _with_scores(block: Block, drawn: Drawn, rows: _Rows) -> Drawn:
    """With a score of every token it led to, if that is asked for."""
    scoring, temperature = block.chooser.scoring, block.chooser.sampling.temperature
    if scoring.output < 0 or drawn.error:
        return drawn
    places = [block.draws[1 + i] for i in (-1, *drawn.walk)]
    tokens = [*(block.extend.nodes[i].token for i in drawn.walk), drawn.next_token]
    logits = rows.logits[places] / (temperature or 1.0) if scoring.processed else rows.raw[places]
    return replace(drawn, scores=tuple(score(logits, tokens, scoring.output)))
