"""What the tokens of a tokenizer.json stand for: the same at the edge and at every worker."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

Json = Mapping[str, object]


def decoding(decoder: object) -> Callable[[str], bytes]:
    """How the `decoder` of a tokenizer.json turns one token into bytes. Raises ValueError."""
    match decoder:
        case {"type": "Sequence", "decoders": [*steps]}:
            pass
        case {"type": str()}:
            steps = [decoder]
        case _:
            raise ValueError("tokenizer.json names no decoder; tokens cannot be turned into text")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return partial(_byte_level, _char_bytes())
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ValueError(f"tokenizer.json has a decoder that is not supported: {kinds}")
    # Strip takes a space from the start of a whole text only; an output never is at the start.
    spaces = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    spaces += [_replacement(step) for step in steps if step["type"] == "Replace"]
    return partial(_with_fallback, spaces, has_bytes="ByteFallback" in kinds)


def _replacement(step: Json) -> tuple[str, str]:
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case _:
            raise ValueError(f"tokenizer.json has a decoder that is not supported: {step}")


def _byte_level(char_bytes: Mapping[str, int], token: str) -> bytes:
    """Each character stands for a byte; a token with any other is taken literally."""
    known = [char_bytes[char] for char in token if char in char_bytes]
    return bytes(known) if len(known) == len(token) else token.encode()


def _char_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _with_fallback(spaces: Sequence[tuple[str, str]], token: str, *, has_bytes: bool) -> bytes:
    """A token's text with its spaces put back, or the one byte that `<0xNN>` stands for."""
    if has_bytes and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    for old, new in spaces:
        token = token.replace(old, new)
    return token.encode()
