"""Eight float64 samples at a time: a SIMD register as a numba type, with the functions the accountants need.

`Lanes` wraps an LLVM vector of 8 doubles (or 64-bit integers).  LLVM maps it to the registers the machine has
(one AVX-512, two AVX2, four NEON), so kernels are written once, per step, and run on all samples of a block together.
Arrays that hold lanes are flat and C-contiguous; row ``i`` starts at element ``8 i``.

Rounding, with ``u = 2^-53``: ``+ - * /`` and `sqrt` as IEEE; `fma` at most as two roundings; `exp` within ``4 u``
relative for arguments in [-708, 709]; `log` within ``4 u (1 + |log x|)`` absolute and ``8 u`` relative.
"""

from __future__ import annotations

import math
import operator

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

WIDTH = 8
_INDEX = ir.IntType(32)


class Lanes(types.Type):
    """The numba type of a vector of `WIDTH` elements of ``dtype``."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(f"Lanes({dtype})")


F64, I64 = Lanes(types.float64), Lanes(types.int64)


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        element = dmm.lookup(fe_type.dtype).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, WIDTH))


def _vector(context, lanes: Lanes) -> ir.VectorType:
    return context.get_value_type(lanes)


def _broadcast(builder, value):
    undefined = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_INDEX, WIDTH), [0] * WIDTH))


def _call(builder, name: str, args):
    """The LLVM intrinsic ``name`` on vectors of one type."""
    kind = args[0].type
    suffix = f".v{WIDTH}{'f64' if kind.element == ir.DoubleType() else 'i64'}"
    function = ir.FunctionType(kind, [kind] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}{suffix}"), args)


def _place(context, builder, array_type, array, row, kind):
    """Pointer to lanes ``row`` of a flat array."""
    data = context.make_array(array_type)(context, builder, array).data
    start = builder.mul(row, ir.Constant(row.type, WIDTH))
    return builder.bitcast(builder.gep(data, [start]), kind.as_pointer())


@intrinsic
def load(typingctx, array, row):
    """Lanes ``row`` of a flat array."""
    lanes = Lanes(array.dtype)

    def codegen(context, builder, signature, args):
        return builder.load(_place(context, builder, array, args[0], args[1], _vector(context, lanes)), align=8)

    return lanes(array, types.int64), codegen


@intrinsic
def store(typingctx, array, row, value):
    """Write lanes ``row`` of a flat array."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _place(context, builder, array, args[0], args[1], args[2].type), align=8)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), codegen


@intrinsic
def splat(typingctx, value):
    """The same number in all lanes."""

    def codegen(context, builder, signature, args):
        return _broadcast(builder, args[0])

    return F64(types.float64), codegen


@intrinsic
def splat_bits(typingctx, value):
    """The same 64-bit integer in all lanes."""

    def codegen(context, builder, signature, args):
        return _broadcast(builder, args[0])

    return I64(types.int64), codegen


def _elementwise(symbol, for_floats: str | None, for_integers: str | None) -> None:
    """Teach numba ``symbol`` on lanes, and on lanes with a float, by the LLVM instructions named."""

    @intrinsic
    def apply(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, for_floats if a == F64 else for_integers)(*args)

        return a(a, b), codegen

    @overload(symbol)
    def _(a, b):
        if isinstance(a, Lanes) and a == b:
            return lambda a, b: apply(a, b)
        if a == F64 and isinstance(b, types.Float):
            return lambda a, b: apply(a, splat(b))
        if b == F64 and isinstance(a, types.Float):
            return lambda a, b: apply(splat(a), b)
        if a == I64 and isinstance(b, types.Integer):
            return lambda a, b: apply(a, splat_bits(b))


_elementwise(operator.add, "fadd", "add")
_elementwise(operator.sub, "fsub", "sub")
_elementwise(operator.mul, "fmul", None)
_elementwise(operator.truediv, "fdiv", None)
_elementwise(operator.xor, None, "xor")
_elementwise(operator.and_, None, "and_")
_elementwise(operator.lshift, None, "shl")
_elementwise(operator.rshift, None, "ashr")


@intrinsic
def fma(typingctx, a, b, c):
    """``a b + c``, fused where the machine can."""

    def codegen(context, builder, signature, args):
        return _call(builder, "fmuladd", args)

    return F64(F64, F64, F64), codegen


