"""Grammar masks along drafted paths, against a matcher of texts that knows no tokens."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import decoders, models

import protos.grammar
from services.grammar import json_grammar, regex_grammar
from services.tokenizer import Tokenizer, load_tokenizer
from target_workers.model import grammar as following
from target_workers.model.grammar import GrammarError, GrammarMatcher, Grammars
from target_workers.model.vocabulary import load_vocabulary
from tests.unit.services.tiny_folder import byte_level_folder, sentencepiece_folder

Texts = frozenset[bytes]  # every complete output of a finite language

LANGUAGES: dict[str, tuple[str, Texts]] = {
    "the (cat|dog)( sat){0,2}": (
        "start: /the (cat|dog)( sat){0,2}/",
        frozenset(
            f"the {animal}{' sat' * n}".encode() for animal in ("cat", "dog") for n in range(3)
        ),
    ),
    "texts of many bytes": (
        'start: "안녕" | "안녕하세요" | "é" | "👍🏽" | "\\u0000\\n\\t"',
        frozenset(text.encode() for text in ("안녕", "안녕하세요", "é", "👍🏽", "\0\n\t")),
    ),
    "only one": ('start: "the end"', frozenset([b"the end"])),
    "nothing or END": ('start: "END"?', frozenset([b"", b"END"])),
    "named like tokens": (
        'start: "<|end|>" | "<plain added>" | "<s>a" | "<0x41>"',
        frozenset([b"<|end|>", b"<plain added>", b"<s>a", b"<0x41>"]),
    ),
}


@pytest.fixture(scope="module", params=[byte_level_folder, sentencepiece_folder])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path_factory.mktemp(make.__name__))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(folder: Path, tokenizer: Tokenizer) -> Grammars:
    return Grammars(folder, tokenizer.vocab_size)


@cache
def spellings(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for id, piece in enumerate(tokenizer.pieces):
        found.setdefault(piece, []).append(id)
    return found


def expected(tokenizer: Tokenizer, texts: Texts, tokens: Sequence[int]) -> set[int]:
    """What may follow, by the tokens' bytes alone."""
    ends = set(tokenizer.eos_ids)
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    output = b"".join(tokenizer.pieces[token] for token in tokens[:at])
    if any(not tokenizer.pieces[token] for token in tokens[:at]):
        return set()
    if at < len(tokens):
        return ends if output in texts and ends.issuperset(tokens[at:]) else set()
    rests = [text[len(output) :] for text in texts if text.startswith(output)]
    begun = {rest[:size] for rest in rests for size in range(1, len(rest) + 1)}
    longer = {id for piece in begun for id in spellings(tokenizer).get(piece, ())} - ends
    return longer | (ends if output in texts else set())


