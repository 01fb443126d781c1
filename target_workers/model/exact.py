"""How many rows a linear call needs so that a row's bits do not depend on the other rows.

The kernels are probed rather than trusted: on one machine a packed linear gives a row the same bits
in any company of two or more, on another only in calls of exactly eight.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from target_workers.model.layers import Linear

REFERENCE_ROWS = 8
PROBE_ROWS = 24
PROBE_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64)
PROBE_OUTPUTS = 4096  # more outputs are more of the same; the self-test sees the real ones
HEAD_OUTPUTS = 16384  # a wider linear is a vocabulary, whose outputs for 512 rows would be large


class ExactModeError(Exception):
    """Equal bits cannot be had here: the message names what differed and what to do."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """Calls get at least `least` rows and at most `most`."""

    least: int
    most: int


# A call of 4 rows takes no longer than one of 1, and less than one of 2 (both measured).
RULES = tuple(RowRule(*rule) for rule in ((1, 512), (4, 512), (1, 64), (4, 64), (8, 64), (8, 8)))


@torch.inference_mode()
def fit_rows(linears: Iterable[Linear]) -> None:
    """Give every linear the least and most rows of a call.

    Raises ExactModeError when even calls of eight rows disagree.
    """
    rules: dict[tuple[int, int], RowRule] = {}
    for linear in linears:
        kind = (linear.out_features, linear.in_features)
        if kind not in rules:
            rules[kind] = _find_rule(linear)
        linear.least_rows, linear.most_rows = rules[kind].least, rules[kind].most


def _find_rule(linear: Linear) -> RowRule:
    probe, rows = _cancelling(linear)
    expected = _in_calls(probe, rows, REFERENCE_ROWS)
    most = 64 if linear.out_features >= HEAD_OUTPUTS else 512
    for rule in RULES:
        sizes = [size for size in (*PROBE_SIZES, most) if rule.least <= size <= rule.most]
        if rule.most <= most and all(
            torch.equal(_in_calls(probe, rows, size), expected) for size in sizes
        ):
            return rule
    raise ExactModeError(
        f"a linear of {linear.out_features} x {linear.in_features} in {linear.dtype} gives a row "
        "other bits in other company even in calls of eight; set target.exact = false"
    )


def _cancelling(linear: Linear) -> tuple[Linear, Tensor]:
    """A linear of the same shape and layout, and rows for which its sums cancel to nothing.

    What comes out is the rounding of partial sums alone, so that another order of sums shows in
    every output, in bf16 too.
    """
    generator = torch.Generator().manual_seed(linear.in_features)
    half = linear.in_features // 2
    order = torch.randperm(half, generator=generator)

    def pair(count: int, sign: int) -> Tensor:
        left = torch.randn(count, half, generator=generator).to(linear.dtype)
        rest = torch.zeros(count, linear.in_features - 2 * half, dtype=linear.dtype)
        return torch.cat((left, sign * left[:, order], rest), dim=1)

    probe = type(linear)(pair(min(linear.out_features, PROBE_OUTPUTS), -1))
    if linear.packed is not None:
        probe.pack()
    return probe, pair(PROBE_ROWS, 1)


def _in_calls(linear: Linear, rows: Tensor, size: int) -> Tensor:
    """The outputs of all rows from calls of exactly `size` rows; copies fill up the last."""
    filled = torch.cat((rows, rows[:1].expand(-len(rows) % size, -1)))
    return torch.cat([linear(part) for part in torch.split(filled, size)])[: len(rows)]