@intrinsic
def sqrt(typingctx, a):
    def codegen(context, builder, signature, args):
        return _call(builder, "sqrt", args)

    return F64(F64), codegen


@intrinsic
def rotate(typingctx, a, count):
    """Rotate the bits to the left."""

    def codegen(context, builder, signature, args):
        return _call(builder, "fshl", [args[0], args[0], _broadcast(builder, args[1])])

    return I64(I64, types.int64), codegen


@intrinsic
def if_less(typingctx, a, b, yes, no):
    """``yes`` where ``a < b``, else ``no``, by lane."""

    def codegen(context, builder, signature, args):
        x, y, yes, no = args
        test = builder.fcmp_ordered("<", x, y) if a == F64 else builder.icmp_signed("<", x, y)
        return builder.select(test, yes, no)

    return yes(a, b, yes, no), codegen


def _conversion(source: Lanes, target: Lanes, instruction: str):
    @intrinsic
    def convert(typingctx, a):
        def codegen(context, builder, signature, args):
            return getattr(builder, instruction)(args[0], _vector(context, target))

        return target(source), codegen

    return convert


bits_of = _conversion(F64, I64, "bitcast")
of_bits = _conversion(I64, F64, "bitcast")
signed_float = _conversion(I64, F64, "sitofp")
unsigned_float = _conversion(I64, F64, "uitofp")


def filter_block(rows: int, taps: int, per_row: bool):
    """A numba function ``f(y, i, c, first, width, out, o)`` on rows of lanes, all sums in registers:

    ``out[o + r] += sum_k c[first + k] y[i + r + k]`` for ``rows`` times ``taps``; ``per_row``: row ``r`` has its own
    coefficients ``c[first + r width + k]``.
    """

    @intrinsic
    def block(typingctx, y, i, c, first, width, out, o):
        def codegen(context, builder, signature, args):
            ys, i, cs, first, width, outs, o = args
            data = context.make_array(c)(context, builder, cs).data

            def at(array_type, array, start, count):
                row = builder.add(start, ir.Constant(start.type, count))
                return _place(context, builder, array_type, array, row, _vector(context, F64))

            def coefficient(r, k):
                place = builder.add(first, ir.Constant(first.type, k))
                if per_row:
                    place = builder.add(place, builder.mul(width, ir.Constant(first.type, r)))
                return _broadcast(builder, builder.load(builder.gep(data, [place])))

            sums = [builder.load(at(out, outs, o, r), align=8) for r in range(rows)]
            shared = None if per_row else [coefficient(0, k) for k in range(taps)]
            for j in range(rows + taps - 1):
                value = builder.load(at(y, ys, i, j), align=8)
                for r in range(max(0, j - taps + 1), min(rows, j + 1)):
                    weight = coefficient(r, j - r) if per_row else shared[j - r]
                    sums[r] = _call(builder, "fmuladd", [weight, value, sums[r]])
            for r, value in enumerate(sums):
                builder.store(value, at(out, outs, o, r), align=8)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(y, whole, c, whole, whole, out, whole), codegen

    return block


def matrix_block(matrix):
    """A numba function ``f(y, i, s, out, o, t)`` on rows of lanes: ``out[o + t q] = sum_j matrix[q][j] y[i + s j]``."""

    @intrinsic
    def block(typingctx, y, i, s, out, o, t):
        def codegen(context, builder, signature, args):
            ys, i, s, outs, o, t = args
            kind = _vector(context, F64)
            rows = [builder.add(i, builder.mul(s, ir.Constant(i.type, j))) for j in range(len(matrix[0]))]
            values = [builder.load(_place(context, builder, y, ys, row, kind), align=8) for row in rows]
            for q, weights in enumerate(matrix):
                total = ir.Constant(kind, [0.0] * WIDTH)
                for weight, value in zip(weights, values, strict=True):
                    if weight:
                        factor = ir.Constant(kind, [float(weight)] * WIDTH)
                        total = _call(builder, "fmuladd", [factor, value, total])
                row = builder.add(o, builder.mul(t, ir.Constant(o.type, q)))
                builder.store(total, _place(context, builder, out, outs, row, kind), align=8)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(y, whole, whole, out, whole, whole), codegen

    return block


