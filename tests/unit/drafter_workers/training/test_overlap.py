"""Benchmark prompts are kept out of training, whatever stands around them."""

import pytest

from drafter_workers.training.overlap import RUN, KeptOut

PROMPT = "Explain to a child of seven why the sea is salty, and why lakes mostly are not."
KEPT_OUT = KeptOut([PROMPT, "Name five rivers.", "Caf\u00e9 au lait fu\u00df"])


@pytest.mark.parametrize(
    "text",
    [
        PROMPT,
        f"Someone asked: {PROMPT} And then?",
        "EXPLAIN, to a child\nof seven, why the sea is salty",
        "Please name five rivers, he said.",
        "Name\nfive -- RIVERS",
        "Caf\u00e9 au lait fu\u00df",
        "CAFE\u0301 AU LAIT FUSS",
    ],
)
def test_what_shares_words_with_a_prompt_is_found(text: str) -> None:
    assert KEPT_OUT.overlap(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Explain to a child of seven why the sky is blue.",
        "Name five lakes and rivers.",
        "rivers five name",
        "unname five rivers",
    ],
)
def test_what_shares_less_is_let_through(text: str) -> None:
    assert not KEPT_OUT.overlap(text)


def test_a_run_of_words_is_needed_and_enough() -> None:
    words = PROMPT.split()
    for begin in range(len(words) - RUN + 1):
        assert KEPT_OUT.overlap("so " + " ".join(words[begin : begin + RUN]))
        assert not KEPT_OUT.overlap("so " + " ".join(words[begin : begin + RUN - 1]))


def test_the_words_shared_are_named() -> None:
    shared = KEPT_OUT.overlap("x " + PROMPT)
    assert len(shared.split()) == RUN and shared.startswith("explain to a child")


def test_nothing_kept_out_finds_nothing() -> None:
    assert not KeptOut([]).overlap(PROMPT)
    assert not KeptOut(["", "..."]).overlap("...")
