"""Linear maps over packed weights: outputs in panels, so that a sum runs over the inputs in order.

A row's result depends on that row alone, not on its company nor on the number of threads.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from target_workers.model.native.elementwise import sigmoid
from target_workers.model.native.jit import kernel, parallel
from target_workers.model.native.llvm import LANES, PANEL
from target_workers.model.native.tile import DOUBLE_ROWS, TILE_ROWS, dot_panels
from target_workers.model.native.vector import narrow

Array = NDArray[Any]
NO_FLOATS = np.empty(0, np.float32)


class Packed(NamedTuple):
    """Weights [panels, inputs * PANEL], and per output a scale and a bias (none: empty).

    A panel has `stride` weights for each input, or for each pair of inputs.
    """

    weights: Array
    scale: Array
    bias: Array
    stride: int


def pack(weight: Tensor, bias: Tensor | None, *, in_pairs: bool, as_int8: bool) -> Packed:
    """Pack W [out, in]: bfloat16 or float32 as it is, or int8 with a scale for each output.

    Outputs are filled up with zeros to whole panels, inputs to whole pairs.
    """
    outs = -(-len(weight) // PANEL) * PANEL
    scale = NO_FLOATS
    if as_int8:
        weight, scale = _quantised(weight)
        scale = np.concatenate((scale, np.ones(outs - len(scale), np.float32)))
    full = torch.zeros((outs, weight.shape[1] + weight.shape[1] % 2), dtype=weight.dtype)
    full[: len(weight), : weight.shape[1]] = weight
    size = 2 if in_pairs else 1
    panels = full.view(outs // PANEL, PANEL, -1, size).transpose(1, 2).contiguous()
    flat = as_array(panels).reshape(outs // PANEL, -1)
    added = NO_FLOATS
    if bias is not None:
        added = np.zeros(outs, np.float32)
        added[: len(bias)] = bias.float().numpy()
    return Packed(flat, scale, added, PANEL * size)


def pack_gated(weight: Tensor, bias: Tensor | None, *, in_pairs: bool, as_int8: bool) -> Packed:
    """Pack gates and ups, stacked in W [2 inner, in], side by side for `gated`."""
    rows = _side_by_side(weight)
    added = None if bias is None else _side_by_side(bias[:, None])[:, 0]
    return pack(rows, added, in_pairs=in_pairs, as_int8=as_int8)


def _side_by_side(stacked: Tensor) -> Tensor:
    """Rows of gates and of ups by half panels in turn, filled up with zeros."""
    half, inner = PANEL // 2, len(stacked) // 2
    full = stacked.new_zeros((2, -(-inner // half) * half, stacked.shape[1]))
    full[:, :inner] = stacked.view(2, inner, -1)
    return full.view(2, -1, half, stacked.shape[1]).transpose(0, 1).flatten(0, 2)


def as_array(tensor: Tensor) -> Array:
    """The same memory for NumPy, which knows no bfloat16: its bits as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def _quantised(weight: Tensor) -> tuple[Tensor, Array]:
    """Int8 weights [out, in] and the scale [out] of each output."""
    scale = weight.float().abs().amax(1) / 127
    scale[scale == 0] = 1
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale.numpy()


@kernel
def _sums(
    packed: Packed, x: Array, row: int, count: int, panel: int, panels: int, sums: Array
) -> None:
    """The scaled and shifted sums of one or two panels: [count, panels * PANEL]."""
    size, first, width = packed.weights.shape[1], panel * PANEL, panels * PANEL
    steps = x.shape[1] * PANEL // packed.stride
    dot_panels(
        packed.weights.reshape(-1), panel * size, size, packed.stride, x, row, count, steps,
        width // LANES, sums, 0, 0,
    )  # fmt: skip
    if len(packed.scale) > 0:
        for r in range(count):
            for o in range(width):
                sums[r, o] *= packed.scale[first + o]
    if len(packed.bias) > 0:
        for r in range(count):
            for o in range(width):
                sums[r, o] += packed.bias[first + o]


@kernel
def _panels_at_once(rows: int) -> int:
    return 2 if rows <= DOUBLE_ROWS else 1


@kernel
def _put(sums: Array, count: int, out: Array, row: int, first: int, width: int) -> None:
    """Write sums to their columns, as far as there are any."""
    for r in range(count):
        for o in range(min(width, out.shape[1] - first)):
            out[row + r, first + o] = sums[r, o]


@kernel
def _linear_part(packed: Packed, x: Array, out: Array, begin: int, end: int) -> None:
    """Panels [begin, end)."""
    sums, step = np.empty((TILE_ROWS, 2 * PANEL), np.float32), _panels_at_once(len(x))
    for panel in range(begin, end, step):
        panels = min(step, end - panel)
        for row in range(0, len(x), TILE_ROWS):
            count = min(TILE_ROWS, len(x) - row)
            _sums(packed, x, row, count, panel, panels, sums)
            _put(sums, count, out, row, panel * PANEL, panels * PANEL)


@parallel
def linear(packed: Packed, x: Array, out: Array, threads: int) -> None:
    """out [rows, outs] = x [rows, in] W^T, scaled and shifted; float32."""
    panels = len(packed.weights)
    for thread in prange(threads):
        begin, end = panels * thread // threads, panels * (thread + 1) // threads
        _linear_part(packed, x, out, begin, end)


@kernel
def _put_gated(sums: Array, at: int, count: int, out: Array, row: int, first: int) -> None:
    """Write silu(gate) * up of the panel at sums[:, at:]."""
    half = PANEL // 2
    for r in range(count):
        for o in range(min(half, out.shape[1] - first)):
            gate, up = sums[r, at + o], sums[r, at + half + o]
            out[row + r, first + o] = narrow(gate * sigmoid(gate) * up, out)


@kernel
def _gated_part(packed: Packed, x: Array, out: Array, begin: int, end: int) -> None:
    """Panels [begin, end)."""
    sums, step = np.empty((TILE_ROWS, 2 * PANEL), np.float32), _panels_at_once(len(x))
    for panel in range(begin, end, step):
        panels = min(step, end - panel)
        for row in range(0, len(x), TILE_ROWS):
            count = min(TILE_ROWS, len(x) - row)
            _sums(packed, x, row, count, panel, panels, sums)
            for part in range(panels):
                _put_gated(sums, part * PANEL, count, out, row, (panel + part) * PANEL // 2)


@parallel
def gated(packed: Packed, x: Array, out: Array, threads: int) -> None:
    """out [rows, inner] = silu(gate(x)) * up(x); a panel holds half gates and half their ups."""
    panels = len(packed.weights)
    for thread in prange(threads):
        begin, end = panels * thread // threads, panels * (thread + 1) // threads
        _gated_part(packed, x, out, begin, end)
