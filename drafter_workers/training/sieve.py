"""Which of the conversations a target wrote go into a corpus."""

from collections.abc import Callable, Sequence

from drafter_workers.training.corpus import Corpus, CorpusError, Document
from drafter_workers.training.corpus_writer import CorpusWriter
from drafter_workers.training.overlap import KeptOut

PATIENCE = 2000  # conversations left out one after the other before a target is given up


class Sieve:
    """Lets a document through unless its first question was there before or is kept out.

    `text` is what tokens say. Raises CorpusError when it lets nothing through any more.
    """

    def __init__(
        self, text: Callable[[Sequence[int]], str], kept_out: KeptOut, writer: CorpusWriter
    ) -> None:
        self._text = text
        self._kept_out = kept_out
        self._writer = writer
        self._asked = set[bytes]()
        self._in_a_row = 0
        self._twice = self._unanswered = self._overlapping = 0

    @property
    def left_out(self) -> str:
        """How many documents were left out, and why."""
        return (
            f"{self._twice} asked before, {self._unanswered} without an answer, "
            f"{self._overlapping} with words of prompts that are kept out"
        )

    def remember(self, corpus: Corpus) -> None:
        """What an earlier run wrote was asked before."""
        for span in corpus.documents:
            tokens, answers = corpus.tokens(span), corpus.answers(span)
            self._asked.add(tokens[: answers.argmax()].tobytes())

    def take(self, document: Document) -> None:
        """Write a document down, or that it is left out."""
        question = document.tokens[: document.answers.argmax()].tobytes()
        if not document.answers.any():
            self._unanswered += 1
        elif question in self._asked:
            self._twice += 1
        elif self._kept_out.overlap(self._text(document.tokens.tolist())):
            self._overlapping += 1
        else:
            self._asked.add(question)
            self._in_a_row = 0
            self._writer.add(document)
            return
        self._leave_out(document.number)

    def _leave_out(self, number: int) -> None:
        self._writer.leave_out(number)
        self._in_a_row += 1
        if self._in_a_row == PATIENCE:
            raise CorpusError(
                f"the last {PATIENCE} conversations were all left out ({self.left_out}): the "
                "target has no more to say by itself; ask for fewer tokens, or give prompts with "
                "--data"
            )
