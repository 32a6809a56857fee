// Formats as planes of codes and parts that scale them: weight = value(code) * step + offset.
//
// A format states its codes, its parts in stream order, and how parts make steps, once; what reads them differs:
// one number for a row's block (RowAt), one a lane for columns of down (DownAt), a row's next 256 elements
// (SpanAt). A spec gives
//   LOW, HIGH              bits of a code's planes; HIGH 0 = one plane
//   value(codes)           floats of W codes (what lies above their bits is to be ignored)
//   number(code)           the same at compile time; exact in bfloat16
//   SPAN                   elements that share a step: 16 or 32
//   FT_PARTS(..)           its parts, in the order of their streams
//   step(at), offset(at)   from at(part); offset where OFFSET
// and FT_BLOCKS(name, Spec, columns of w, columns of H) makes a format of it, for every tier.
#pragma once
#include "coded.h"

namespace FT_NS {

// --- parts ----------------------------------------------------------------------------------------

struct Half {
  uint16_t bits;
};
struct E8m0 {
  uint8_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct Less32 {  // a byte minus 32
  uint8_t bits;
};
struct LowNibble {
  uint8_t bits;
};
struct HighNibble {
  uint8_t bits;
};

#if defined(FT_AVX512) || defined(FT_AVX2)
FT_INLINE float number(Half v) { return _cvtsh_ss(v.bits); }
#elif defined(FT_NEON)
FT_INLINE float number(Half v) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(v.bits))), 0); }
#else
FT_INLINE float number(Half v) { return f16_to_float(v.bits); }
#endif
FT_INLINE float number(uint8_t v) { return v; }
FT_INLINE float number(Less32 v) { return (float)(v.bits - 32); }
FT_INLINE float number(LowNibble v) { return (float)(v.bits & 15); }
FT_INLINE float number(HighNibble v) { return (float)(v.bits >> 4); }
FT_INLINE float number(int8_t v) { return v; }
FT_INLINE float number(E8m0 v) { return v.bits ? bits_to_float((uint32_t)v.bits << 23) : 5.877471754e-39f; }
FT_INLINE float number(E4m3 v) {
  return 256.0f * number(Half{(uint16_t)((v.bits & 0x7F) << 7 | (v.bits & 0x80) << 8)});
}

#if defined(FT_AVX512)
FT_INLINE F power_of(I e) {  // 2^(e - 127); e = 0 is the subnormal 2^-127
  F p = _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
  return _mm512_mask_blend_ps(_mm512_testn_epi32_mask(e, e), p, set1(5.877471754e-39f));
}
#elif defined(FT_AVX2)
FT_INLINE F power_of(I e) {
  F p = _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
  I none = _mm256_cmpeq_epi32(e, _mm256_setzero_si256());
  return _mm256_blendv_ps(p, set1(5.877471754e-39f), _mm256_castsi256_ps(none));
}
#elif defined(FT_NEON)
FT_INLINE F power_of(I e) { return of_bits(vmaxq_u32(vshlq_n_u32(e, 23), vdupq_n_u32(0x00400000))); }
#else
FT_INLINE F power_of(I e) { return number(E8m0{(uint8_t)e}); }
#endif

FT_INLINE F lanes(const Half* p) { return from_f16((const uint16_t*)p); }
FT_INLINE F lanes(const uint8_t* p) { return to_float(bytes_of(p)); }
FT_INLINE F lanes(const int8_t* p) { return from_i8(p); }
FT_INLINE F lanes(const Less32* p) { return sub(to_float(bytes_of((const uint8_t*)p)), set1(32.0f)); }
FT_INLINE F lanes(const LowNibble* p) { return to_float(masked(bytes_of((const uint8_t*)p), 15)); }
FT_INLINE F lanes(const HighNibble* p) { return to_float(shift_right(bytes_of((const uint8_t*)p), 4)); }
FT_INLINE F lanes(const E8m0* p) { return power_of(bytes_of((const uint8_t*)p)); }
#if defined(FT_AVX512)
FT_INLINE F lanes(const E4m3* p) { return e4m3_of(_mm_loadu_si128((const __m128i*)p)); }
#else
FT_INLINE F lanes(const E4m3* p) { return byte_e4m3(bytes_of((const uint8_t*)p)); }
#endif

// One number for COLUMNS elements: gate and up [w][H / COLUMNS], down [w / COLUMNS][H].
template <class T, int COLUMNS>
struct Part {
  const T* of[3] = {};
  int64_t blocks, hidden;
  int rows;  // matrices that have rows

