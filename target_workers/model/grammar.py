"""Which tokens keep an output within a grammar, after every path of guesses. Knows no torch.

A token is allowed if and only if its bytes can go on to a complete output, and end tokens if and
only if the output is complete. So a mask depends on the text so far and on nothing else.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from protos.grammar import compiled, is_exhausted
from target_workers.model.vocabulary import Vocabulary, load_vocabulary

MAX_COMPILED = 8
CALL_S = 0.01  # of CPU time that a call may take; and
MAX_EXCESS_S = 1.0  # what all calls of a matcher may take beyond that together

Mask = NDArray[np.bool_]


class GrammarError(Exception):
    """A grammar that cannot be followed: the message gives the cause and the remedy."""


@dataclass(frozen=True, eq=False)
class _Spellings:
    """The bytes of every token, as the library asks for them; b"" where no text stands for it."""

    tokens: list[bytes]
    eos_token_id: int
    bos_token_id = None
    special_token_ids = ()

    def __call__(self, text: bytes) -> list[int]:
        """Only of use where one way to spell a text is enforced; none is."""
        return []


class Grammars:
    """Makes matchers for the tokens of a model folder; masks are of the first `vocab_size` ids."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._error = ""
        try:
            vocabulary = load_vocabulary(folder)
            self.end_tokens = vocabulary.end_tokens
            spellings = _spellings(vocabulary)
            self._tokenizer = LLTokenizer(TokenizerWrapper(spellings))
        except (OSError, ValueError) as error:
            self._error = f"the tokenizer of {folder} can follow no grammar: {error}"
            return
        self.has_text = np.array([bool(spelling) for spelling in spellings.tokens])

    def is_text(self, token: int) -> bool:
        """True if it stands for some bytes."""
        return 0 <= token < len(self.has_text) and bool(self.has_text[token])

    def matcher(self, grammar: str, output: Sequence[int]) -> "GrammarMatcher":
        """Of an output that has these tokens. Raises GrammarError."""
        if self._error:
            raise GrammarError(f"{self._error}; ask for the output without one")
        matcher = GrammarMatcher(self, grammar)
        matcher.commit(output)
        if matcher.is_lost:
            raise GrammarError(
                "the output so far does not follow the grammar; resume with the one it began with"
            )
        return matcher

    def start(self, grammar: str, *, anew: bool = False) -> LLMatcher:
        """Before any output; `anew`, nothing is shared with other matchers. Raises GrammarError."""
        if anew:
            self._compiled.pop(grammar, None)
        try:
            found = self._compiled.get(grammar) or compiled(self._tokenizer, grammar)
        except ValueError as error:
            raise GrammarError(f"the grammar cannot be followed ({error}); correct it") from error
        self._compiled[grammar] = found
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found.deep_copy()

    def mask(self, bits: bytes = b"", *, is_complete: bool = False) -> Mask:
        """[vocab_size], of a bit for each of the tokenizer's tokens, and whether it may end."""
        found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        size = min(self._vocab_size, len(self.has_text), len(found))
        mask = np.zeros(self._vocab_size, np.bool_)
        np.logical_and(found[:size], self.has_text[:size], out=mask[:size])
        mask[[id for id in self.end_tokens if id < self._vocab_size]] = is_complete
        return mask


def _spellings(vocabulary: Vocabulary) -> _Spellings:
    """Of a vocabulary with end tokens, which are no text. Raises ValueError."""
    ends = sorted(id for id in vocabulary.end_tokens if id < len(vocabulary.pieces))
    if not ends:
        raise ValueError("it names no end token")
    spellings = list(vocabulary.pieces)
    for id in ends:
        spellings[id] = b""
    return _Spellings(spellings, ends[0])


class GrammarMatcher:
    """The grammar of one output. A path it forbids, or that is too much work, allows no token."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._library = grammars.start(grammar)
        self._output: list[int] = []  # end tokens left out
        self._beyond: list[int] = []  # guesses that the library has taken in after the output
        self._is_ended = False
        self._excess_s = 0.0
        self.is_lost = False

    def allowed(self, path: Sequence[int]) -> Mask:
        """What may follow the committed output and a path of guesses: [vocab_size]."""
        with self._charged():
            if self.is_lost or self._excess_s > MAX_EXCESS_S:
                return self._grammars.mask()
            found = self._allowed(path)
            self.is_lost = found is None and not path
            return self._grammars.mask() if found is None else found

    def commit(self, tokens: Sequence[int]) -> None:
        """These are output from now on."""
        with self._charged():
            text, ends = self._split(tokens)
            self.is_lost = self.is_lost or not self._can_be(text, ends)
            self._output += text
            del self._beyond[: len(text)]
            self._is_ended = self._is_ended or bool(ends)

    def _allowed(self, path: Sequence[int]) -> Mask | None:
        text, ends = self._split(path)
        if not self._can_be(text, ends):
            return None
        if self._is_ended or ends:
            return self._grammars.mask(is_complete=True)
        for _ in range(2):
            bits = self._library.compute_bitmask()
            if not self._library.is_error():
                return self._grammars.mask(bits, is_complete=self._library.is_accepting())
            if not self._revive() or not self._walk(text):
                break
        return None

    def _split(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens before the first end token, and from there on."""
        ends = self._grammars.end_tokens
        at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return list(tokens[:at]), list(tokens[at:])

    def _can_be(self, text: list[int], ends: list[int]) -> bool:
        """True if these can follow the output; the library is then where `text` leads."""
        if self._is_ended:
            return not text and self._grammars.end_tokens.issuperset(ends)
        if not self._walk(text):
            return False
        return not ends or (
            self._library.is_accepting() and self._grammars.end_tokens.issuperset(ends)
        )

    def _walk(self, text: list[int]) -> bool:
        """Bring the library where `text` leads after the output; False if it cannot go there."""
        if not all(self._grammars.is_text(token) for token in text):
            return False
        for _ in range(2):
            self._move(text)
            if not self._library.is_error():
                return self._beyond == text
            if not self._revive():
                break
        return False

    def _move(self, text: list[int]) -> None:
        pairs = zip(self._beyond, text, strict=False)
        common = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
        if common is None:
            common = min(len(self._beyond), len(text))
        if common < len(self._beyond):
            self._library.rollback(len(self._beyond) - common)
            del self._beyond[common:]
        taken = self._library.try_consume_tokens(text[common:])
        self._beyond += text[common : common + taken]

    def _revive(self) -> bool:
        """The library never leaves an error: begin again. True if it may then get further."""
        anew = is_exhausted(self._library)
        self._library = self._grammars.start(self._grammar, anew=anew)
        self._library.try_consume_tokens(self._output)
        self._beyond = []
        return anew

    @contextmanager
    def _charged(self) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self._excess_s += max(0.0, time.thread_time() - begun - CALL_S)
