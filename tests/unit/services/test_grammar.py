"""From what a client asks an output to be to the grammar that travels, and what is refused."""

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

import protos.grammar
import services.grammar
from protos.grammar import MAX_BYTES, compiled
from services.grammar import (
    ANY_JSON,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)

BYTES = LLTokenizer("byte")


def follows(matcher: LLMatcher, text: str) -> bool:
    """True if a text is a complete output."""
    size = len(text.encode())
    return matcher.try_consume_tokens(list(text.encode())) == size and matcher.is_accepting()


def accepts(grammar: str, text: str) -> bool:
    return follows(compiled(BYTES, grammar), text)


def test_a_schema_asks_for_what_it_describes() -> None:
    grammar = json_grammar('{"type": "array", "items": {"enum": ["é", "\\u00e9\\n", 3]}}')
    assert accepts(grammar, '["é", 3 , "é\\n"]')
    assert not accepts(grammar, '["é", 4]')
    assert not accepts(grammar, "3")


def test_the_order_of_a_schemas_properties_is_kept() -> None:
    grammar = json_grammar(
        '{"properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["b", "a"]}'
    )
    assert accepts(grammar, '{"b":null,"a":null}')
    assert not accepts(grammar, '{"a":null,"b":null}')


def test_any_json_is_json() -> None:
    assert json_grammar("{}") == ANY_JSON
    for text in ("1", "null", '"a"', '[1, {"a": [true]}]', "{}"):
        assert accepts(ANY_JSON, text)
    for text in ("", "nul", "{a: 1}", "[1,]"):
        assert not accepts(ANY_JSON, text)


@pytest.mark.parametrize(
    "pattern", ["(ab|b/)*", 'a"|\n', "/a//|#b", "[^a]b?", "a{2,3}", "\\\\?/?", "(?s:.)b", ""]
)
def test_a_regular_expression_matches_whole_outputs(pattern: str) -> None:
    start = compiled(BYTES, regex_grammar(pattern))
    for size in range(4):
        for chars in itertools.product('ab/\n"#\\', repeat=size):
            text = "".join(chars)
            assert follows(start.deep_copy(), text) == bool(re.fullmatch(pattern, text)), text


def test_a_choice_is_of_just_its_options() -> None:
    options = ["yes", "yes, please", 'no "/\\\n\t\0', "안녕 👍🏽", "<|end|>", "# // /x/", ""]
    grammar = choice_grammar(options)
    for option in options:
        assert accepts(grammar, option)
    for other in ("ye", "yes,", "no", "안", "yesyes", "OPTION"):
        assert not accepts(grammar, other)


def test_a_choice_may_have_many_options() -> None:
    options = [str(n) for n in range(2500)]
    grammar = choice_grammar(options)
    assert accepts(grammar, "2499") and not accepts(grammar, "2500")


