"""Text as it comes: whole characters, stop strings, and no dependence on how tokens are grouped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.request import Request
from services.text import TextStream, make_stopper, open_text
from services.tokenizer import Tokenizer
from tests.unit.services.tiny_folder import VOCAB_SIZE, id_of

TEXTS = [
    "안녕하세요 세계",
    "👩‍👩‍👧 and 👍🏽!",
    "Příliš žluťoučký kůň",
    "e\u0301 n\u0303 combining",
    "the cat sat on the mat",
]

parts = st.one_of(
    st.integers(0, VOCAB_SIZE - 1),
    st.sampled_from([*"aabbENDc# ", "안", "END", "EN", "##", "a b", " c", "D#"]),
)
outputs = st.lists(parts, max_size=30)
stop_texts = st.one_of(
    st.text(alphabet="ab", min_size=1, max_size=5),  # overlaps itself
    st.text(alphabet="abcEND# 안", min_size=1, max_size=6),
)
some_stops = st.lists(stop_texts, min_size=1, max_size=4)


def tokens_of(tokenizer: Tokenizer, output: list[int | str]) -> list[int]:
    """Ids as they are, and texts as the ids they are encoded to, each on its own."""
    ids: list[int] = []
    for part in output:
        ids += [part] if isinstance(part, int) else tokenizer.encode(part)
    return ids


def released(stream: TextStream, tokens: list[int]) -> list[str]:
    """The text after each token up to the stop, and the rest."""
    pieces = []
    for token in tokens:
        stream.push(token)
        pieces.append(stream.release())
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def cut_at_first_stop(text: str, stops: list[str], *, keep_stop: bool) -> str | None:
    """The text up to the stop string that is completed first, the plain way; None without one."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[:end] if keep_stop else text[: end - max(map(len, done))]
    return None


@pytest.mark.parametrize("text", TEXTS)
def test_no_character_is_broken_at_any_token(tokenizer: Tokenizer, text: str) -> None:
    tokens = list(tokenizer.encode(text))
    pieces = released(TextStream(tokenizer.pieces), tokens)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_every_block_boundary_gives_the_same_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    for boundary in range(len(tokens) + 1):
        stream = TextStream(tokenizer.pieces)
        pieces = []
        for block in (tokens[:boundary], tokens[boundary:]):
            for token in block:
                stream.push(token)
            pieces.append(stream.release())
        assert "".join(pieces) + stream.finish() == text


@given(output=outputs)
def test_joined_pieces_are_the_librarys_decode_of_all_ids(
    tokenizer: Tokenizer, output: list[int | str]
) -> None:
    ids = tokens_of(tokenizer, output)
    pieces = released(TextStream(tokenizer.pieces), ids)
    assert "".join(pieces) == tokenizer.library.decode(ids)
    for piece in pieces:
        piece.encode("utf-8")


@given(output=outputs, stops=some_stops, keep_stop=st.booleans())
def test_the_text_ends_at_the_stop_string_completed_first(
    tokenizer: Tokenizer, output: list[int | str], stops: list[str], keep_stop: bool
) -> None:
    ids = tokens_of(tokenizer, output)
    stream = TextStream(tokenizer.pieces, stops, keep_stop=keep_stop)
    text = "".join(released(stream, ids))
    everything = tokenizer.library.decode(ids)
    expected = cut_at_first_stop(everything, stops, keep_stop=keep_stop)
    assert stream.stopped == (expected is not None)
    assert text == (everything if expected is None else expected)


@given(output=outputs, stops=some_stops)
def test_the_stopper_and_the_text_agree_on_the_token(
    tokenizer: Tokenizer, output: list[int | str], stops: list[str]
) -> None:
    request = Request("r", (1,), 99, stop_strings=tuple(stops))
    stopper, text = make_stopper(tokenizer, request), open_text(tokenizer, request)
    for token in tokens_of(tokenizer, output):
        text.push(token)
        assert stopper.push(token) == text.stopped
        if text.stopped:
            return


@given(output=outputs, stops=st.lists(stop_texts, max_size=3), block=st.integers(1, 9))
def test_what_is_released_does_not_depend_on_the_blocks(
    tokenizer: Tokenizer, output: list[int | str], stops: list[str], block: int
) -> None:
    one_by_one = TextStream(tokenizer.pieces, stops)
    in_blocks = TextStream(tokenizer.pieces, stops)
    text_one, text_blocks = "", ""
    for count, token in enumerate(tokens_of(tokenizer, output), start=1):
        one_by_one.push(token)
        text_one += one_by_one.release()
        in_blocks.push(token)
        if count % block == 0:
            text_blocks += in_blocks.release()
            assert text_blocks == text_one
        if one_by_one.stopped:
            break
    assert text_blocks + in_blocks.finish() == text_one + one_by_one.finish()


@given(output=outputs, stops=some_stops)
def test_no_part_of_a_stop_string_gets_out_and_little_is_held(
    tokenizer: Tokenizer, output: list[int | str], stops: list[str]
) -> None:
    ids = tokens_of(tokenizer, output)
    stream = TextStream(tokenizer.pieces, stops)
    sent = ""
    for count, token in enumerate(ids, start=1):
        stream.push(token)
        sent += stream.release()
        assert not any(stop in sent for stop in stops)
        if stream.stopped:
            return
        everything = tokenizer.library.decode(ids[:count])
        assert len(everything) - len(sent) <= max(map(len, stops)) - 1 + 1