def _polynomial(coefficients):
    """Horner's rule in lanes; coefficients of rising powers."""

    @intrinsic
    def evaluate(typingctx, x):
        def codegen(context, builder, signature, args):
            value, *rest = (_broadcast(builder, ir.Constant(ir.DoubleType(), c)) for c in reversed(coefficients))
            for c in rest:
                value = _call(builder, "fmuladd", [value, args[0], c])
            return value

        return F64(F64), codegen

    return evaluate


_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # fdlibm: whole * LN2_HIGH is exact
_SHIFT = 1.5 * 2.0**52  # adding it rounds to a whole number, which then stands in the low bits
_exp_series = _polynomial([1.0 / math.factorial(k) for k in range(14)])
_log_series = _polynomial([2.0 / (2 * k + 1) for k in range(10)])
_sin_series = _polynomial([(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)])
_cos_series = _polynomial([(-1.0) ** k / math.factorial(2 * k) for k in range(9)])


@njit(nogil=True)
def exp(x):
    """``e^x``; raised to e^-708 below -708, infinite from 709 on (and for nan)."""
    x = if_less(x, splat(-708.0), splat(-708.0), x)
    shifted = fma(x, splat(_LOG2_E), splat(_SHIFT))
    whole = shifted - _SHIFT
    r = fma(whole, splat(-_LN2_LOW), fma(whole, splat(-_LN2_HIGH), x))
    value = of_bits(bits_of(_exp_series(r)) + (bits_of(shifted) << 52))
    return if_less(x, splat(709.0), value, splat(math.inf))


_ROOT_HALF_BITS = 0x3FE6A09E667F3BCD


@njit(nogil=True)
def log(x):
    """Natural logarithm of positive normal numbers."""
    bits = bits_of(x)
    exponent = (bits - _ROOT_HALF_BITS) >> 52
    f = of_bits(bits - (exponent << 52)) - 1.0
    s = f / (f + 2.0)
    k = signed_float(exponent)
    return fma(k, splat(_LN2_HIGH), fma(k, splat(_LN2_LOW), s * _log_series(s * s)))


NEGLIGIBLE = -1e300  # stands for log 0: finite, so that differences of two of them are not nan


@njit(nogil=True)
def log_add(a, b):
    """``log(e^a + e^b)`` within ``2 u |result| + 16 u``."""
    top = if_less(a, b, b, a)
    return top + log(exp(if_less(a, b, a, b) - top) + 1.0)


STATE = 4 * WIDTH


@njit(nogil=True)
def add_normal(state, out, rows, scale):
    """Add ``scale`` times independent standard normal lanes to the first ``rows`` rows of ``out``; ``state`` advances.

    Box and Muller's transform of xoshiro256++ (one stream per lane; ``state``: int64 ``(STATE,)``).  Chosen for speed:
    statistical quality, no cryptographic security; never use it for noise that is released.
    """
    s0, s1, s2, s3 = load(state, 0), load(state, 1), load(state, 2), load(state, 3)
    for row in range(0, rows, 2):
        word = rotate(s0 + s3, 23) + s0
        t = s1 << 17
        s2, s3 = s2 ^ s0, s3 ^ s1
        s1, s0 = s1 ^ s2, s0 ^ s3
        s2, s3 = s2 ^ t, rotate(s3, 45)
        angle_word = rotate(s0 + s3, 23) + s0
        t = s1 << 17
        s2, s3 = s2 ^ s0, s3 ^ s1
        s1, s0 = s1 ^ s2, s0 ^ s3
        s2, s3 = s2 ^ t, rotate(s3, 45)
        radius = sqrt(log((unsigned_float(word) + 0.5) * 2.0**-64) * (-2.0 * scale * scale))
        # An angle within a quarter turn from all bits, then one of four quarter turns from the two lowest.
        angle = signed_float(angle_word) * (math.pi / 4.0 * 2.0**-63)
        square = angle * angle
        sine, cosine = angle * _sin_series(square), _cos_series(square)
        radius = of_bits(bits_of(radius) ^ ((angle_word & 1) << 63))
        turned = angle_word << 62
        zero = splat_bits(0)
        first = if_less(turned, zero, cosine, sine)
        second = if_less(turned, zero, sine, of_bits(bits_of(cosine) ^ (splat_bits(1) << 63)))
        store(out, row, fma(radius, first, load(out, row)))
        if row + 1 < rows:
            store(out, row + 1, fma(radius, second, load(out, row + 1)))
    store(state, 0, s0)
    store(state, 1, s1)
    store(state, 2, s2)
    store(state, 3, s3)
