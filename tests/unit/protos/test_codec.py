"""The codec: what goes in comes out, the bytes of a release stay, and bad bytes are named."""

import dataclasses
import math
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.codec import MAX_FRAME_BYTES, TAGS, DecodeError, decode, encode
from protos.messages import (
    Advance,
    Audit,
    AuditReply,
    Close,
    Counter,
    Extend,
    Grow,
    Guess,
    Held,
    Hello,
    Join,
    Joined,
    Message,
    Need,
    Open,
    PromptScores,
    Report,
    Step,
    StepClose,
    StepOpen,
    Stepped,
    TreeNode,
    Verdict,
)
from protos.sampling import Bias, Processors, Sampling, Score, Scoring

PLAIN: dict[object, st.SearchStrategy[object]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
}


def values(hint: object) -> st.SearchStrategy[typing.Any]:
    """Values of a field's type, whatever messages.py declares."""
    if hint in PLAIN:
        return PLAIN[hint]
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=4).map(tuple)
    assert isinstance(hint, type)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{name: values(kind) for name, kind in hints.items()})


MESSAGES = st.one_of([values(cls) for cls in TAGS.values()])

SAMPLING = Sampling(
    0.5,
    9,
    "sampled",
    Processors(1.5, 0.5, 0.25, (Bias(3, -1.0),), (1, 3), (2,), 4, 5, "g", 6, 0.75, 0.125),
    7,
)

GOLDEN: dict[str, tuple[Message, str]] = {
    "hello": (
        Hello(1, "target", 7, "m", "v", 49152, 8192, 16, 512, 64, "features", 4000),
        "9d0101a674617267657407a16da176cdc000cd200010cd020040a86665617475726573cd0fa0",
    ),
    "open": (
        Open(3, 1, (5, 6), SAMPLING, 32),
        "9602030192050695cb3fe000000000000009a773616d706c65649ccb3ff8000000000000cb3fe0000000"
        "000000cb3fd000000000000092910391cbbff000000000000092010391020405a16706cb3fe800000000"
        "0000cb3fc00000000000000720",
    ),
    "advance": (Advance(3, 1, 2, (7,), 32), "9603030102910720"),
    "close": (Close(3, 1), "93040301"),
    "grow": (
        Grow(3, 1, 2, (Guess(1, 0, 8, -0.25), Guess(2, 1, 9, -1.0)), (b"\x01",)),
        "96050301029492010292000192080992cbbfd0000000000000cbbff000000000000091c40101",
    ),
    "need": (Need(3, 1, 2), "9406030102"),
    "report": (Report(40, 0.5, 12), "940728cb3fe00000000000000c"),
    "step": (
        Step(
            4,
            123,
            (StepOpen(3, (5, 6), Sampling(), "s", False, 2, Scoring(1, 2, True)),),
            (Extend(3, 1, (6,), (TreeNode(-1, 8),), (0, 1), (b"\x02",)),),
            (StepClose(2, (0,)),),
            2,
        ),
        "9708047b91970392050695cb000000000000000000a56d617463689ccb3ff0000000000000cb00000000"
        "00000000cb000000000000000092909090900000a000cb3ff0000000000000cb000000000000000000a1"
        "73c202930102c39196030191069291ff910892000191c40102919202910002",
    ),
    "stepped": (
        Stepped(
            4,
            (Verdict(3, 2, (0,), 8, (Score(-0.5, (8,), (-0.5,)),), "e"),),
            (1,),
            99,
            0.25,
            0.125,
            (PromptScores(3, 1, (Score(-1.0),)),),
        ),
        "980904919603029100089193cbbfe0000000000000910891cbbfe0000000000000a165910163cb3fd000"
        "0000000000cb3fc0000000000000919303019193cbbff00000000000009090",
    ),
    "audit": (Audit(5), "920a05"),
    "audit reply": (
        AuditReply(5, 8, 4, 2, (Held(3, 20, 2),), (Counter("late", 1),), 1, 77),
        "990b05080402939103911491029291a46c6174659101014d",
    ),
    "join": (Join(2, 1, ("a:1", "b:2"), "k"), "950c020192a3613a31a3623a32a16b"),
    "joined": (Joined(2), "920d02"),
}


