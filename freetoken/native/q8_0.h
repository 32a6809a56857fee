// Q8_0: signed bytes, one float16 scale for 32 elements along the summed dimension. Bytes lie as they come:
// rows [w][H], down [w][H]; scales [w][H / 32] and [w / 32][H].
#pragma once
#include "blocks.h"

namespace FT_NS {

struct Q8_0 {
  static constexpr int COLUMN_BITS = 8, GROUP = 1;
  const uint8_t* codes[3];
  Part<Half, 32> scale;
  int64_t hidden;

  Q8_0(const Shape& shape, const uint8_t* tile) { size(shape, tile); }
  uint64_t size(const Shape& shape, const uint8_t* tile) {
    Streams s{tile};
    hidden = shape.h;
    for (int m = 0; m < shape.matrices; m++) codes[m] = s.next(shape.w * hidden);
    scale.open(s, shape);
    return s.at;
  }
  FT_INLINE_MEMBER void near(int i) const { scale.near(i); }
  FT_INLINE_MEMBER void near(int m, int i) const { scale.near(m, i); }
  FT_INLINE_MEMBER void warm(int i) const { scale.warm(i); }
  const uint8_t* codes_down() const { return codes[2]; }

  FT_INLINE_MEMBER void row(int m, int i, int64_t k, F (&w)[V]) const {
    const int8_t* p = (const int8_t*)codes[m] + i * hidden + k;
    if (k % 64 == 0) FT_PREFETCH(p + AHEAD);
    const F s = set1(number(*scale.row(m, i, k)));
    for (int v = 0; v < V; v++) w[v] = mul(from_i8(p + v * W), s);
  }
  FT_INLINE_MEMBER void down(int i, int64_t h, F (&w)[V]) const {
    const int8_t* p = (const int8_t*)codes[2] + i * hidden + h;
    for (int v = 0; v < V; v++) w[v] = mul(from_i8(p + v * W), lanes(scale.down(i, h + v * W)));
  }
};

static uint64_t q8_0_bytes(uint32_t w, uint32_t h) {
  const Shape shape(w, h, 3);
  return w % 32 || h % 32 ? 0 : Q8_0(shape, nullptr).size(shape, nullptr);
}

}  // namespace FT_NS
