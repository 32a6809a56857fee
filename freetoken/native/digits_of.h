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
      if (m == 1) tile.warm(i);
      for (int64_t k = 0; k < hidden; k += 256) {
        const SpanAt<SPAN> at{m, i, k, hidden - k};
        const F all = SpanAt<SPAN>::N::whole(tile.step(at));
        const F scaled = unit() == 1 ? all : mul(all, set1(unit()));
        if constexpr (SPAN == 32) {
          store(steps, _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 2, 2, 1, 1, 3, 3, 4, 4, 6, 6, 5, 5, 7, 7), scaled));
        } else {
          const I lanes = _mm512_setr_epi32(0, 0, 4, 4, 0, 0, 4, 4, 1, 1, 5, 5, 1, 1, 5, 5);
          for (int v = 0; v < 4; v++)
            store(steps + 16 * v, _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(v / 2 * 8 + v % 2 * 2)), scaled));
        }
        steps += digit_steps(SPAN);
        if constexpr (Spec::OFFSET) {
          store(offsets, SpanAt<SPAN>::N::whole(tile.offset(at)));
          offsets += 16;
        }
      }
    }
  }
  static void lanes(const ft_layer& l, const uint8_t* bytes, int i, int h, int n, float* steps, float* offsets) {
    const Blocks<Spec> tile(Shape(l), bytes);
    for (int at = 0; at < n; at += W) {
      const DownAt where{i, h + at};
      store(steps + at, unit() == 1 ? tile.step(where) : mul(tile.step(where), set1(unit())));
      if constexpr (Spec::OFFSET) store(offsets + at, tile.offset(where));
    }
  }
  static void meet(const ft_layer& l, const uint8_t* bytes) {
    const Blocks<Spec> tile(Shape(l), bytes);
    for (int i = 0; i < SCALES_AHEAD; i++) tile.near(0, i);
  }
  static constexpr DigitCodes codes() {
    DigitCodes out{SPAN, LEAST, looked_up(), Spec::OFFSET, {}, rows, lanes, meet};
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
