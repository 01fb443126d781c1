"""What an output must be, from what a client asks to the grammar that travels; checked here.

A grammar is tried in a process of its own, since one made to do harm can neither be interrupted nor
survived. That takes a tenth of a second, so it is nothing for an event loop.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher

import protos.grammar
from protos.grammar import MAX_BYTES, REFUSED

ANY_JSON = "start: %json {}"
TRIAL_S = 20.0  # by the clock, where other work holds the trial up; its own limit is CPU time
REMEMBERED = 256

_WHERE = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")

# Literals and comments are passed over; what is left of the names of tokens and of options counts.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"'
    r"|//[^\n]*|\#[^\n]*"
    r"|/(?:\\.|[^/\\\n])+/"
    r"|(?P<token><[^<>\s]+>)"
    r"|\b(?P<option>stop|max_tokens|temperature)\s*="
)


def json_grammar(schema: str) -> str:
    """Outputs that a JSON schema allows. Raises ValueError."""
    _check_size("the JSON schema", schema)
    try:
        parsed = json.loads(schema, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply; flatten it with $ref") from None
    except ValueError as error:
        raise ValueError(f"the JSON schema is not JSON ({error}); correct it") from error
    if not isinstance(parsed, dict | bool):
        raise ValueError("the JSON schema must be an object or a boolean; send one of them")
    return _tried("the JSON schema", f"start: %json {json.dumps(parsed, ensure_ascii=False)}")


def regex_grammar(pattern: str) -> str:
    """Outputs that match a regular expression from end to end. Raises ValueError."""
    _check_size("the regular expression", pattern)
    escaped = json.loads(LLMatcher.grammar_from_regex(pattern))
    return _tried("the regular expression", escaped["grammars"][0]["lark_grammar"])


def choice_grammar(options: Sequence[str]) -> str:
    """Outputs that are one of some texts. Raises ValueError."""
    if not options:
        raise ValueError("the choice has no options; give at least one")
    for option in options:
        _check_size("an option of the choice", option)
    literals = [json.dumps(option, ensure_ascii=False) for option in options]
    return _tried("the choice", "start: OPTION\nOPTION: " + " | ".join(literals))


def lark_grammar(text: str) -> str:
    """Outputs of a grammar in llguidance's dialect of Lark. Raises ValueError."""
    _check_size("the grammar", text)
    for found in _LARK.finditer(text):
        if found["token"]:
            raise ValueError(
                f"the grammar names the token {found['token']}, but it is followed by text alone; "
                "write the text in quotes"
            )
        if found["option"]:
            raise ValueError(
                f"the grammar has the option {found['option']}, which is not supported; leave it "
                "out"
            )
    return _tried("the grammar", text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has the value {name}")


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair; correct it") from error
    if size > MAX_BYTES:
        raise ValueError(f"{name} has {size} bytes, more than {MAX_BYTES}; shorten it")


@lru_cache(maxsize=REMEMBERED)
def _tried(name: str, grammar: str) -> str:
    """The grammar, if it will do. Raises ValueError."""
    _check_size(name, grammar)
    trial = [sys.executable, "-P", protos.grammar.__file__]
    costly = ValueError(f"{name} takes too much time or memory to follow; simplify it")
    try:
        done = subprocess.run(trial, input=grammar.encode(), capture_output=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        raise costly from None
    if done.returncode < 0:  # a signal: out of its CPU time, or of stack or memory
        raise costly
    if done.returncode:
        told = done.stdout if done.returncode == REFUSED else done.stderr.splitlines()[-1]
        found = _WHERE.sub("", told.decode(errors="replace").strip())
        raise ValueError(f"{name} cannot be followed ({found}); correct it")
    return grammar
