"""Tiles in registers: sums over inputs for a few rows and a few vectors of outputs, and turning.

A CPU with AVX512-BF16 multiplies pairs of bfloat16 and adds them up in one instruction; for others
the same loop widens the weights.
"""

from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from target_workers.model.native.llvm import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LONG,
    PAIRS,
    PANEL,
    SHORT,
    Codegen,
    declare,
    lanes,
    widened,
)

TILE_ROWS = 8  # eight rows times two vectors of sums stay in registers
DOUBLE_ROWS = 4  # so few rows take two panels at once: one alone would wait for its own sums


@intrinsic
def turn(
    _context: Any, source: Any, offsets: Any, at: Any, column: Any, out: Any, to: Any, stride: Any
) -> Codegen:
    """out[to + c * stride + i] = source[offsets[at + i] + column + c] for i, c in 0..15.

    `source` and `out` are flat. A float32 `out` gets the values widened; one of bfloat16 gets pairs
    of them, and i, c and `stride` count pairs.
    """
    in_pairs = out.dtype == types.uint16

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        flat, places, target = (
            context.make_array(ty)(context, builder, value).data
            for ty, value in ((source, args[0]), (offsets, args[1]), (out, args[4]))
        )
        rows = []
        for i in range(LANES):
            place = builder.load(builder.gep(places, [builder.add(args[2], ir.Constant(LONG, i))]))
            begin = builder.gep(flat, [builder.add(place, args[3])])
            kind = types.float32 if in_pairs else source.dtype
            rows.append(widened(builder, kind, begin, LANES))
        for c, column_ in enumerate(_transposed(builder, rows)):
            offset = builder.add(args[5], builder.mul(args[6], ir.Constant(LONG, c)))
            offset = builder.mul(offset, ir.Constant(LONG, 2 if in_pairs else 1))
            begin = builder.bitcast(builder.gep(target, [offset]), FLOATS.as_pointer())
            builder.store(column_, begin, align=4)
        return context.get_dummy_value()

    return types.void(source, offsets, at, column, out, to, stride), emit


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen, turned: each round swaps blocks between rows `half` apart."""
    half = LANES // 2
    while half:
        upper = [i if not i & half else LANES + (i ^ half) for i in range(LANES)]
        lower = [i ^ half if not i & half else LANES + i for i in range(LANES)]
        turned = list(rows)
        for i in range(LANES):
            if not i & half:
                pair = rows[i], rows[i + half]
                turned[i] = builder.shuffle_vector(*pair, lanes(upper))
                turned[i + half] = builder.shuffle_vector(*pair, lanes(lower))
        rows, half = turned, half // 2
    return rows


def _dot(shapes: dict[int, int]) -> Any:
    """A kernel for each number of vectors of outputs, and the most rows it takes with so many."""

    @intrinsic
    def dot(
        _context: Any,
        weights: Any,
        begin: Any,
        gap: Any,
        stride: Any,
        x: Any,
        row: Any,
        count: Any,
        length: Any,
        vectors: Any,
        out: Any,
        to: Any,
        column: Any,
    ) -> Codegen:
        def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            tile = _tile_of(context, builder, names, args)
            _choose(builder, tile, shapes, (args[8], args[6]))
            return context.get_dummy_value()

        names = (
            weights, begin, gap, stride, x, row, count, length, vectors, out, to, column,
        )  # fmt: skip
        return types.void(*names), emit

    return dot


# dot(w, begin, gap, stride, x, row, count, length, vectors, out, to, column):
#
#     out[to + r, column + o] = sum over i < length of x[row + r, i] * w[begin + i * stride + o]
#
# for r in 0..count-1 and o over `vectors` vectors, two of which make a panel; a second panel lies
# `gap` behind the first. The weights w are flat. Where x holds bfloat16, i counts pairs: two of x,
# and LANES pairs of weights. A sum runs over i in order, so it does not depend on `count`.
# An array as `stride` has the offset of every row of weights (two make a pair, which is made here);
# its vectors are side by side.
dot_panels = _dot({2: TILE_ROWS, 4: DOUBLE_ROWS})
dot_values = _dot({1: TILE_ROWS, 2: TILE_ROWS, 4: DOUBLE_ROWS})


def _tile_of(context: Any, builder: Any, kinds: tuple[Any, ...], args: Any) -> "_Tile":
    """The tile that the arguments of `dot` describe."""
    b = builder
    w, x, out = (context.make_array(kinds[i])(context, b, args[i]) for i in (0, 4, 9))
    x_width, width = (b.extract_value(array.shape, 1) for array in (x, out))
    offsets = None
    if isinstance(kinds[3], types.Array):
        offsets = context.make_array(kinds[3])(context, b, args[3]).data
    return _Tile(
        builder,
        kinds=(kinds[0].dtype, kinds[4].dtype),
        panels=[b.gep(w.data, [at]) for at in (args[1], b.add(args[1], args[2]))],
        inputs=b.gep(x.data, [b.mul(args[5], x_width)]),
        x_width=x_width,
        out=b.gep(out.data, [b.add(b.mul(args[10], width), args[11])]),
        width=width,
        length=args[7],
        stride=args[3],
        offsets=offsets,
    )


def _choose(builder: Any, tile: "_Tile", shapes: dict[int, int], asked: tuple[Any, Any]) -> None:
    """Jump to the loop for the vectors and rows that are asked for."""
    b, (vectors, rows) = builder, asked
    after = b.append_basic_block("dotted")
    choice = b.switch(b.add(b.mul(vectors, ir.Constant(LONG, TILE_ROWS)), rows), after)
    for width, most in shapes.items():
        for count in range(1, most + 1):
            block = b.append_basic_block(f"rows{count}")
            choice.add_case(ir.Constant(LONG, width * TILE_ROWS + count), block)
            b.position_at_end(block)
            tile.emit(width, count)
            b.branch(after)
    b.position_at_end(after)


class _Tile:
    """Emits the loop over the inputs for a fixed number of rows and panels."""

    def __init__(self, builder: Any, *, kinds: tuple[Any, Any], **values: Any) -> None:
        self._builder = builder
        self._stored, self._in_pairs = kinds[0], kinds[1] == types.uint16
        self._at = SimpleNamespace(**values)

    def emit(self, vectors: int, rows: int) -> None:
        """Sum up for `rows` rows over so many vectors of outputs, and store."""
        b, at = self._builder, self._at
        starts = [self._row(at.inputs, at.x_width, r) for r in range(rows)]
        entry, loop, done = b.block, b.append_basic_block("inputs"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(LONG)
        step.add_incoming(ir.Constant(LONG, 0), entry)
        sums = [[b.phi(FLOATS) for _ in range(vectors)] for _ in range(rows)]
        if at.offsets is None:
            begins = [b.gep(panel, [b.mul(step, at.stride)]) for panel in at.panels]
            loaded = [self._load(begins[i // 2], i % 2) for i in range(vectors)]
        else:
            loaded = self._scattered(step, vectors)
        each = ir.Constant(LONG, 2 if self._in_pairs else 1)
        results = []
        for start, totals in zip(starts, sums, strict=True):
            value = self._broadcast(b.gep(start, [b.mul(step, each)]))
            added = [self._add(t, w, value) for t, w in zip(totals, loaded, strict=True)]
            for total, result in zip(totals, added, strict=True):
                total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
                total.add_incoming(result, loop)
            results.append(added)
        following = b.add(step, ir.Constant(LONG, 1))
        step.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, at.length), loop, done)
        b.position_at_end(done)
        for r, totals in enumerate(results):
            target = self._row(at.out, at.width, r)
            for i, total in enumerate(totals):
                begin = b.gep(target, [ir.Constant(LONG, i * LANES)])
                b.store(total, b.bitcast(begin, FLOATS.as_pointer()), align=4)

    def _row(self, begin: Any, width: Any, row: int) -> Any:
        return self._builder.gep(begin, [self._builder.mul(width, ir.Constant(LONG, row))])

    def _load(self, at: Any, half: int) -> Any:
        """One half of a panel: LANES weights, or LANES pairs of them."""
        size = PANEL if self._in_pairs else LANES
        at = self._builder.gep(at, [ir.Constant(LONG, half * size)])
        if self._in_pairs and self._stored == types.uint16:
            return self._builder.load(self._builder.bitcast(at, PAIRS.as_pointer()), align=2)
        wide = widened(self._builder, self._stored, at, size)
        return self._builder.fptrunc(wide, PAIRS) if self._in_pairs else wide

    def _scattered(self, step: Any, vectors: int) -> list[Any]:
        """So many vectors from where `offsets` says, side by side; of two rows a pair is made."""
        b, at = self._builder, self._at
        rows = []
        for i in range(2 if self._in_pairs else 1):
            index = b.add(b.mul(step, ir.Constant(LONG, 2)), ir.Constant(LONG, i))
            offset = b.load(b.gep(at.offsets, [index if self._in_pairs else step]))
            rows.append(b.gep(at.panels[0], [offset]))
        if not self._in_pairs:
            begins = [b.gep(rows[0], [ir.Constant(LONG, i * LANES)]) for i in range(vectors)]
            return [widened(b, self._stored, begin, LANES) for begin in begins]
        raw = ir.VectorType(SHORT, LANES)
        mixed = lanes([lane for i in range(LANES) for lane in (i, LANES + i)])
        loaded = []
        for i in range(vectors):
            begins = [b.gep(row, [ir.Constant(LONG, i * LANES)]) for row in rows]
            pair = [b.load(b.bitcast(begin, raw.as_pointer()), align=2) for begin in begins]
            loaded.append(b.bitcast(b.shuffle_vector(*pair, mixed), PAIRS))
        return loaded

    def _broadcast(self, at: Any) -> Any:
        """One value of x, or a pair of them, in every lane."""
        b = self._builder
        kind = INT if self._in_pairs else FLOAT
        vector = ir.VectorType(kind, LANES)
        value = b.load(b.bitcast(at, kind.as_pointer()), align=2)
        none = ir.Constant(vector, ir.Undefined)
        one = b.insert_element(none, value, ir.Constant(INT, 0))
        spread = b.shuffle_vector(one, none, lanes([0] * LANES))
        return b.bitcast(spread, PAIRS) if self._in_pairs else spread

    def _add(self, total: Any, weights: Any, x: Any) -> Any:
        if self._in_pairs:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            dot = declare(self._builder, name, FLOATS, [FLOATS, PAIRS, PAIRS])
            return self._builder.call(dot, [total, weights, x])
        fma = declare(self._builder, "llvm.fma.v16f32", FLOATS, [FLOATS] * 3)
        return self._builder.call(fma, [weights, x, total])
