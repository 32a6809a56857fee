// A format's DigitCodes, from its Spec (blocks.h).
#pragma once
#include "digits.h"
#include "paired.h"

#if defined(FT_BF16_DOT)

namespace FT_NS {

template <class Spec>
struct Digits {
  static constexpr int SPAN = Spec::SPAN;
  static constexpr float lowest() {
    float low = 0;
    for (int i = 0; i < 16; i++) low = Spec::number(i) < low ? Spec::number(i) : low;
    return low;
  }
  static constexpr float unit() {
    for (int i = 0; i < 16; i++)
      if (Spec::number(i) != (float)(int)Spec::number(i)) return 0.5f;
    return 1;
  }
  static constexpr int LEAST = (int)(-lowest() / unit());
  static constexpr int level(int code) { return (int)(Spec::number(code) / unit()) + LEAST; }
  static constexpr int highest() {
    int out = 0;
    for (int i = 0; i < 16; i++) out = level(i) > out ? level(i) : out;
    return out;
  }
  static constexpr bool looked_up() {
    for (int i = 0; i < 16; i++)
      if (level(i) != i) return true;
    return false;
  }

  static void rows(const ft_layer& l, const uint8_t* bytes, int m, int first, int last, float* steps, float* offsets) {
    const Blocks<Spec> tile(Shape(l), bytes);
    const int64_t hidden = l.hidden;
    for (int i = first; i < last; i++) {
      tile.near(m, i + SCALES_AHEAD);
      for (int64_t k = 0; k < hidden; k += 512, steps += DIGIT_STEPS) {
        F in_order[SPANS / 16];
        for (int v = 0; v < SPANS / 16; v++) in_order[v] = sixteen(tile, m, i, k + v * 16 * SPAN, offsets);
        for (int n = 0; n < DIGIT_STEPS / 16; n++)
          store(steps + 16 * n, SPANS == 16 ? _mm512_permutexvar_ps(lanes_of(n), in_order[0])
                                            : _mm512_permutex2var_ps(in_order[0], lanes_of(n), in_order[SPANS / 16 - 1]));
      }
    }
  }
  static constexpr int SPANS = 512 / SPAN;
  // Steps of sixteen spans in order; their offsets are stored.
  FT_INLINE F sixteen(const Blocks<Spec>& tile, int m, int i, int64_t k, float*& offsets) {
    const int64_t left = tile.low.hidden - k;
    const SpanAt<SPAN, 16> at{m, i, k, left};
    if constexpr (Spec::OFFSET) {
      store(offsets, left > 0 ? tile.offset(at) : zero());
      offsets += 16;
    }
    return left > 0 ? tile.step(at) : zero();
  }
  // The spans that half n of words' bytes has in a sum's lanes (digits.cpp: place_x).
  FT_INLINE I lanes_of(int n) {
    if constexpr (SPAN == 32) {
      return _mm512_add_epi32(_mm512_setr_epi32(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14), _mm512_set1_epi32(n));
    } else {
      const I spans = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
      return _mm512_add_epi32(spans, _mm512_set1_epi32(2 * n));
    }
  }
  static void lanes(const ft_layer& l, const uint8_t* bytes, int i, int h, int n, float* steps, float* offsets) {
    const Blocks<Spec> tile(Shape(l), bytes);
    for (int at = 0; at < n; at += W) {
      const DownAt where{i, h + at};
      store(steps + at, tile.step(where));
      if constexpr (Spec::OFFSET) store(offsets + at, tile.offset(where));
    }
  }
  static void meet(const ft_layer& l, const uint8_t* bytes, int first) {
    const Blocks<Spec> tile(Shape(l), bytes);
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(0, first + i);
  }
  static constexpr DigitCodes codes() {
    DigitCodes out{SPAN, LEAST, unit(), looked_up(), Spec::OFFSET, {}, rows, lanes, meet};
    for (int i = 0; i < 16; i++) out.levels[i] = (uint8_t)level(i);
    return out;
  }
};

template <class Spec>
static constexpr DigitCodes DIGITS = Digits<Spec>::codes();

template <class Spec>
struct DigitsOf<Paired<Spec>> {
  static constexpr const DigitCodes* codes() {
    if constexpr (Spec::LOW == 4 && Spec::HIGH == 0) {
      return Digits<Spec>::highest() <= MOST_LEVEL ? &DIGITS<Spec> : nullptr;
    } else {
      return nullptr;
    }
  }
};

}  // namespace FT_NS

#endif
