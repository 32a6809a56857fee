// AMX's tile registers, and what is made for them: turned squares of 16 x 16 dwords, floats as two bfloat16 numbers.
#pragma once
#include "simd.h"

namespace FT_NS {

constexpr int SIDE = 16, LINE = 32;  // a register: 16 rows of 32 bfloat16 numbers, or 16 x 16 sums
constexpr int TILE = SIDE * LINE;    // numbers of one

// GCC's intrinsics don't say that they read memory, so what was stored for them must be there first.
FT_INLINE void settle() { __asm__ volatile("" ::: "memory"); }

// The registers are this thread's for as long as one lives. Others (oneDNN) configure and release them, too, so
// nothing is left configured; each configuration takes 50 ns.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = SIDE;
    __asm__ volatile("" ::"r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// high + low; low may be null.
struct Split {
  const uint16_t *high, *low;
};

// What comes next, brought into L2 while tiles multiply: `step` bytes of each run with every line.
struct Ahead {
  const uint8_t* runs[2] = {};
  int64_t step = 0;
  FT_INLINE_MEMBER void bring() {
    for (int64_t b = 0; b < step; b += 64)
      for (int i = 0; i < 2; i++) __builtin_prefetch(runs[i] + b, 0, 2);
    runs[0] += step, runs[1] += step;
  }
};

// Two panels of 16 rows of weights times one or two blocks of 16 rows of x (x1 may be null): c[0] = a x0, c[1] = b x0,
// c[2] = a x1, c[3] = b x1, each [16 rows of weights][16 rows of x].
FT_INLINE void multiply(Split a, Split b, const uint16_t* x0, const uint16_t* x1, int64_t lines, float (*c)[SIDE * SIDE],
                        Ahead& ahead) {
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t n = 0; n < lines * TILE; n += TILE) {
    ahead.bring();
    _tile_loadd(4, a.high + n, 64);
    _tile_loadd(5, b.high + n, 64);
    _tile_loadd(6, x0 + n, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (x1) {
      _tile_loadd(7, x1 + n, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (a.low) {
      _tile_loadd(4, a.low + n, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (x1) _tile_dpbf16ps(2, 4, 7);
    }
    if (b.low) {
      _tile_loadd(5, b.low + n, 64);
      _tile_dpbf16ps(1, 5, 6);
      if (x1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  if (!x1) return;
  _tile_stored(2, c[2], 64);
  _tile_stored(3, c[3], 64);
}

// One or two blocks of 16 rows of the middle (a1 may be null) times 2 x 16 neighbours of `lines` lines of columns: added
// to sums, whose rows are `stride` floats apart, or the first of them.
FT_INLINE void add_columns(const uint16_t* a0, const uint16_t* a1, Split b, int64_t lines, float* sums0, float* sums1,
                           int64_t stride, bool fresh) {
  const int64_t step = stride * 4;
  settle();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums0, step);
    _tile_loadd(1, sums0 + SIDE, step);
    if (a1) {
      _tile_loadd(2, sums1, step);
      _tile_loadd(3, sums1 + SIDE, step);
    }
  }
  for (int64_t n = 0; n < lines * TILE; n += TILE) {
    _tile_loadd(4, a0 + n, 64);
    if (a1) _tile_loadd(5, a1 + n, 64);
    const uint16_t* part = b.high + n;
    for (int i = 0; i < (b.low ? 2 : 1); i++, part = b.low + n) {
      _tile_loadd(6, part, 64);
      _tile_loadd(7, part + lines * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (a1) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums0, step);
  _tile_stored(1, sums0 + SIDE, step);
  if (!a1) return;
  _tile_stored(2, sums1, step);
  _tile_stored(3, sums1 + SIDE, step);
}

// Row r of a square becomes its column r.
FT_INLINE void turn(I (&v)[SIDE]) {
  I t[SIDE];
  for (int i = 0; i < SIDE; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < SIDE; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    const I a = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88), b = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
    const I c = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88), d = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
    t[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, c, 0xDD);
    t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
  for (int i = 0; i < SIDE; i++) v[i] = t[i];
}

// 32 floats to the nearest bfloat16 numbers, the first 16 below; and each half of those as floats.
FT_INLINE I pack(F first, F second) { return (I)_mm512_cvtne2ps_pbh(second, first); }
FT_INLINE F first_half(I v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16));
}
FT_INLINE F second_half(I v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16));
}
// The two halves' numbers by turns; and those of either as floats.
FT_INLINE I woven(I v) {
  const I order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                    0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F);
  return _mm512_permutexvar_epi16(order, v);
}
FT_INLINE F even_numbers(I v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
FT_INLINE F odd_numbers(I v) {
  return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xFFFF0000)));
}

}  // namespace FT_NS
