"""Single values that Numba has no words for: bfloat16, and the bits of a float32."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from target_workers.model.native.llvm import BYTE, FLOAT, INT, LONG, SHORT, Codegen, declare


@intrinsic
def widen(_context: Any, value: Any) -> Codegen:
    """A stored value as float32: uint16 are the bits of a bfloat16, int8 and float32 themselves."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        if value == types.uint16:
            bits = builder.shl(builder.zext(args[0], INT), ir.Constant(INT, 16))
            return builder.bitcast(bits, FLOAT)
        return builder.sitofp(args[0], FLOAT) if value == types.int8 else args[0]

    return types.float32(value), emit


@intrinsic
def narrow(_context: Any, value: Any, like: Any) -> Codegen:
    """A float32 as an array of `like`'s type stores it: bfloat16 bits for uint16, int8, itself."""
    element = like.dtype

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        if element == types.uint16:
            return _rounded(builder, args[0])
        return builder.fptosi(args[0], BYTE) if element == types.int8 else args[0]

    return element(value, like), emit


def _rounded(builder: Any, value: Any) -> Any:
    """The bits of the nearest bfloat16, halves to even; in whole numbers, as not every CPU has an
    instruction for it and there is no library to fall back on."""
    b = builder
    bits = b.bitcast(value, INT)
    odd = b.and_(b.lshr(bits, ir.Constant(INT, 16)), ir.Constant(INT, 1))
    up = b.add(bits, b.add(odd, ir.Constant(INT, 0x7FFF)))
    nearest = b.trunc(b.lshr(up, ir.Constant(INT, 16)), SHORT)
    return b.select(b.fcmp_unordered("uno", value, value), ir.Constant(SHORT, 0x7FC0), nearest)


@intrinsic
def ranked(_context: Any, value: Any) -> Codegen:
    """A float32 as an int32 of the same order, and an int32 as its float32; a NaN is an extreme."""
    is_float = value == types.float32

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], INT) if is_float else args[0]
        signs = builder.ashr(bits, ir.Constant(INT, 31))
        flipped = builder.xor(bits, builder.and_(signs, ir.Constant(INT, 0x7FFFFFFF)))
        return flipped if is_float else builder.bitcast(flipped, FLOAT)

    return (types.int32 if is_float else types.float32)(value), emit


@intrinsic
def power_of_two(_context: Any, exponent: Any) -> Codegen:
    """2 to a float32 whole number from -126 to 127."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], INT), ir.Constant(INT, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(INT, 23)), FLOAT)

    return types.float32(exponent), emit


@intrinsic
def whole(_context: Any, value: Any) -> Codegen:
    """The nearest whole number of a float32, as float32."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.call(declare(builder, "llvm.rint.f32", FLOAT, [FLOAT]), args)

    return types.float32(value), emit


@intrinsic
def values_a_step(_context: Any, x: Any) -> Codegen:
    """How many inputs `dot_panels` takes at once from such an x: two of bfloat16."""

    def emit(_ctx: Any, _builder: Any, _sig: Any, _args: Any) -> Any:
        return ir.Constant(LONG, 2 if x.dtype == types.uint16 else 1)

    return types.int64(x), emit
