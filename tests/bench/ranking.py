"""By what a drafter should rank its guesses: `python -m tests.bench.ranking --drafter PATH`.

The target answers prompts at each temperature by its own noise. At every token of the answers: the
chance that the drafter's first guess stands if it is its likeliest token, the one that the target's
noise makes best, or an independent draw; and the most that any draw could reach, which is what both
distributions share.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from drafter_workers.student import read_borrowed
from drafter_workers.training.capture import Capture, CaptureConfig
from drafter_workers.training.conversation import Plan
from drafter_workers.training.corpus import Document
from drafter_workers.training.plans import Style, answered
from drafter_workers.training.teachers import run_rows
from services import terminal
from services.capturing import chat_frame
from services.prompts import Prompt
from services.pull import resolve
from services.tokenizer import Tokenizer, load_tokenizer
from target_workers.model.decoder import TorchDecoder
from target_workers.model.loading import DTYPES, Part, load_decoder, load_reference
from target_workers.model.noise import as_int64
from target_workers.model.sampling import choose
from tests import prompts


@dataclass(frozen=True, slots=True)
class Row:
    """Chances that a first guess stands, over so many tokens."""

    temperature: float
    tokens: int
    shared: float
    argmax: float
    independent: float
    possible: float


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    """One for each temperature."""
    folder, drafter = resolve(asked.model), resolve(asked.drafter)
    tokenizer = load_tokenizer(folder)
    chosen = prompts.spread(prompts.load(asked.prompts), asked.limit)
    borrowed = read_borrowed(drafter)
    part = Part() if borrowed is None else Part(loan=borrowed.loan(folder))
    target = load_reference(folder, dtype=DTYPES["fp32"])
    student = load_reference(drafter, dtype=DTYPES["fp32"], part=part)
    known = None if borrowed is None or borrowed.ids is None else torch.tensor(borrowed.ids)
    for temperature in asked.temperature:
        plans, documents = written(folder, tokenizer, chosen, temperature, asked.max_tokens)
        figures = [
            chances(target, student, known, plans[each.number], each, temperature)
            for each in documents
        ]
        total = torch.cat(figures).mean(0).tolist()
        yield Row(temperature, sum(map(len, figures)), *total)


def written(
    folder: Path,
    tokenizer: Tokenizer,
    chosen: Sequence[Prompt],
    temperature: float,
    max_tokens: int,
) -> tuple[dict[int, Plan], list[Document]]:
    """The target's answers to all prompts, and the plans they were written by."""
    first = [[tuple(tokenizer.library.encode(p.turns[0]).ids)] for p in chosen]
    style = Style(answer_tokens=max_tokens, answer_temperatures=(temperature,))
    plans = {plan.number: plan for plan in answered(first, chat_frame(tokenizer), style, 0)}
    longest = max(len(plan.turns[0].given) for plan in plans.values()) + max_tokens
    config = CaptureConfig(
        tokenizer.vocab_size, frozenset(tokenizer.eos_ids), batch=16, max_length=longest
    )
    decoder = load_decoder(folder, dtype=DTYPES["bf16"])
    decoder.compile(DTYPES["bf16"])
    documents: list[Document] = []
    Capture(decoder, config, DTYPES["bf16"]).run(iter(plans.values()), documents.append)
    return plans, documents


@torch.inference_mode()
def chances(
    target: TorchDecoder,
    student: TorchDecoder,
    known: Tensor | None,
    plan: Plan,
    document: Document,
    temperature: float,
) -> Tensor:
    """Of every token of an answer: shared, argmax, independent, possible [n, 4]."""
    places = torch.from_numpy(document.answers.nonzero()[0])
    tokens = torch.from_numpy(document.tokens)[None]
    logits = target.logits(run_rows(target, tokens)[places - 1]).float()
    own = student.head(run_rows(student, tokens)[places - 1]).float()
    if known is not None:
        own = torch.full_like(logits, -torch.inf).index_copy_(1, known, own)
    of_target, of_drafter = (each.div(temperature).double().softmax(-1) for each in (logits, own))
    drawn = [
        choose(each, torch.full((len(places),), temperature).double(), _seeds(plan, places), places)
        for each in (logits, own)
    ]
    best = own.argmax(-1, keepdim=True)
    return torch.stack(
        (
            (drawn[0].tokens == drawn[1].tokens).double(),
            of_target.gather(1, best)[:, 0],
            (of_target * of_drafter).sum(-1),
            torch.minimum(of_target, of_drafter).sum(-1),
        ),
        1,
    )


def _seeds(plan: Plan, places: Tensor) -> Tensor:
    return as_int64([plan.seed]).expand(len(places))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="smollm2-135m-student")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, default=prompts.default_path())
    parser.add_argument("--limit", type=int, default=52)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = list(rows(asked))
    if asked.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    names = ("temperature", "tokens", "shared noise", "argmax", "independent", "possible")
    table = Table(*names, box=box.SIMPLE)
    for row in found:
        figures = (row.shared, row.argmax, row.independent, row.possible)
        table.add_row(f"{row.temperature:g}", str(row.tokens), *(f"{each:.3f}" for each in figures))
    terminal.out.print(table)


if __name__ == "__main__":
    main()
