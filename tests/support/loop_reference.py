"""The quantizer once more: plain loops over Python floats, sharing no code with the package."""

import math
import struct


def hadamard(order):
    return [
        [(-1) ** bin(i & j).count("1") / math.sqrt(order) for j in range(order)]
        for i in range(order)
    ]


def bent_sign(index, bits):
    parity = 0
    for low in range(0, bits - 1, 2):
        parity ^= (index >> low & 1) & (index >> (low + 1) & 1)
    return -1 if parity else 1


def matmul(left, right):
    return [
        [sum(row[k] * right[k][j] for k in range(len(right))) for j in range(len(right[0]))]
        for row in left
    ]


def sample_std(numbers):
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def normalize(tile, iterations):
    """Row and column scales of a tile given as a list of rows, and the imbalance of each pass."""
    rows, columns = len(tile), len(tile[0])
    log_row, log_column = [0.0] * rows, [0.0] * columns
    best, imbalances = ([1.0] * rows, [1.0] * columns), []

    def current():
        return [
            [tile[r][c] / math.exp(log_column[c]) / math.exp(log_row[r]) for c in range(columns)]
            for r in range(rows)
        ]

    def stepped(log_scale, std):
        return min(max(log_scale + math.log(min(max(std, 1e-3), 1e3)), -0.3), 10.0)

    for _ in range(iterations):
        cur = current()
        for c in range(columns):
            log_column[c] = stepped(log_column[c], sample_std([row[c] for row in cur]))
        cur = current()
        for r in range(rows):
            log_row[r] = stepped(log_row[r], sample_std(cur[r]))
        cur = current()
        column_std = [sample_std([row[c] for row in cur]) for c in range(columns)]
        row_std = [sample_std(row) for row in cur]
        imbalance = max(column_std) / max(min(column_std), 1e-8)
        imbalance += max(row_std) / max(min(row_std), 1e-8)
        if not imbalances or imbalance <= min(imbalances):
            best = ([math.exp(x) for x in log_row], [math.exp(x) for x in log_column])
        imbalances.append(imbalance)
    return *best, imbalances


def quantize(tile, bits, iterations):
    """Codes, row scales, row zero points and column scales of a tile."""
    row_scale, column_scale, _ = normalize(tile, iterations)
    codes, scales, zeros = [], [], []
    for row, s_row in zip(tile, row_scale, strict=True):
        balanced = [x / (s_row * s_col) for x, s_col in zip(row, column_scale, strict=True)]
        low, high = min(balanced), max(balanced)
        scale = max((high - low) / (2**bits - 1), 1e-10)
        codes.append([min(max(round((x - low) / scale), 0), 2**bits - 1) for x in balanced])
        scales.append(scale * s_row)
        zeros.append(low * s_row)
    return codes, scales, zeros, column_scale


def pack(codes, bits):
    """Bytes of the codes of a tile, low bits first."""
    flat = [code for row in codes for code in row]
    per_byte = 8 // bits
    return bytes(
        sum(flat[start + i] << (i * bits) for i in range(per_byte))
        for start in range(0, len(flat), per_byte)
    )


def half(numbers):
    return struct.pack(f"<{len(numbers)}e", *numbers)


def record(key_tile, value_tile, key_bits, value_bits, iterations):
    """The record of a K tile [channels][tokens] and a V tile [tokens][channels], rotated."""
    k_codes, k_scale, k_zero, k_column = quantize(key_tile, key_bits, iterations)
    v_codes, v_scale, v_zero, v_column = quantize(value_tile, value_bits, iterations)
    return b"".join(
        (
            *(pack(k_codes, key_bits), half(k_scale), half(k_zero), half(k_column)),
            *(pack(v_codes, value_bits), half(v_column), half(v_scale), half(v_zero)),
        )
    )


def rounded_to_half(number):
    return struct.unpack("<e", struct.pack("<e", number))[0]


def rounded_to_e4m3(number):
    if number == 0:
        return 0.0
    size = min(abs(number), 448.0)
    step = 2.0 ** (max(math.floor(math.log2(size)), -6) - 3)
    return math.copysign(round(size / step) * step, number)


SCALE_ROUNDING = {"vllm-fp16": rounded_to_half, "paper-fp8": rounded_to_e4m3}


def layout_scales(tile, iterations, layout):
    """Row and column scales; for FP8 brought together by a power of two."""
    row_scale, column_scale, _ = normalize(tile, iterations)
    shift = 1.0
    if layout == "paper-fp8":
        largest = max(abs(x / s) for row in tile for x, s in zip(row, column_scale, strict=True))
        shift = 2.0 ** round(math.log2(max(column_scale) / max(largest, 1e-6)) / 2)
    return [s * shift for s in row_scale], [s / shift for s in column_scale]


def nearest_code(number, scale, zero, bits):
    return min(max(round((number - zero) / scale), 0), 2**bits - 1) if scale > 0 else 0


def refine(tile, bits, iterations, shares, tokens, layout="vllm-fp16"):
    """What the refined encoder gives for a tile whose tokens are its "rows" or "columns"."""
    rounded = SCALE_ROUNDING[layout]
    row_scale, column_scale = layout_scales(tile, iterations, layout)
    columns = [rounded(s) for s in column_scale]
    codes, scales, zeros = [], [], []
    for row, s_row in zip(tile, row_scale, strict=True):
        normalized = [x / (s_row * s_col) for x, s_col in zip(row, column_scale, strict=True)]
        balanced = [x / s for x, s in zip(row, columns, strict=True)]
        low, width = min(normalized), max(normalized) - min(normalized)
        least, allowed = math.inf, math.inf
        best = ([0] * len(row), 0.0, rounded_to_half((low + width / 2) * s_row))
        for share in shares:
            scale = rounded(share * width / (2**bits - 1) * s_row)
            zero = rounded_to_half((low + (1 - share) * width / 2) * s_row)
            row_codes = [nearest_code(x, scale, zero, bits) for x in balanced]
            errors = [q * scale + zero - x for q, x in zip(row_codes, balanced, strict=True)]
            squares, cubes = sum(e * e for e in errors), sum(abs(e) ** 3 for e in errors)
            if scale > 0 and cubes < least and squares <= allowed:
                least, best = cubes, (row_codes, scale, zero)
            if share == shares[0] and scale > 0:
                allowed = squares
        codes.append(best[0])
        scales.append(best[1])
        zeros.append(best[2])

    decoded = decode(codes, scales, zeros, columns)
    if tokens == "columns":
        vectors = list(zip(zip(*tile, strict=True), zip(*decoded, strict=True), strict=True))
    else:
        vectors = list(zip(tile, decoded, strict=True))
    token_factors = [token_factor(x, y) for x, y in vectors]
    if tokens == "columns":
        return codes, scales, zeros, corrected(columns, token_factors, rounded)
    zeros = corrected(zeros, token_factors, rounded_to_half)
    return codes, corrected(scales, token_factors, rounded), zeros, columns


def token_factor(x, decoded):
    power, length = sum(a * a for a in x), sum(b * b for b in decoded)
    inner = sum(a * b for a, b in zip(x, decoded, strict=True))
    return power / inner if inner > math.sqrt(power * length) / 2 else 1.0


def corrected(scales, factors, rounded):
    return [rounded(s * factor) for s, factor in zip(scales, factors, strict=True)]


def decode(codes, scales, zeros, column_scale):
    return [
        [(q * scale + zero) * s for q, s in zip(row, column_scale, strict=True)]
        for row, scale, zero in zip(codes, scales, zeros, strict=True)
    ]