  template <class Other>
  FT_INLINE_MEMBER Part<Other, COLUMNS> as() const {  // the same bytes read as another type
    return {{(const Other*)of[0], (const Other*)of[1], (const Other*)of[2]}, blocks, hidden, rows};
  }
  void open(Streams& s, const Shape& g) {
    blocks = g.h / COLUMNS;
    hidden = g.h;
    rows = g.matrices < 2 ? g.matrices : 2;
    for (int m = 0; m < g.matrices; m++) of[m] = (const T*)s.next(g.w * blocks * sizeof(T));
  }
  FT_INLINE_MEMBER const T* row(int m, int i, int64_t k) const { return of[m] + i * blocks + (uint64_t)k / COLUMNS; }
  FT_INLINE_MEMBER const T* down(int i, int64_t h) const { return of[2] + i / COLUMNS * hidden + h; }
  FT_INLINE_MEMBER void near(int i) const {
    for (int m = 0; m < rows; m++) near(m, i);
  }
  FT_INLINE_MEMBER void near(int m, int i) const { prefetch_near(row(m, i, 0), blocks * sizeof(T)); }
  FT_INLINE_MEMBER void warm(int i) const {
    prefetch_near(of[2] + i * hidden / COLUMNS, hidden * sizeof(T) / COLUMNS);
  }
};

// One float32 for all of a matrix.
struct Whole {
  float of[3];
  void open(Streams& s, const Shape& g) {
    if (const uint8_t* p = s.next(g.matrices * 4)) memcpy(of, p, g.matrices * 4);
  }
  void near(int) const {}
  void near(int, int) const {}
  void warm(int) const {}
};

struct RowAt {
  int m, i;
  int64_t k;
  template <class T, int C>
  FT_INLINE_MEMBER float operator()(const Part<T, C>& p) const { return number(*p.row(m, i, k)); }
  FT_INLINE_MEMBER float operator()(const Whole& p) const { return p.of[m]; }
};

struct DownAt {
  int i;
  int64_t h;
  template <class T, int C>
  FT_INLINE_MEMBER F operator()(const Part<T, C>& p) const { return lanes(p.down(i, h)); }
  FT_INLINE_MEMBER F operator()(const Whole& p) const { return set1(p.of[2]); }
};

template <class Each, class... Parts>
FT_INLINE void each_of(Each each, Parts&... parts) {
  (each(parts), ...);
}
#define FT_PARTS(...)                                                                              \
  template <class Each>                                                                            \
  void parts(Each each) { each_of(each, __VA_ARGS__); }                                            \
  template <class Each>                                                                            \
  FT_INLINE_MEMBER void parts(Each each) const { each_of(each, __VA_ARGS__); }

// --- codes ----------------------------------------------------------------------------------------

template <int BITS>
struct Plane {
  static constexpr int DIGITS = 16 / BITS, LINE = 32 * DIGITS, COLUMNS = 2 * DIGITS;
  const uint8_t* of[3];
  int64_t row_bytes, hidden;

  void open(Streams& s, const Shape& g) {
    hidden = g.h;
    row_bytes = line_bytes(g.h, BITS);
    for (int m = 0; m < g.matrices; m++) of[m] = s.next(m < 2 ? g.w * row_bytes : g.w * g.h * BITS / 8);
  }
  FT_INLINE_MEMBER const uint8_t* line(int m, int i, int64_t k) const {
    return of[m] + i * row_bytes + (uint64_t)k / LINE * 64;
  }
  FT_INLINE_MEMBER const uint8_t* column(int i, int64_t h) const {
    return of[2] + ((int64_t)(i / COLUMNS) * hidden + h) * 4;
  }
  // W codes at element k, or of column i at h, in the low bits.
  FT_INLINE_MEMBER I row(int m, int i, int64_t k, int v) const {
    return shift_right(words_of(line(m, i, k) + 2 * v * W), BITS * (int)((uint64_t)k / 32 % DIGITS));
  }
  FT_INLINE_MEMBER I down(int i, int64_t h) const {
    return shift_right(dwords_of(column(i, h)), i % 2 * 16 + i % COLUMNS / 2 * BITS);
  }
};
template <>
struct Plane<0> {
  static constexpr int DIGITS = 1, LINE = 32, COLUMNS = 2;
  void open(Streams&, const Shape&) {}
  FT_INLINE_MEMBER const uint8_t* line(int, int, int64_t) const { return nullptr; }
  FT_INLINE_MEMBER const uint8_t* column(int, int64_t) const { return nullptr; }
  FT_INLINE_MEMBER I row(int, int, int64_t, int) const { return I(); }
  FT_INLINE_MEMBER I down(int, int64_t) const { return I(); }
};

