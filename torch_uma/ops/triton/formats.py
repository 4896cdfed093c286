"""Numbers of one format as those of another, inside kernels.

A format is the name of a dtype. All of them are exact in float32, through which every conversion goes. Float8 comes and
goes as bytes, since not every GPU knows it: where it does its instructions convert, elsewhere arithmetic on the bits.
"""

import triton
import triton.language as tl

FORMATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


@triton.jit
def to_float32(numbers, FORMAT: tl.constexpr, CONVERTS_FLOAT8: tl.constexpr):
    """Numbers of a format, exactly."""
    if FORMAT == "float8_e5m2":  # the upper half of a float16
        return (numbers.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "float8_e4m3fn":
        if CONVERTS_FLOAT8:
            return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            bits = numbers.to(tl.int32)
            size = bits & 0x7F
            # Exponent and mantissa where those of a float32 are, whose exponent counts from 127 and not from 7.
            value = (size << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2**120
            value = tl.where(size == 0x7F, float("nan"), value)
            return tl.where(bits >= 0x80, -value, value)
    else:
        return numbers.to(tl.float32)


@triton.jit
def _saturated(values, LIMIT: tl.constexpr, LEAST: tl.constexpr):
    """Within the limits; NaN stays."""
    return tl.where(values > LIMIT, LIMIT, tl.where(values < LEAST, LEAST, values))


@triton.jit
def _float8_bits(values, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """The bytes of float8 numbers nearest to float32 values that are no greater than the greatest, ties to even."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA_BITS
    half: tl.constexpr = (1 << (shift - 1)) - 1
    rebias: tl.constexpr = (127 - BIAS) << 23
    normal = (size + half + ((size >> shift) & 1) - rebias) >> shift
    # Adding a number whose last bit is worth the least float8 lets the addition round.
    least: tl.constexpr = (128 - BIAS + shift) << 23
    magic = (tl.zeros_like(bits) + least).to(tl.float32, bitcast=True)
    subnormal = (size.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - least
    rounded = tl.where(size < rebias + (1 << 23), subnormal, normal)
    rounded = tl.where(size > 0x7F800000, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_float32(values, FORMAT: tl.constexpr, CONVERTS_FLOAT8: tl.constexpr):
    """Float32 values in a format, rounded to nearest, ties to even; int8 and float8 saturate."""
    if FORMAT == "float8_e5m2":
        values = _saturated(values, 57344.0, -57344.0)
        if CONVERTS_FLOAT8:
            return values.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return _float8_bits(values, 2, 15)
    elif FORMAT == "float8_e4m3fn":
        values = _saturated(values, 448.0, -448.0)
        if CONVERTS_FLOAT8:
            return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return _float8_bits(values, 3, 7)
    elif FORMAT == "int8":
        # Where 1.5 * 2**23 is added, the last bit is worth one.
        return (_saturated(values, 127.0, -128.0) + 12582912.0 - 12582912.0).to(tl.int8)
    elif FORMAT == "bfloat16":
        return values.to(tl.bfloat16)
    elif FORMAT == "float16":
        return values.to(tl.float16)
    else:
        return values