def ids(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(mask).tolist())


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text by tokens of one byte."""
    return [tokenizer.pieces.index(bytes([byte])) for byte in text.encode()]


def random_path(
    tokenizer: Tokenizer, texts: Texts, tokens: list[int], chance: random.Random
) -> list[int]:
    """Guesses after some tokens: mostly what may follow, now and then anything."""
    path: list[int] = []
    for _ in range(chance.randrange(7)):
        allowed = sorted(expected(tokenizer, texts, tokens + path))
        wild = not allowed or chance.random() < 0.15
        path.append(chance.randrange(tokenizer.vocab_size) if wild else chance.choice(allowed))
    return path


@pytest.mark.parametrize("name", LANGUAGES)
def test_after_every_path_just_those_tokens_are_allowed_that_can_go_on(
    name: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar, texts = LANGUAGES[name]
    chance = random.Random(name)
    for _ in range(40):
        matcher = grammars.matcher(grammar, ())
        output: list[int] = []
        while expected(tokenizer, texts, output):
            for _ in range(3):
                path = random_path(tokenizer, texts, output, chance)
                want = expected(tokenizer, texts, output + path)
                assert ids(matcher.allowed(path)) == want, (output, path)
            new = random_path(tokenizer, texts, output, chance)
            while not expected(tokenizer, texts, output + new):
                new.pop()
            if not new:
                new = [chance.choice(sorted(expected(tokenizer, texts, output)))]
            matcher.commit(new)
            output += new
            if len(output) > 12:
                break
        fresh = grammars.matcher(grammar, output)
        assert ids(fresh.allowed(())) == ids(matcher.allowed(())), "opened later, it is elsewhere"


def test_an_output_that_can_go_on_or_end_may_do_both(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    allowed = ids(grammars.matcher("start: /a+/", spelled(tokenizer, "a")).allowed(()))
    assert set(tokenizer.eos_ids) < allowed
    assert {tokenizer.pieces[id] for id in allowed - set(tokenizer.eos_ids)} >= {b"a"}


def test_after_an_end_only_ends_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher("start: /a+/", spelled(tokenizer, "aa"))
    ends = set(tokenizer.eos_ids)
    end = min(ends)
    assert ids(matcher.allowed([end])) == ends
    assert ids(matcher.allowed([end, end])) == ends
    assert not ids(matcher.allowed([end, *spelled(tokenizer, "a")]))
    matcher.commit([end])
    assert ids(matcher.allowed(())) == ends
    assert not ids(matcher.allowed(spelled(tokenizer, "a")))


def test_an_end_before_the_output_is_complete_allows_nothing(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.matcher('start: "ab"', spelled(tokenizer, "a"))
    assert not ids(matcher.allowed([min(tokenizer.eos_ids)]))
    assert ids(matcher.allowed(())) == set(spellings(tokenizer)[b"b"])


@pytest.mark.parametrize("token", [-1, 10**6, 2**40])
def test_a_guess_that_is_no_token_allows_nothing_and_does_no_harm(
    token: int, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.matcher('start: "ab"', ())
    before = ids(matcher.allowed(()))
    assert not ids(matcher.allowed([token]))
    assert not ids(matcher.allowed([*spelled(tokenizer, "a"), token, *spelled(tokenizer, "b")]))
    assert ids(matcher.allowed(())) == before


def test_special_tokens_are_allowed_nowhere(folder: Path, tokenizer: Tokenizer) -> None:
    grammars = Grammars(folder, tokenizer.vocab_size)
    others = tokenizer.special_ids - set(tokenizer.eos_ids)
    for grammar in ("start: /(?s:.*)/", "start: /[^a]*/"):
        mask = grammars.matcher(grammar, ()).allowed(())
        assert not mask[sorted(others)].any()
        assert mask[sorted(tokenizer.eos_ids)].all()


def test_added_tokens_that_are_text_count_as_text(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    tokenizer = load_tokenizer(folder)
    added = tokenizer.tokens.index("<plain added>")
    matcher = Grammars(folder, tokenizer.vocab_size).matcher("start: /.*/", ())
    assert matcher.allowed(())[added]
    assert ids(matcher.allowed([added]))


@pytest.mark.parametrize("difference", [-250, -40, 1, 37])
def test_a_model_may_have_fewer_ids_than_its_tokenizer_or_more(
    difference: int, folder: Path, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    size = tokenizer.vocab_size + difference
    grammar = "start: /[^b]*/"
    whole = grammars.matcher(grammar, ()).allowed(())
    mask = Grammars(folder, size).matcher(grammar, ()).allowed(())
    assert mask.shape == (size,) and mask.dtype == np.bool_
    common = min(size, tokenizer.vocab_size)
    assert (mask[:common] == whole[:common]).all()
    assert not mask[common:].any()


def test_ids_that_are_not_used_are_passed_over(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 5, "ab": 9, "<e>": 7}, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<e>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    matcher = Grammars(tmp_path, 12).matcher('start: "ab" | "aba"', ())
    assert ids(matcher.allowed(())) == {0, 9}
    assert ids(matcher.allowed([0])) == {5}
    assert ids(matcher.allowed([9])) == {0, 7}
    assert not ids(matcher.allowed([3]))


def test_pieces_and_end_tokens_are_those_of_the_edge(folder: Path, tokenizer: Tokenizer) -> None:
    vocabulary = load_vocabulary(folder)
    assert vocabulary.pieces == tokenizer.pieces
    assert vocabulary.end_tokens == set(tokenizer.eos_ids)


def test_what_is_resumed_must_follow_the_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="output so far does not follow"):
        grammars.matcher('start: "ab"', spelled(tokenizer, "b"))
    with pytest.raises(GrammarError, match="output so far does not follow"):
        grammars.matcher('start: "ab"', [*spelled(tokenizer, "a"), min(tokenizer.eos_ids)])


def test_a_grammar_that_cannot_be_followed_is_named(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=r"unknown name.*correct it"):
        grammars.matcher("start: nowhere", ())
    with pytest.raises(GrammarError, match="longer than"):
        grammars.matcher(f'start: "{"a" * 40_000}"', ())


def test_a_folder_that_cannot_follow_a_grammar_says_so_when_asked(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(GrammarError, match="names no end token"):
        Grammars(folder, 385).matcher('start: "a"', ())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(GrammarError, match="can follow no grammar"):
        Grammars(folder, 385).matcher('start: "a"', ())


def test_a_dead_end_below_a_guess_is_left_again(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher('start: "ab" | "c" NOTHING\nNOTHING: /[^\\s\\S]/', ())
    assert not ids(matcher.allowed(spelled(tokenizer, "c")))
    assert ids(matcher.allowed(spelled(tokenizer, "a"))) == set(spellings(tokenizer)[b"b"])
    matcher.commit(spelled(tokenizer, "a"))
    assert ids(matcher.allowed(())) == set(spellings(tokenizer)[b"b"])
    matcher.commit(spelled(tokenizer, "b"))
    assert ids(matcher.allowed(())) == set(tokenizer.eos_ids)


def test_outputs_of_one_grammar_do_not_disturb_each_other(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar, texts = LANGUAGES["the (cat|dog)( sat){0,2}"]
    paths = [spelled(tokenizer, text) for text in ("the c", "the dog", "x", "the cat sat")]
    matchers = [grammars.matcher(grammar, path[:1] if path != paths[2] else ()) for path in paths]
    for depth in range(1, 12):
        for matcher, path in zip(matchers, paths, strict=True):
            rest = path[:depth] if path == paths[2] else path[1:depth]
            want = expected(tokenizer, texts, path[:depth])
            assert ids(matcher.allowed(rest)) == want


def test_more_grammars_than_are_remembered(grammars: Grammars, tokenizer: Tokenizer) -> None:
    words = [f"{n}a" for n in range(following.MAX_COMPILED * 2)]
    matchers = [grammars.matcher(f'start: "{word}"', ()) for word in words]
    for word, matcher in zip(words, matchers, strict=True):
        path = spelled(tokenizer, word)[:-1]
        assert tokenizer.pieces.index(b"a") in ids(matcher.allowed(path))
    assert len(grammars._compiled) <= following.MAX_COMPILED


def test_an_exhausted_library_is_begun_anew(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it may learn is used up by the guesses so far, not by those that are asked for."""
    grammar = "start: /([abc]*a[abc]{7}b[abc]{7})?c/"
    chance = random.Random(1)
    texts = ["".join(chance.choices("abc", k=chance.randrange(9))) for _ in range(60)]
    paths = [spelled(tokenizer, text) for text in texts]
    wide = Grammars(folder, tokenizer.vocab_size).matcher(grammar, paths[0][:1])
    want = [ids(wide.allowed(path)) for path in paths]

    monkeypatch.setattr(protos.grammar, "MAX_LEXER_STATES", 90)
    starts: list[bool] = []

    class Counting(Grammars):
        def start(self, grammar: str, *, anew: bool = False) -> LLMatcher:
            starts.append(anew)
            return super().start(grammar, anew=anew)

    narrow = Counting(folder, tokenizer.vocab_size).matcher(grammar, paths[0][:1])
    assert [ids(narrow.allowed(path)) for path in paths] == want
    assert any(starts), "there was room for everything"


