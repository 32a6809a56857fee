"""Codes times numbers, for one row of x: as few instructions a weight as its bits allow.

A 32-bit word holds codes in both of its halves. One shift and a mask move the code of a digit, in both at
once, to where a float16 has its bits, and a conversion of each half makes a float32 of it: small floats keep
their exponents, whole numbers become numbers below the normal ones. All are a power of two too small then,
which the numbers that they meet make up for; what numbers scale and offset is done once for the weights
that share them. M is `_codes.meaning`'s.

A piece of a row is 16 bytes, four words; its words are a tuple of four tensors, so that a thread multiplies
what it has loaded by what it holds. A digit's eight columns are neighbours (of bytes: every other one).
"""

from __future__ import annotations

from freetoken.core.codes import IQ4
from freetoken.kernels._codes import float_of, level, number
from freetoken.kernels._triton import INTERPRETED, constexpr, folded, jit, tl

INTERPRET = constexpr(INTERPRETED)


def _looking_up() -> str:
    """PTX: the bytes (entry + 128 of the table) of the four codes in each half of a word."""
    a, b, c, d = (sum((v + 128) << 8 * n for n, v in enumerate(IQ4[at : at + 4])) for at in (0, 4, 8, 12))
    half = (
        f"and.b32 s, w, 0x7777; prmt.b32 low, {a}, {b}, s; prmt.b32 high, {c}, {d}, s;"
        "shr.u32 s, w, 1; and.b32 s, s, 0x4444; or.b32 s, s, 0x3210; prmt.b32 $%d, low, high, s;"
    )
    return "{ .reg .b32 w, s, low, high; mov.b32 w, $2;" + half % 0 + "shr.u32 w, w, 16;" + half % 1 + "}"


LOOK_UP = constexpr(_looking_up())


@folded
def _left(q, m):
    """What `pair` makes of digit q is this times too large: the digit was left at its place in a byte."""
    return 2.0 ** (q * m[11] % 8) if m[0] <= 1 else 1.0


@folded
def _factor(m):
    """From a code's bits in a float16 to its level."""
    return 2.0 ** {0: 24, 1: 24, 2: 14, 3: 8, 4: 24}.get(m[0], 0)


@folded
def _zero(m):
    """What `pair` adds to a level, so that it is a whole number from 0 on."""
    return 128.0 if m[0] in (1, 4) else float(m[1])


