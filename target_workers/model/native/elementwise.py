"""Norms, activations and rotation, row by row in float32."""

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from target_workers.model.native.jit import inlined, kernel, parallel, reordered
from target_workers.model.native.vector import narrow, power_of_two, whole

Array = NDArray[Any]

LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that multiples of it are exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_LEAST, EXP_MOST = np.float32(-87.0), np.float32(88.0)
PARALLEL_ROWS = 16  # fewer are done sooner by one thread
ONE, HALF = np.float32(1), np.float32(0.5)
C6, C5, C4, C3, C2 = (
    np.float32(c) for c in (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665795e-2, 1.6666665e-1)
)


@inlined
def exp(value: Any) -> Any:
    """e to a float32 within [-87, 88], to about one unit in the last place (Cephes' polynomial).

    Beyond it is what it is at the edge; a NaN stays one.
    """
    bounded = min(max(value, EXP_LEAST), EXP_MOST)
    power = whole(bounded * LOG2_E)
    rest = bounded - power * LN2_HIGH - power * LN2_LOW
    poly = ((((C6 * rest + C5) * rest + C4) * rest + C3) * rest + C2) * rest + HALF
    result = (poly * rest * rest + rest + ONE) * power_of_two(power)
    return result if value == value else value


@inlined
def sigmoid(value: Any) -> Any:
    """1 / (1 + e^-value)."""
    return ONE / (ONE + exp(-value))


@kernel
def _add_and_norm(
    x: Array, delta: Array, weight: Array, eps: float, out: Array, begin: int, end: int
) -> None:
    for row in range(begin, end):
        for i in range(x.shape[1]):
            x[row, i] += delta[row, i]
        _norm_row(x, row, weight, eps, out)


@reordered
def _norm_row(x: Array, row: int, weight: Array, eps: float, out: Array) -> None:
    total = np.float32(0)
    for i in range(x.shape[1]):
        total += x[row, i] * x[row, i]
    scale = ONE / np.sqrt(total / np.float32(x.shape[1]) + np.float32(eps))
    for i in range(x.shape[1]):
        out[row, i] = narrow(x[row, i] * scale * weight[i], out)


@parallel
def add_and_norm(
    x: Array, delta: Array, weight: Array, eps: float, out: Array, threads: int
) -> None:
    """x += delta, then out = x / rms(x) * weight; all [rows, hidden]."""
    rows = len(x)
    if rows < PARALLEL_ROWS:
        _add_and_norm(x, delta, weight, eps, out, 0, rows)
    else:
        for thread in prange(threads):
            begin, end = rows * thread // threads, rows * (thread + 1) // threads
            _add_and_norm(x, delta, weight, eps, out, begin, end)