@given(MESSAGES)
@settings(deadline=None)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_a_message_do_not_change_by_accident(name: str) -> None:
    message, expected = GOLDEN[name]
    assert encode(message).hex() == expected
    assert decode(bytes.fromhex(expected)) == message


def test_every_message_has_golden_bytes() -> None:
    assert {type(message) for message, _ in GOLDEN.values()} == set(TAGS.values())


def test_every_message_of_the_unions_has_a_tag() -> None:
    assert set(typing.get_args(Message)) == set(TAGS.values())


def refused_or_a_message(frame: bytes) -> None:
    """Nothing but DecodeError comes of bytes that are no message."""
    try:
        message = decode(frame)
    except DecodeError:
        return
    assert decode(encode(message)) == message


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_decode_error(frame: bytes) -> None:
    refused_or_a_message(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x92\x0a\x05\x05",
        b"\x91" * 5000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x0a\xa1\xff",
        b"\x92\x0a\xc3",
        b"\x92\x0a\x81\x01\x02",
        b"\x92\x0a\xc7\x01\x01\x01",
    ],
    ids=[
        "empty",
        "trailing",
        "deep",
        "huge length",
        "not UTF-8",
        "bool as int",
        "map",
        "extension",
    ],
)
def test_a_known_kind_of_bad_bytes_is_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(frame)


JUNK = st.recursive(
    st.none() | st.integers(-9, 12) | st.floats() | st.text(max_size=2) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=1), inner),
    max_leaves=20,
)


@given(st.sampled_from(sorted(TAGS)), st.lists(JUNK, max_size=8))
@settings(deadline=None)
def test_wrong_fields_are_refused_or_mean_a_message(tag: int, fields: list[object]) -> None:
    refused_or_a_message(msgpack.packb([tag, *fields]))


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_a_cut_frame_is_refused(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(DecodeError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_a_damaged_frame_never_raises_anything_else(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    refused_or_a_message(bytes(frame))


@given(st.sampled_from(sorted(TAGS)), st.integers(1, 3))
def test_fields_of_a_later_release_are_ignored(tag: int, extra: int) -> None:
    message = next(m for m, _ in GOLDEN.values() if type(m) is TAGS[tag])
    longer = [*msgpack.unpackb(encode(message)), *([9] * extra)]
    assert decode(msgpack.packb(longer)) == message


def test_a_missing_last_field_takes_its_default() -> None:
    short = msgpack.unpackb(encode(Step(1, 2, cores=3)))[:-1]
    assert decode(msgpack.packb(short)) == Step(1, 2)


def test_an_open_of_an_earlier_release_has_no_parent() -> None:
    step = msgpack.unpackb(encode(Step(1, 2, (StepOpen(3, (5,), Sampling()),))))
    del step[3][0][-1]
    decoded = decode(msgpack.packb(step))
    assert isinstance(decoded, Step)
    assert decoded.opens[0].parent == -1


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(DecodeError, match="unknown tag"):
        decode(msgpack.packb([99, 1]))


def test_a_frame_beyond_the_bound_is_refused_at_both_ends() -> None:
    large = Open(1, 1, (70000,) * (MAX_FRAME_BYTES // 5 + 1), Sampling(), 1)
    with pytest.raises(ValueError, match="exceeds a frame"):
        encode(large)
    with pytest.raises(DecodeError, match="exceeds"):
        decode(b"\x00" * (MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_refused(score: float) -> None:
    frame = encode(Grow(1, 1, 1, (Guess(1, 0, 2, score),)))
    with pytest.raises(DecodeError, match="finite"):
        decode(frame)


def test_messages_are_frozen_values_of_plain_types() -> None:
    for cls in TAGS.values():
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]
