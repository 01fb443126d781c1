"""How the tokens of one sequence are chosen, and what is told of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protos.sampling import PLAIN, UNSCORED, Sampling, Scoring
from target_workers.model import grammar
from target_workers.model.grammar import GrammarError
from target_workers.model.history import History, Matcher


class Grammars(Protocol):
    """What makes matchers of grammars."""

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Of a grammar, after some output. Raises GrammarError."""


@dataclass(frozen=True, slots=True, eq=False)
class Chooser:
    """Without processors there is no history to keep. With an `error` nothing can be chosen."""

    sampling: Sampling
    scoring: Scoring = UNSCORED
    history: History | None = None
    error: str = ""

    @property
    def rule(self) -> str:
        """The rule that decides which guesses stand: at temperature 0 there is but one."""
        return self.sampling.rule if self.sampling.temperature > 0 else "match"

    def commit(self, tokens: Sequence[int]) -> None:
        """These were appended to the sequence."""
        if self.history is not None:
            self.history.commit(tokens)


class Choosers:
    """Makes a chooser of every sequence that is opened."""

    def __init__(self, vocab_size: int, grammars: Grammars | None = None) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars

    def open(
        self, sampling: Sampling, tokens: Sequence[int], scoring: Scoring = UNSCORED
    ) -> Chooser:
        """Of a sequence that has these tokens."""
        if sampling.processors == PLAIN:
            return Chooser(sampling, scoring)
        try:
            matcher = self._matcher(sampling, tokens)
        except GrammarError as error:
            return Chooser(sampling, scoring, error=str(error))
        history = History(sampling, tokens, self._vocab_size, matcher)
        return Chooser(sampling, scoring, history)

    def _matcher(self, sampling: Sampling, tokens: Sequence[int]) -> Matcher | None:
        asked = sampling.processors.grammar
        if not asked:
            return None
        if self._grammars is None:
            raise GrammarError("this worker has no tokenizer to follow a grammar with")
        return self._grammars.matcher(asked, tokens[sampling.prompt_tokens :])


def grammars_of(folder: Path, vocab_size: int) -> Grammars | None:
    """Those of a model's tokenizer; a folder without one follows none."""
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return grammar.Grammars(folder, vocab_size) if has_tokenizer else None
