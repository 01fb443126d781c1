"""Which conversations a target is made to write: its own questions, or those of a corpus."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drafter_workers.training.conversation import Plan, Turn

Ids = tuple[int, ...]

OPENER_CHANCE = 0.75  # that a question has its first words given
SECOND_CHANCE = 0.2  # that a second question follows


@dataclass(frozen=True, slots=True)
class Frame:
    """The model's chat template in pieces: what stands before a question, between it and the
    answer, and between the answer and the next question."""

    before: Ids
    answer: Ids
    again: Ids


@dataclass(frozen=True, slots=True)
class Style:
    """How much is written, and the temperatures that answers take in turn by chance."""

    question_tokens: int = 256
    answer_tokens: int = 256
    question_temperature: float = 0.9
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.4, 0.8, 1.0)

    def __post_init__(self) -> None:
        temperatures = (self.question_temperature, *self.answer_temperatures)
        if min(self.question_tokens, self.answer_tokens) < 1 or min(temperatures) < 0:
            raise ValueError(
                "questions and answers need a token at least, and temperatures of 0 or more"
            )


def self_written(
    frame: Frame, openers: Sequence[Sequence[Ids]], style: Style, seed: int
) -> Iterator[Plan]:
    """Conversations whose questions the target writes too, without end.

    `openers` by kind: kinds are equally likely. A plan depends on the seed and its number alone.
    """
    number = 0
    while True:
        chance = np.random.default_rng([seed, number])
        turns = list(_exchange(frame.before, frame, openers, style, chance))
        if chance.random() < SECOND_CHANCE:
            turns += _exchange(frame.again, frame, openers, style, chance)
        yield Plan(number, int(chance.integers(1 << 62)), tuple(turns))
        number += 1


def answered(
    prompts: Sequence[Sequence[Ids]], frame: Frame, style: Style, seed: int
) -> Iterator[Plan]:
    """Answers to given questions, turn by turn; a plan's number is its prompt's place."""
    for number, questions in enumerate(prompts):
        chance = np.random.default_rng([seed, number])
        temperature = float(chance.choice(style.answer_temperatures))
        befores = (frame.before, *[frame.again] * (len(questions) - 1))
        turns = tuple(
            Turn(
                (*before, *question, *frame.answer),
                style.answer_tokens,
                temperature,
                is_answer=True,
            )
            for before, question in zip(befores, questions, strict=True)
        )
        yield Plan(number, int(chance.integers(1 << 62)), turns)


def _exchange(
    before: Ids,
    frame: Frame,
    openers: Sequence[Sequence[Ids]],
    style: Style,
    chance: np.random.Generator,
) -> tuple[Turn, Turn]:
    """A question and its answer."""
    opener: Ids = ()
    if openers and chance.random() < OPENER_CHANCE:
        kind = openers[int(chance.integers(len(openers)))]
        opener = kind[int(chance.integers(len(kind)))]
    temperature = float(chance.choice(style.answer_temperatures))
    return (
        Turn(
            (*before, *opener), style.question_tokens, style.question_temperature, is_answer=False
        ),
        Turn(frame.answer, style.answer_tokens, temperature, is_answer=True),
    )
