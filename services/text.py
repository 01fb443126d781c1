"""Tokens to text as they come, and the stop strings in it: the one place that knows both.

What has been released is a function of the tokens pushed so far, never of how they were grouped.
"""

import codecs
from collections.abc import Sequence

from orchestrator.request import Request
from services.tokenizer import Tokenizer


class TextStream:
    """The text of one completion, token by token.

    `pieces[id]` are the bytes a token stands for. Text that may be part of a stop string, and
    bytes of a character that is not whole yet (at most three), wait inside. After a stop nothing
    more comes, and `stopped` is True.
    """

    def __init__(
        self, pieces: Sequence[bytes], stops: Sequence[str] = (), *, keep_stop: bool = False
    ) -> None:
        self.stopped = False
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._keep_stop = keep_stop
        self._text = ""  # not released yet
        self._held = 0  # how many of its last characters may belong to a stop string

    def push(self, token: int) -> None:
        """Take the next output token."""
        assert not self.stopped, "nothing follows a stop"
        self._append(self._decoder.decode(self._pieces[token]))

    def release(self) -> str:
        """The text since the last release that no later token can change."""
        end = len(self._text) - self._held
        safe, self._text = self._text[:end], self._text[end:]
        return safe

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        rest = "" if self.stopped else self._decoder.decode(b"", final=True)
        self._held = 0
        self._text += rest
        return self.release()

    def _append(self, text: str) -> None:
        if not self._matchers:
            self._text += text
            return
        for char in text:
            self._text += char
            done = [matcher.size for matcher in self._matchers if matcher.push(char)]
            if done:
                self._stop(max(done))
                return
        self._held = max(matcher.matched for matcher in self._matchers)

    def _stop(self, size: int) -> None:
        self.stopped = True
        self._held = 0
        if not self._keep_stop:
            self._text = self._text[: len(self._text) - size]


class _Matcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt)."""

    def __init__(self, pattern: str) -> None:
        assert pattern, "an empty string is everywhere"
        self.size = len(pattern)
        self.matched = 0  # length of the longest prefix that the stream ends with
        self._pattern = pattern
        self._shorter = [0, 0]  # by matched length: the next shorter prefix that fits as well
        shorter = 0
        for char in pattern[1:]:
            shorter = self._longer(shorter, char)
            self._shorter.append(shorter)

    def push(self, char: str) -> bool:
        """Take a character; True if it completes the string."""
        self.matched = self._longer(self.matched, char)
        return self.matched == self.size

    def _longer(self, matched: int, char: str) -> int:
        while matched and self._pattern[matched] != char:
            matched = self._shorter[matched]
        return matched + 1 if self._pattern[matched] == char else 0


class TokenStopper:
    """Ends a sequence at certain token ids, and where a text stream finds a stop string."""

    def __init__(self, ids: frozenset[int], text: TextStream | None = None) -> None:
        self._ids = ids
        self._text = text

    def push(self, token: int) -> bool:
        """Take the next output token; True if the sequence ends with it."""
        if self._text is None:
            return token in self._ids
        self._text.push(token)
        self._text.release()
        return self._text.stopped or token in self._ids


def open_text(tokenizer: Tokenizer, request: Request, *, keep_stop: bool = False) -> TextStream:
    """The text of a request's output from where the resumed tokens, if any, left off."""
    text = TextStream(tokenizer.pieces, request.stop_strings, keep_stop=keep_stop)
    for token in request.resumed:
        text.push(token)
        text.release()
    return text


def make_stopper(tokenizer: Tokenizer, request: Request) -> TokenStopper:
    """The stopper of one sequence. It has seen the request's resumed tokens already."""
    text = open_text(tokenizer, request) if request.stop_strings else None
    return TokenStopper(frozenset(request.stop_token_ids), text)
