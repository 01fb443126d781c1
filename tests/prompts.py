"""The prompts that benchmarks ask, and an even choice of them."""

from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from services.errors import ConfigError
from services.prompts import Prompt, read_prompts

ROOT = Path(__file__).parent.parent
SPEC_BENCH = ROOT.parent / "shared/data/spec_bench/questions.jsonl"
OWN = ROOT / "tests/data/prompts.jsonl"


def load(path: Path) -> tuple[Prompt, ...]:
    """All prompts of a file of JSON lines, with `turns` or `prompt`, and `kind` or `category`.

    Raises ValueError naming the file, the line and what is wrong with it.
    """
    try:
        return read_prompts(path)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def default_path() -> Path:
    """Spec-Bench's questions where they lie beside the repository, else the project's own."""
    return SPEC_BENCH if SPEC_BENCH.is_file() else OWN


def default_prompts() -> tuple[Prompt, ...]:
    """The prompts of `default_path`."""
    return load(default_path())


def spread(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """So many prompts, or all: the first of every kind, then the second of every kind, and on."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*kinds.values()))
    return tuple(islice((prompt for prompt in rounds if prompt is not None), count))
