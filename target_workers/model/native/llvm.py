"""LLVM's words that kernels are made of: types, and code for small things.

It compiles for whatever CPU it runs on; what only some have is asked for by name.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types

LANES = 16  # float32 values of one vector
PANEL = 2 * LANES  # outputs that one pass over the inputs computes

BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
Codegen = tuple[Any, Callable[..., Any]]


class _BFloat(ir.Type):
    """llvmlite has no name for LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BFLOAT = _BFloat()
PAIRS = ir.VectorType(BFLOAT, PANEL)


def has_pair_dot() -> bool:
    """True if the CPU that Numba compiles for multiplies pairs of bfloat16 and adds in float32."""
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    if name is None and features is None:
        return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))
    return "+avx512bf16" in (features or "")


def widened(builder: Any, stored: Any, at: Any, size: int) -> Any:
    """`size` stored values from a pointer on, as one vector of float32."""
    kind = {types.uint16: SHORT, types.int8: BYTE}.get(stored, FLOAT)
    pointer = builder.bitcast(at, ir.VectorType(kind, size).as_pointer())
    raw = builder.load(pointer, align=1)
    floats = ir.VectorType(FLOAT, size)
    if stored == types.int8:
        return builder.sitofp(raw, floats)
    if stored == types.float32:
        return raw
    wide = ir.VectorType(INT, size)
    sixteen = ir.Constant(wide, [16] * size)
    return builder.bitcast(builder.shl(builder.zext(raw, wide), sixteen), floats)


def lanes(indices: list[int]) -> Any:
    """Which elements of two vectors, one after the other, make a new one."""
    return ir.Constant(ir.VectorType(INT, len(indices)), indices)


def declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A function of LLVM's own."""
    module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)
