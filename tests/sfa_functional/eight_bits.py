"""An oracle for eight-bit formats in plain Python: numbers, rounding and bytes one at a time, no tensor arithmetic."""

import math
import struct
from collections.abc import Sequence


def e4m3(code: int) -> float:
    """Read a code: a sign, four bits of exponent with bias 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


MAGNITUDES = [e4m3(code) for code in range(127)]


def e4m3_code(x: float) -> int:
    """Round to the nearest code, ties to the even one; beyond 448 is 448."""
    size = min(abs(x), 448.0)
    code = min(range(127), key=lambda c: (abs(MAGNITUDES[c] - size), c & 1))
    return code | (128 if math.copysign(1.0, x) < 0 else 0)


def int8_code(x: float) -> int:
    """Round to the nearest integer, ties to even, as a byte of two's complement."""
    return round(max(-127.0, min(127.0, x))) & 255


def float32(x: float) -> float:
    """Round to float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def group_scale(values: Sequence[float], *, largest: int, power_of_two: bool, floor: float) -> float:
    """Return the scale of a group: the smallest power of two that is large enough, or the plain quotient."""
    amax = max(float32(floor), *map(abs, values), 0.0)
    if not power_of_two:
        return max(float32(amax / largest), 2.0**-126)
    exponent = -126
    while largest * 2.0**exponent < amax:
        exponent += 1
    return 2.0**exponent


def code_bytes(values: Sequence[float], scale: float, *, fp8: bool) -> bytes:
    """Return the codes of a group, one byte each; the quotient is a float32."""
    return bytes((e4m3_code if fp8 else int8_code)(float32(x / scale)) for x in values)


def bfloat16(x: float) -> bytes:
    """Round to bfloat16, ties to even: the upper half of the float32, little endian."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", bits + 0x7FFF + (bits >> 16 & 1) >> 16)