template <int LOW_, int HIGH_ = 0, int ZERO = 0>
struct Integers {
  static constexpr int LOW = LOW_, HIGH = HIGH_;
  static constexpr bool OFFSET = false;
  static constexpr float number(int code) { return (float)(code - ZERO); }
  FT_INLINE F value(I codes) {
    const F v = to_float(masked(codes, (1 << (LOW + HIGH)) - 1));
    return ZERO ? sub(v, set1((float)ZERO)) : v;
  }
};

struct E2m1 {
  static constexpr int LOW = 4, HIGH = 0;
  static constexpr bool OFFSET = false;
  static constexpr float number(int code) {
    constexpr float magnitudes[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
  }
  FT_INLINE F value(I codes) { return nibble_e2m1(codes); }
};

// --- a tile ---------------------------------------------------------------------------------------

template <class Spec>
struct Blocks : Spec {
  static constexpr int LOW = Spec::LOW, HIGH = Spec::HIGH, SPAN = Spec::SPAN;
  static constexpr int COLUMN_BITS = LOW, GROUP = Plane<LOW>::COLUMNS;
  Plane<LOW> low;
  Plane<HIGH> high;

  Blocks(const Shape& shape, const uint8_t* bytes) { size(shape, bytes); }
  uint64_t size(const Shape& shape, const uint8_t* bytes) {
    Streams s{bytes};
    low.open(s, shape);
    high.open(s, shape);
    Spec::parts([&](auto& part) { part.open(s, shape); });
    return s.at;
  }
  FT_INLINE_MEMBER void near(int i) const {
    Spec::parts([&](auto& part) { part.near(i); });
  }
  FT_INLINE_MEMBER void near(int m, int i) const {
    Spec::parts([&](auto& part) { part.near(m, i); });
  }
  FT_INLINE_MEMBER void warm(int i) const {
    Spec::parts([&](auto& part) { part.warm(i); });
  }
  const uint8_t* codes_down() const { return low.of[2]; }

  FT_INLINE_MEMBER F value(I codes, I more) const {
    if (HIGH) codes = either(masked(codes, (1 << LOW) - 1), shift_left(more, LOW));
    return Spec::value(codes);
  }
  template <class At>
  FT_INLINE_MEMBER F weight(F value, At at) const {
    if constexpr (Spec::OFFSET) return fma(value, all(Spec::step(at)), all(Spec::offset(at)));
    else return mul(value, all(Spec::step(at)));
  }
  FT_INLINE_MEMBER void row(int m, int i, int64_t k, F (&w)[V]) const {
    if (k % Plane<LOW>::LINE == 0) FT_PREFETCH(low.line(m, i, k) + AHEAD);
    if (HIGH && k % Plane<HIGH>::LINE == 0) FT_PREFETCH(high.line(m, i, k) + AHEAD);
    for (int b = 0; b < STEP / SPAN; b++)
      for (int v = b * SPAN / W; v < (b + 1) * SPAN / W; v++)
        w[v] = weight(value(low.row(m, i, k, v), high.row(m, i, k, v)), RowAt{m, i, k + b * SPAN});
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    for (int v = 0; v < V; v++)
      w[v] = weight(value(low.down(i, h + v * W), high.down(i, h + v * W)), DownAt{i, h + v * W});
  }

 private:
#if defined(FT_AVX512) || defined(FT_AVX2) || defined(FT_NEON)
  FT_INLINE F all(float v) { return set1(v); }
#endif
  FT_INLINE F all(F v) { return v; }
};

}  // namespace FT_NS

#include "paired.h"
#include "digits_of.h"

namespace FT_NS {

// Sums of the middle lie in room for sixteen of them.
template <class Spec, int COLUMNS, int ROWS>
static uint64_t block_bytes(uint32_t w, uint32_t h) {
  if (w % COLUMNS || h % ROWS || (Spec::OFFSET && w > 16 * Spec::SPAN)) return 0;
  const Shape shape(w, h, 3);
  return Blocks<Spec>(shape, nullptr).size(shape, nullptr);
}

}  // namespace FT_NS

#define FT_BLOCKS(name, Spec, columns, rows) \
  FT_CODED(name, Coded<Blocks<Spec>>, Paired<Spec>, (block_bytes<Spec, columns, rows>))
