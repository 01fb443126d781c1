"""Text to tokens and back, by the files of a model folder. Knows no model and no torch.

A token's bytes do not depend on its neighbours, so text can be streamed from bytes alone; folders
whose decoder is not of that kind are refused when they are loaded.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers

from protos.pieces import decoding
from services.chat import ChatError, ChatTemplate, chat_template
from services.errors import TokenizerError


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. `pieces[id]` are a token's bytes, empty for special tokens."""

    library: tokenizers.Tokenizer
    tokens: tuple[str | None, ...] = field(repr=False)
    special_ids: frozenset[int]
    pieces: tuple[bytes, ...] = field(repr=False)
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's embedding may have further rows."""
        return len(self.tokens)

    @cached_property
    def max_piece_bytes(self) -> int:
        """No token stands for more text than this."""
        return max(map(len, self.pieces), default=0) or 1

    @cached_property
    def vocab_hash(self) -> str:
        """SHA-256 over every entry: equal if and only if all ids mean the same."""
        digest = hashlib.sha256()
        for id, token in enumerate(self.tokens):
            entry = json.dumps([id, token, id in self.special_ids])
            digest.update(entry.encode() + b"\n")
        return digest.hexdigest()

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens, with those the model expects at its start."""
        return tuple(self.library.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """A conversation's tokens up to where the answer begins. Raises ChatError."""
        if self.template is None:
            raise ChatError("the model has no chat template; send the prompt as text")
        rendered = self.template.render(messages)
        return tuple(self.library.encode(rendered, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of output tokens that follow a prompt; special tokens have none."""
        return b"".join(self.pieces[id] for id in ids).decode("utf-8", errors="replace")

    def first_difference(self, other: "Tokenizer") -> str | None:
        """How another tokenizer's ids mean something else, at the first that does; None if none."""
        for id in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self._entry(id), other._entry(id)
            if mine != theirs:
                return f"id {id} is {mine} here and {theirs} there"
        if self.bos_id != other.bos_id:
            return f"the start token is {self.bos_id} here and {other.bos_id} there"
        return None

    def _entry(self, id: int) -> str:
        token = self.tokens[id] if id < self.vocab_size else None
        kind = "the special token " if id in self.special_ids else ""
        return "nothing" if token is None else f"{kind}{token!r}"


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises TokenizerError naming the file that will not do."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json; convert the model to one that has")
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    library.no_truncation()
    library.no_padding()
    settings = _read(folder / "tokenizer_config.json")
    names = {key: _token_text(value) for key, value in settings.items() if key.endswith("_token")}
    tokens = _tokens(library)
    added = library.get_added_tokens_decoder()
    special_ids = frozenset(id for id, token in added.items() if token.special)
    return Tokenizer(
        library,
        tokens,
        special_ids,
        pieces=_pieces(library, tokens, special_ids),
        eos_ids=_eos_ids(folder, library, names.get("eos_token")),
        bos_id=library.token_to_id(names.get("bos_token") or ""),
        template=chat_template(folder, settings, {k: v for k, v in names.items() if v}),
    )


def _tokens(library: tokenizers.Tokenizer) -> tuple[str | None, ...]:
    """Every token's name by id; None where an id is not used."""
    ids = library.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(ids.values(), default=-1) + 1)
    for token, id in ids.items():
        tokens[id] = token
    return tuple(tokens)


def _pieces(
    library: tokenizers.Tokenizer, tokens: Sequence[str | None], special_ids: frozenset[int]
) -> tuple[bytes, ...]:
    to_bytes = _bytes_of(library)
    return tuple(
        b"" if token is None or id in special_ids else to_bytes(token)
        for id, token in enumerate(tokens)
    )


def _bytes_of(library: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How the library's decoder turns one token into bytes. Raises TokenizerError."""
    decoder = library.decoder
    try:
        return decoding(None if decoder is None else json.loads(decoder.__getstate__()))
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _eos_ids(folder: Path, library: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """End tokens: of the generation settings or else the model's, and the tokenizer's own."""
    named = _read(folder / "generation_config.json").get("eos_token_id")
    if named is None:
        named = _read(folder / "config.json").get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    own = library.token_to_id(eos_token) if eos_token else None
    return tuple(sorted({id for id in [*ids, own] if isinstance(id, int)}))


def _token_text(value: object) -> str | None:
    """A special token, written as a text or as an object with its text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read(file: Path) -> dict[str, object]:
    """A JSON object, empty if there is no such file. Raises TokenizerError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content
