// FP8 e4m3 with one float32 scale for each 128 x 128 block of a matrix. A tile's columns lie in one block, or
// in whole ones; the scales of a block that several tiles share are in each of them.
#include "../fp8.h"

namespace FT_NS {

struct Squares {
  static constexpr int SIDE = 128;
  const float* of[3];  // [blocks of w][blocks of H]
  int64_t blocks;

  static bool fits(uint32_t w) { return w > SIDE ? w % SIDE == 0 : SIDE % w == 0; }
  void open(Streams& s, const Shape& g) {
    blocks = (g.h + SIDE - 1) / SIDE;
    for (int m = 0; m < g.matrices; m++) of[m] = (const float*)s.next((g.w + SIDE - 1) / SIDE * blocks * 4);
  }
  FT_INLINE_MEMBER float row(int m, int i, int64_t k) const { return of[m][i / SIDE * blocks + k / SIDE]; }
  FT_INLINE_MEMBER F down(int i, int64_t h) const { return set1(row(2, i, h)); }
};

}  // namespace FT_NS

FT_CODED(fp8_block, Coded<Fp8<Squares>>, Fp8Pairs<Squares>, fp8_bytes<Squares>)