def test_a_resumed_stream_goes_on_where_the_text_left_off(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the cat sat E END of it")
    request = Request("r", (1,), 99, stop_strings=("END",))
    whole = released(open_text(tokenizer, request), list(tokens))
    for have in range(len(tokens)):
        resumed = Request("r", (1,), 99, stop_strings=("END",), resumed=tokens[:have])
        if any("END" in tokenizer.decode(tokens[:n]) for n in range(have + 1)):
            break
        rest = released(open_text(tokenizer, resumed), list(tokens[have:]))
        assert "".join(rest) == "".join(whole[have:])
        stopper = make_stopper(tokenizer, resumed)
        stops = [stopper.push(token) for token in tokens[have : len(whole) - 1]]
        assert stops == [False] * (len(stops) - 1) + [True]


@pytest.mark.parametrize("offset", range(6))
def test_a_stop_string_at_any_offset_of_a_block_is_seen_at_its_token(
    tokenizer: Tokenizer, offset: int
) -> None:
    before = [id_of(tokenizer.library, c) for c in "abcde"[:offset]]
    end = [id_of(tokenizer.library, c) for c in "END"]
    request = Request("r", (1,), 99, stop_strings=("END",))
    stopper = make_stopper(tokenizer, request)
    answers = [stopper.push(token) for token in [*before, *end]]
    assert answers == [False] * (offset + 2) + [True]


def test_a_stop_string_that_overlaps_itself_is_found(tokenizer: Tokenizer) -> None:
    tokens = [id_of(tokenizer.library, c) for c in "xaaabx"]
    stream = TextStream(tokenizer.pieces, ["aab"])
    assert "".join(released(stream, tokens)) == "xa"


def test_a_stop_early_in_a_long_block_is_seen_at_once(tokenizer: Tokenizer) -> None:
    sharp = id_of(tokenizer.library, "#")
    stopper = make_stopper(tokenizer, Request("r", (1,), 99, stop_strings=("##",)))
    assert [stopper.push(sharp), stopper.push(sharp)] == [False, True]


def test_the_longest_of_two_stops_completed_together_counts(sentencepiece: Tokenizer) -> None:
    tokens = [id_of(sentencepiece.library, t) for t in ("▁the", "▁a", "▁b", "▁c")]
    stream = TextStream(sentencepiece.pieces, ["c", "a b c"])
    assert "".join(released(stream, tokens)) == " the "
    assert stream.stopped


def test_a_stop_string_within_one_token_cuts_the_rest_of_it(sentencepiece: Tokenizer) -> None:
    tokens = [id_of(sentencepiece.library, t) for t in ("▁the", "END")]
    for keep_stop, expected in ((False, " the"), (True, " theEN")):
        stream = TextStream(sentencepiece.pieces, ["EN"], keep_stop=keep_stop)
        assert "".join(released(stream, tokens)) == expected


def test_a_stop_string_broken_off_is_sent_after_all(tokenizer: Tokenizer) -> None:
    e, n, x = (id_of(tokenizer.library, c) for c in "ENx")
    stream = TextStream(tokenizer.pieces, ["END"])
    assert released(stream, [e, n, x]) == ["", "", "ENx", ""]
    stream = TextStream(tokenizer.pieces, ["END"])
    assert released(stream, [e, n]) == ["", "", "EN"]


def test_bytes_that_never_complete_do_not_hold_the_stream(tokenizer: Tokenizer) -> None:
    lone = tokenizer.pieces.index(b"\x82")
    pieces = released(TextStream(tokenizer.pieces), [lone] * 20)
    assert pieces == ["\ufffd"] * 20 + [""]


def test_an_unfinished_character_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    first = tokenizer.pieces.index("€".encode()[:1])
    assert released(TextStream(tokenizer.pieces), [first]) == ["", "\ufffd"]


def test_special_tokens_have_no_text_and_break_no_character(tokenizer: Tokenizer) -> None:
    euro = [tokenizer.pieces.index(bytes([byte])) for byte in "€".encode()]
    end = tokenizer.eos_ids[0]
    assert "".join(released(TextStream(tokenizer.pieces), [euro[0], end, *euro[1:]])) == "€"


def test_stop_tokens_end_a_sequence_with_and_without_stop_strings(tokenizer: Tokenizer) -> None:
    for stops in ((), ("zzz",)):
        request = Request("r", (1,), 99, stop_token_ids=(7, 9), stop_strings=stops)
        stopper = make_stopper(tokenizer, request)
        assert [stopper.push(token) for token in (8, 10, 9)] == [False, False, True]


def test_spaces_at_the_start_of_an_output_are_kept(sentencepiece: Tokenizer) -> None:
    tokens = [id_of(sentencepiece.library, t) for t in ("▁the", "▁cat")]
    prompt = list(sentencepiece.encode("a b"))
    joined = "".join(released(TextStream(sentencepiece.pieces), tokens))
    assert sentencepiece.library.decode(prompt + tokens) == "a b" + joined


def test_byte_fallback_characters_are_put_together(sentencepiece: Tokenizer) -> None:
    tokens = list(sentencepiece.encode("a 안👍🏽é"))
    joined = "".join(released(TextStream(sentencepiece.pieces), tokens))
    assert joined == " a 안👍🏽é"


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_small_models_text_is_whole(small_model: Tokenizer, text: str) -> None:
    pieces = released(TextStream(small_model.pieces), list(small_model.encode(text)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
