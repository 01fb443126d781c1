"""What processors go by: the tokens before a row. Kept as they are committed; knows no tensors."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.sampling import Processors, Sampling
from target_workers.model.ngrams import Ngrams
from target_workers.model.penalties import Penalties


class Matcher(Protocol):
    """The grammar of one sequence, where its committed output has led it."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """What may follow the committed output and a path of guesses: [vocab_size]."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """These are output from now on."""
        ...


class History:
    """What the processors of one sequence need of its committed tokens; grows with them.

    A step costs by the distinct tokens, never by all of them. `matcher` knows the output in
    `tokens` already. Ids from `vocab_size` on have no logits, but are history like others.
    """

    def __init__(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        asked = sampling.processors
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.matcher = matcher
        self.allowed = self._ids(asked.allowed) if asked.allowed else None
        self.penalties = Penalties(asked, vocab_size) if _has_penalties(asked) else None
        self._withheld = frozenset(asked.withheld)
        self._ngrams = Ngrams(asked.no_repeat_ngram) if asked.no_repeat_ngram else None
        self._num_output = -sampling.prompt_tokens  # below 0: the prompt is not all there yet
        self._add(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """These were appended to the sequence."""
        output = self._add(tokens)
        if self.matcher is not None:
            self.matcher.commit(output)

    def excluded(self, path: Sequence[int]) -> NDArray[np.int64]:
        """Ids that are withheld or would repeat a run after a path of guesses, in any order."""
        found = self._ngrams.repeats(path) if self._ngrams else set()
        if self._num_output + len(path) < self.sampling.processors.min_tokens:
            found = found | self._withheld
        return self._ids(found)

    def _add(self, tokens: Sequence[int]) -> Sequence[int]:
        """Take tokens in; returns those that are output."""
        of_prompt = max(-self._num_output, 0)
        prompt, output = tokens[:of_prompt], tokens[of_prompt:]
        if self.penalties is not None:
            self.penalties.commit(prompt, is_output=False)
            self.penalties.commit(output, is_output=True)
        if self._ngrams is not None:
            self._ngrams.commit(tokens)
        self._num_output += len(tokens)
        return output

    def _ids(self, tokens: Sequence[int] | frozenset[int] | set[int]) -> NDArray[np.int64]:
        ids = np.fromiter(tokens, np.int64, len(tokens))
        return ids[ids < self.vocab_size]


def _has_penalties(asked: Processors) -> bool:
    scores = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
    return scores != (1, 0, 0) or bool(asked.bias)