def test_a_grammar_is_taken_as_it_is_written() -> None:
    text = 'start: "<|end|>" tail // <|end|>\ntail: /<b>=?/ | %json {"const": "<c>"} # stop=1\n'
    assert lark_grammar(text) == text
    assert accepts(text, "<|end|><b>=") and accepts(text, '<|end|>"<c>"')


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ("[", "is not JSON"),
        ('{"enum": [NaN]}', "is not JSON .it has the value NaN"),
        ('"string"', "must be an object or a boolean"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply|recursion limit"),
        ('{"type": "strin"}', "Invalid type: strin"),
        ('{"not": {}}', 'Unimplemented keys: ."not"'),
        ('{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ."uniqueItems"'),
        ('{"type": "string", "format": "shoe-size"}', "Unknown format: shoe-size"),
        ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable schema: minimum .5"),
        ("false", "Unsatisfiable"),
        ('{"$ref": "#"}', "no output can satisfy it"),
        ('{"$ref": "http://example.com/x"}', "http://example.com/x"),
        ('{"enum": ["\\ud800"]}', "half of a surrogate pair"),
        ('{"enum": ["' + "a" * MAX_BYTES + '"]}', f"more than {MAX_BYTES}; shorten it"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_cause(
    schema: str, cause: str
) -> None:
    with pytest.raises(ValueError, match=f"^the JSON schema .*({cause})") as refused:
        json_grammar(schema)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        ("a(", "unclosed group"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\ba", "lookarounds not supported"),
        (r"[^\s\S]", "no output can satisfy it"),
        ("\ud800", "half of a surrogate pair"),
        ("a" * (MAX_BYTES + 1), "shorten it"),
    ],
)
def test_a_regular_expression_that_cannot_be_followed_is_refused(pattern: str, cause: str) -> None:
    with pytest.raises(ValueError, match=f"^the regular expression .*{cause}"):
        regex_grammar(pattern)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ([], "has no options"),
        (["a", "\ud800"], "half of a surrogate pair"),
        (["a" * 100] * 400, "shorten it"),
    ],
)
def test_a_choice_that_cannot_be_followed_is_refused(options: list[str], cause: str) -> None:
    with pytest.raises(ValueError, match=f"choice .*{cause}"):
        choice_grammar(options)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("###", "no start rule"),
        ("start: nowhere", "unknown name"),
        ('start: start "a"', "no output can satisfy it"),
        ('start: "a" NOTHING\nNOTHING: /[^\\s\\S]/', "begins with 'a' cannot be completed"),
        ('start: "a" <|end|>', "names the token <.end.>"),
        ("start: <[1-5]>", "names the token"),
        ("start: a\na[stop=/b/]: /a*/", "option stop,"),
        ("start: a\na[lazy, max_tokens=3]: /a*/", "option max_tokens,"),
        ("start: a\na[temperature=0.5]: /a*/", "option temperature,"),
        ('start: "' + "a" * MAX_BYTES + '"', "shorten it"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(text: str, cause: str) -> None:
    with pytest.raises(ValueError, match=f"^the grammar .*{cause}"):
        lark_grammar(text)


INTERSECTION = "start: A\nA: " + " & ".join(f"/.*a.{{{n % 9}}}{n}.*/" for n in range(30))
AMBIGUOUS = "start: s\ns: " + " | ".join(["s s s s"] * 300) + ' | "a" | ""'
LOOPS = (
    "start: T0\n"
    + "".join(f"T{n}:" + "(" * 24 + f"T{n + 1}" + '"x"){0,9}' * 24 + "\n" for n in range(100))
    + 'T100: "a"'
)


@pytest.mark.parametrize("text", [INTERSECTION, AMBIGUOUS, LOOPS])
def test_a_grammar_made_to_take_for_ever_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"simplify it|correct it"):
        lark_grammar(text)


def test_a_trial_ends_by_itself_when_its_time_is_up() -> None:
    trial = [sys.executable, "-P", protos.grammar.__file__]
    done = subprocess.run(trial, input=INTERSECTION.encode(), capture_output=True, timeout=60)
    assert -done.returncode in (signal.SIGXCPU, signal.SIGKILL)


def test_a_long_chain_of_rules_does_no_harm() -> None:
    rules = [f"r{n}: r{n + 1}" for n in range(2300)]
    grammar = "\n".join(["start: r0", *rules, 'r2300: "a"'])
    assert accepts(lark_grammar(grammar), "a")


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "too much time or memory"),
        ("raise MemoryError('all of it')", "MemoryError: all of it"),
        ("import time; time.sleep(600)", "too much time or memory"),
    ],
)
def test_a_trial_that_does_not_end_well_is_a_refusal(
    program: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(program)
    monkeypatch.setattr(protos.grammar, "__file__", str(broken))
    monkeypatch.setattr(services.grammar, "TRIAL_S", 3.0)
    with pytest.raises(ValueError, match=cause):
        regex_grammar(f"never tried before: {cause}")


def test_a_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = regex_grammar("tried only once")
    monkeypatch.setattr(services.grammar.subprocess, "run", pytest.fail)
    assert regex_grammar("tried only once") == first


def test_clients_need_no_grammar_library() -> None:
    code = "import sys, services.client; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
