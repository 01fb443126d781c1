"""A grammar is a text in llguidance's dialect of Lark; here is how everyone compiles it.

Run as a program it tries the grammar on its standard input, within bounds the library alone does
not keep: a few hundred bytes can make it compute for minutes or run out of stack or memory.
"""

import random
import re
import resource
import sys
import threading
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_BYTES = 32_768
MAX_LEXER_STATES = 20_000  # of 1 to 2 kB each
STACK_BYTES = 128 << 20  # compiling recurses along rules and references
TRIAL_CPU_S = 1
TRIAL_MEMORY_BYTES = 1 << 30
TRIAL_STEPS = 64
REFUSED = 3  # exit status of a trial that found the grammar at fault; the cause is its output

# Else, where only one text can follow, only the tokenizer's own spelling of it would be allowed.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'
_CAUSE_CHARS = 300


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Its matcher, before any output. Raises ValueError with the cause."""
    if len(grammar.encode()) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES} bytes")
    made: list[LLMatcher] = []
    _on_deep_stack(lambda: made.append(_compile(tokenizer, grammar)))
    (matcher,) = made
    if matcher.is_error():
        raise ValueError(cause(matcher))
    return matcher


def cause(matcher: LLMatcher) -> str:
    """Why a matcher stopped working, in one line."""
    text = re.split(r"\n<|\n\s*\d+ \| ", matcher.get_error())[0]
    text = re.sub(r"regex parse error:.*error: ", "", text, flags=re.DOTALL)
    return " ".join(text.split())[:_CAUSE_CHARS]


def is_dead_end(matcher: LLMatcher) -> bool:
    """True if it stopped because nothing can follow, though the output is not complete."""
    return matcher.get_error().startswith("NoExtensionBias")


def is_exhausted(matcher: LLMatcher) -> bool:
    """True if it stopped for all it has learnt so far; compiled anew it may get further."""
    return matcher.get_error().startswith("lexer error")


def _compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    limits = LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        max_items_in_row=1000,  # an ambiguous grammar takes a time quadratic in them
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar + _UNFORCED, log_level=0, limits=limits)


_stack_size = threading.Lock()


def _on_deep_stack(task: Callable[[], None]) -> None:
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=task)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


def check(grammar: str) -> None:
    """Compile it and write a little by it. Raises ValueError with the cause."""
    matcher = compiled(LLTokenizer("byte"), grammar)
    chance = random.Random(0)
    output = bytearray()
    for _ in range(TRIAL_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise ValueError(_failure(matcher, bytes(output)))
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_stopped() or not allowed:
            return
        output.append(chance.choice(allowed))
        if not matcher.try_consume_tokens([output[-1]]):
            raise ValueError(_failure(matcher, bytes(output)))


def _failure(matcher: LLMatcher, output: bytes) -> str:
    if not is_dead_end(matcher):
        return cause(matcher)
    if not output:
        return "no output can satisfy it"
    return f"an output that begins with {output.decode(errors='replace')!r} cannot be completed"


def main() -> int:
    """Try the grammar on standard input; tells the cause and returns REFUSED if it will not do."""
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY_BYTES, TRIAL_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        check(sys.stdin.buffer.read().decode())
    except ValueError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