@folded
def _digits(m):
    return max(1, 16 // m[11])


@folded
def _together(m):
    """Columns of H in a word of down."""
    return 32 // m[11] if not m[2] else 2 if m[11] == 8 else 1


@jit
def _moved(word, LEFT: tl.constexpr):
    if LEFT > 0:
        word = word << LEFT
    elif LEFT < 0:
        word = word >> -LEFT
    return word


@jit
def _half(word):
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _halves(word):
    """The float16 in the low and in the high half, as float32.

    Said in PTX, because LLVM would first pair halves of different words, which costs half as much again.
    """
    if INTERPRET:
        low, high = _half(word), _half(word >> 16)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .f16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@jit
def _entries(word):
    """The table's entries, plus 128, of the codes in the low and in the high half, as four bytes each."""
    if INTERPRET:
        low, high = tl.zeros_like(word), tl.zeros_like(word)
        for n in tl.static_range(4):
            low |= (level((word >> 4 * n) & 15, 4, 0) + 128.0).to(tl.int32) << 8 * n
            high |= (level((word >> (16 + 4 * n)) & 15, 4, 0) + 128.0).to(tl.int32) << 8 * n
    else:
        low, high = tl.inline_asm_elementwise(
            LOOK_UP, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return low, high


@jit
def pair(word, later, Q: tl.constexpr, M: tl.constexpr):
    """float32 levels + `_zero` of digit Q in the low and in the high half, times `_left`, over `_factor`."""
    KIND: tl.constexpr = M[0]
    AT: tl.constexpr = Q * M[11]
    if KIND <= 1:
        MASK: tl.constexpr = ((1 << M[11]) - 1) << AT % 8
        if KIND == 1:
            word = word ^ -2139062144  # 0x80808080: from -128 to 0
        both = _moved(word, AT % 8 - AT) & (MASK | MASK << 16)
        if M[8] > 1:
            PLACE: tl.constexpr = M[11] + AT % 8
            MORE: tl.constexpr = ((1 << M[13]) - 1) << PLACE
            both |= _moved(later, PLACE - Q * M[13]) & (MORE | MORE << 16)
    elif KIND == 2:
        both = (_moved(word, 12 - AT) & -2147450880) | (_moved(word, 9 - AT) & 0x0E000E00)
    elif KIND == 3:
        both = (_moved(word, 8 - AT) & -2147450880) | (_moved(word, 7 - AT) & 0x3F803F80)
    elif KIND == 4:
        mine, other = _entries(word)
        both = (_moved(mine, -2 * AT) & 0xFF) | (_moved(other, 16 - 2 * AT) & 0xFF0000)
    else:
        both = word
    if KIND == 5:
        low, high = float_of(word << 16), float_of(word & -65536)
    elif KIND == 7:
        low, high = float_of(word), tl.zeros_like(float_of(word))
    else:
        low, high = _halves(both)
    return low, high


@jit
def _four(value):
    """[.., .., 4] -> four [.., ..]."""
    even, odd = tl.split(tl.reshape(value, [value.shape[0], value.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@folded
def _line(m):
    """Columns of a line of words; what lies otherwise has none."""
    return 512 // m[11] if m[2] else 1


@folded
def _changes(m, at):
    """Whether a number changes within a line."""
    return m[at + 2] > 0 and m[at + 3] % _line(m) != 0


# --- gate and up ------------------------------------------------------------------------------------


@jit
def row_words(tile, row, piece, M: tl.constexpr, PLANE: tl.constexpr):
    """int32 [pieces, rows, 4] of a plane. Pieces come first: neighbouring threads read neighbours."""
    BITS: tl.constexpr = M[11 + 2 * PLANE]
    LINE: tl.constexpr = tl.cdiv(M[4], 512 // BITS) * 16 if M[2] else M[4] * BITS // 32
    if PLANE > 0:  # a line of this plane is several of the first one's
        piece = piece // (4 * (M[11] // BITS)) * 4 + piece % 4
    base = (tile + M[12 + 2 * PLANE]).to(tl.pointer_type(tl.int32))
    at = (piece * 4)[:, None, None] + (row * LINE)[None, :, None] + tl.arange(0, 4)[None, None, :]
    real = (piece * 4 < LINE)[:, None, None]
    return tl.load(base + at, mask=real, other=0, eviction_policy="evict_first")


@jit
def _column(piece, Q: tl.constexpr, M: tl.constexpr):
    """The first column of digit Q of a piece."""
    if M[2]:
        return piece // 4 * (512 // M[11]) + 32 * Q + piece % 4 * 8
    return piece * (128 // M[11])


@jit
def _along(tile, row, piece, Q: tl.constexpr, M: tl.constexpr, AT: tl.constexpr):
    """The number that M describes from AT on and that covers digit Q of a piece."""
    LINE: tl.constexpr = _line(M)
    WIDE: tl.constexpr = M[AT + 3]
    if M[2] and WIDE <= 32:  # so that Q is a constant beside an address
        j = piece // 4 * (LINE // WIDE) + piece % 4 * 8 // WIDE + Q * (32 // WIDE)
    else:
        j = _column(piece, Q, M) // WIDE
    mask = True
    if M[4] % LINE != 0:
        mask = (_column(piece, Q, M) < M[4])[:, None]
    return number(tile, row[None, :], j[:, None], mask, M, AT)


@jit
def _covering(tile, row, piece, Q: tl.constexpr, M: tl.constexpr, AT: tl.constexpr, COUNT: tl.constexpr):
    """The product of the numbers that change within a line and cover digit Q; Q < 0: of those that don't."""
    value = 1.0
    for s in tl.static_range(COUNT):
        if _changes(M, AT + 5 * s) == (Q >= 0):
            value = value * _along(tile, row, piece, max(Q, 0), M, AT + 5 * s)
    return value


@jit
def _neighbours(x, h, H: tl.constexpr):
    """x[h] and x[h + 1] as float32, h even: one load, which a thread makes for itself."""
    if x.dtype.element_ty == tl.float32:
        low = tl.load(x + h, mask=h < H, other=0.0)
        high = tl.load(x + h + 1, mask=h + 1 < H, other=0.0)
    else:
        both = tl.load((x + h).to(tl.pointer_type(tl.int32)), mask=h < H, other=0)
        if x.dtype.element_ty == tl.float16:
            low, high = _halves(both)
        else:
            low, high = float_of(both << 16), float_of(both & -65536)
    return low, high


@jit
def _xs(x, piece, Q: tl.constexpr, K: tl.constexpr, M: tl.constexpr):
    """float32 [pieces] twice: what digit Q of the low and of the high half of word K meets."""
    h = _column(piece, Q, M)
    if M[11] == 32:
        low, other = _neighbours(x, h + K // 2 * 2, M[4])
        if K % 2 == 1:
            low = other
        high = tl.zeros_like(low)
    elif M[11] == 8 and not M[2]:
        a, b = _neighbours(x, h + 4 * K, M[4])
        c, d = _neighbours(x, h + 4 * K + 2, M[4])
        if Q == 0:
            low, high = a, c
        else:
            low, high = b, d
    else:
        low, high = _neighbours(x, h + 2 * K, M[4])
    if _left(Q, M) != 1.0:
        low, high = low * (1.0 / _left(Q, M)), high * (1.0 / _left(Q, M))
    return low, high


@jit
def add_dots(total, tile, x, row, piece, words, M: tl.constexpr):
    """total float32 [pieces, rows] + what each row's words give with x, over `_factor`."""
    word = _four(words)
    later = word
    if M[8] > 1:
        RATIO: tl.constexpr = M[11] // M[13]
        shift = piece // 4 % RATIO * (16 // RATIO)
        later = _four(row_words(tile, row, piece, M, 1) >> shift[:, None, None])
    scaled = tl.zeros_like(total)
    offset = tl.zeros_like(total)
    LAST: tl.constexpr = tl.cdiv(M[4], 512 // M[11]) * 4 - 1 if M[2] else tl.cdiv(M[4], 128 // M[11]) - 1
    last = tl.minimum(piece, LAST)  # what is beyond meets zeros
    for q in tl.static_range(_digits(M)):
        dot = tl.zeros_like(total)
        whole = tl.zeros(piece.shape, tl.float32)
        for k in tl.static_range(4):
            low_x, high_x = _xs(x, piece, q, k, M)
            low, high = pair(word[k], later[k], q, M)
            dot += low * low_x[:, None]
            dot += high * high_x[:, None]
            whole += low_x + high_x
        whole *= _left(q, M) / _factor(M)
        if _zero(M) != 0:
            dot -= (whole * _zero(M))[:, None]
        if M[10] > 0:
            offset += whole[:, None] * _covering(tile, row, last, q, M, 30, M[10])
        scaled += dot * _covering(tile, row, last, q, M, 15, M[9])
    total += scaled * _covering(tile, row, last, -1, M, 15, M[9])
    if M[10] > 0:
        total -= offset * (_covering(tile, row, last, -1, M, 30, M[10]) * M[3])
    return total


@jit
def sum_of(total, M: tl.constexpr):
    """float32 [rows]: what `add_dots` has added up."""
    return tl.sum(total, 0) * _factor(M)


# --- down: each thread owns words of some columns of H ----------------------------------------------


@jit
def down_words(tile, first, at, COUNT: tl.constexpr, BD: tl.constexpr, M: tl.constexpr):
    """Of columns [first, + COUNT) of I, by columns [at, + BD) of H: a tuple of int32 [words]."""
    found = ()
    for u in tl.static_range(COUNT // M[7]):
        found = found + (_down_word(tile, first // M[7] + u, at, BD, 0, M),)
    return found


@jit
def _down_word(tile, line, at, BD: tl.constexpr, PLANE: tl.constexpr, M: tl.constexpr):
    N: tl.constexpr = _together(M)
    col = at // N + tl.arange(0, BD // N)
    base = (tile + M[12 + 2 * PLANE]).to(tl.pointer_type(tl.int32)) + line * (M[4] // N)
    return tl.load(base + col, mask=col < M[4] // N, other=0, eviction_policy="evict_first")


@jit
def _down_later(tile, first, at, BD: tl.constexpr, M: tl.constexpr):
    """Words of the second plane, whose digits of column `first` on come to their beginning."""
    SPAN: tl.constexpr = 32 // M[13]
    return _down_word(tile, first // SPAN, at, BD, 1, M) >> (first % SPAN // 2 * M[13])


@jit
def _joined(a, b, c, d, N: tl.constexpr, W: tl.constexpr):
    """[W] for each of a word's columns of H -> [W * N]."""
    if N == 4:
        value = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * W])
    elif N == 2:
        value = tl.reshape(tl.join(a, c), [2 * W])
    else:
        value = a
    return value


@jit
def down_dots(tile, words, middle, first, at, COUNT: tl.constexpr, BD: tl.constexpr, M: tl.constexpr):
    """float32 [BD]: what `down_words` read, times `middle`, a tuple of COUNT scalars."""
    N: tl.constexpr = _together(M)
    SPAN: tl.constexpr = M[7]
    STEPS: tl.constexpr = M[9]
    LEASTS: tl.constexpr = M[10]
    h = at + tl.arange(0, BD)
    a = tl.zeros([BD // N], tl.float32)
    b = tl.zeros([BD // N], tl.float32)
    c = tl.zeros([BD // N], tl.float32)
    d = tl.zeros([BD // N], tl.float32)
    for u in tl.static_range(COUNT // SPAN):
        word = words[u]
        later = word
        if M[8] > 1:
            later = _down_later(tile, first + u * SPAN, at, BD, M)
        for q in tl.static_range(_digits(M)):
            low, high = pair(word, later, q, M)
            if M[2] and M[11] < 8:
                a += low * (middle[u * SPAN + 2 * q] * (1.0 / _left(q, M)))
                a += high * (middle[u * SPAN + 2 * q + 1] * (1.0 / _left(q, M)))
            elif M[2]:
                a += low * middle[u * SPAN + q]
                c += high * middle[u * SPAN + q]
            elif q == 0:
                a += low * middle[u]
                c += high * middle[u]
            else:
                b += low * middle[u]
                d += high * middle[u]
    total = _joined(a, b, c, d, N, BD // N) * _factor(M)
    whole = middle[0]
    for n in tl.static_range(1, COUNT):
        whole += middle[n]
    if _zero(M) != 0:
        total -= whole * _zero(M)
    for s in tl.static_range(STEPS):
        total *= number(tile, first, h // M[15 + 5 * s + 3], h < M[4], M, 15 + 5 * s)
    if M[10] > 0:
        least = whole * M[3]
        for s in tl.static_range(LEASTS):
            least = least * number(tile, first, h // M[30 + 5 * s + 3], h < M[4], M, 30 + 5 * s)
        total -= least
    return total