def test_too_much_work_ends_in_masks_without_a_token(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "CALL_S", -0.4)  # as if every call took so much more
    matcher = grammars.matcher("start: /a*/", ())
    assert ids(matcher.allowed(()))
    assert ids(matcher.allowed(()))
    assert not ids(matcher.allowed(()))
    assert not ids(matcher.allowed(spelled(tokenizer, "a")))


AMBIGUOUS = "start: s\ns: " + " | ".join(["s s s s"] * 24) + ' | "a" | ""'


def test_an_ambiguous_grammar_is_given_up(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(AMBIGUOUS, ())
    for _ in range(40):
        if not ids(matcher.allowed(())):
            return
        matcher.commit(spelled(tokenizer, "a"))
    pytest.fail("it never ran into a limit")


def test_guesses_that_are_too_much_work_do_no_harm(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    a = spelled(tokenizer, "a")
    matcher = grammars.matcher(AMBIGUOUS, a)
    before = ids(matcher.allowed(()))
    assert not ids(matcher.allowed(a * 39))
    assert ids(matcher.allowed(())) == before == ids(matcher.allowed(a))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def write(matcher: GrammarMatcher, tokenizer: Tokenizer, chance: random.Random) -> str:
    """An output of tokens taken at random from those allowed, whitespace seldom."""
    output: list[int] = []
    for _ in range(400):
        path: list[int] = []
        for _ in range(chance.randrange(1, 5)):  # guesses, and how far they are right
            allowed = [id for id in ids(matcher.allowed(path)) if tokenizer.pieces[id].strip()]
            if ids(matcher.allowed(path)) & set(tokenizer.eos_ids):
                return tokenizer.decode(output + path)
            path.append(chance.choice(sorted(allowed)))
        kept = path[: chance.randrange(len(path) + 1)]
        matcher.commit(kept)
        output += kept
    pytest.fail("the output never ended")


def test_outputs_of_a_schema_are_what_it_asks_for(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = json_grammar(json.dumps(SCHEMA))
    for seed in range(20):
        written = json.loads(write(grammars.matcher(grammar, ()), tokenizer, random.Random(seed)))
        assert list(written) == ["name", "age", "tags"]
        assert isinstance(written["name"], str) and len(written["name"]) <= 12
        assert type(written["age"]) is int and 0 <= written["age"] <= 130
        assert len(written["tags"]) <= 3 and {*written["tags"]} <= {"a", "b"}


@pytest.mark.model
def test_a_real_vocabulary_agrees_with_its_pieces(small_model_folder: Path) -> None:
    tokenizer = load_tokenizer(small_model_folder)
    vocabulary = load_vocabulary(small_model_folder)
    assert vocabulary.pieces == tokenizer.pieces
    assert vocabulary.end_tokens == set(tokenizer.eos_ids)
    grammars = Grammars(small_model_folder, tokenizer.vocab_size)
    texts = frozenset(
        f"the {a} sat on the {b}.".encode() for a in ("cat", "café", "猫") for b in "xy"
    )
    grammar = regex_grammar("the (cat|café|猫) sat on the [xy]\\.")
    chance = random.Random(7)
    for _ in range(5):
        matcher, output = grammars.matcher(grammar, ()), []
        while not set(tokenizer.eos_ids) & ids(matcher.allowed(())):
            for path in ([], random_path(tokenizer, texts, output, chance)):
                want = expected(tokenizer, texts, output + path)
                assert ids(matcher.allowed(path)) == want
            new = chance.choice(sorted(expected(tokenizer, texts, output)))
            matcher.commit([new])
            output.append(new)
        assert tokenizer.decode(output).encode() in texts
