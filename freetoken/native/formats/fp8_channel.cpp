// FP8 e4m3 with one float32 scale for each row of a matrix; down's are in every tile.
#include "../fp8.h"

namespace FT_NS {

struct Rows {
  const float* of[3];  // gate and up [w], down [H]

  static bool fits(uint32_t) { return true; }
  void open(Streams& s, const Shape& g) {
    for (int m = 0; m < g.matrices; m++) of[m] = (const float*)s.next((m < 2 ? g.w : g.h) * 4);
  }
  FT_INLINE_MEMBER float row(int m, int i, int64_t) const { return of[m][i]; }
  FT_INLINE_MEMBER F down(int, int64_t h) const { return load(of[2] + h); }
};

}  // namespace FT_NS

FT_CODED(fp8_channel, Coded<Fp8<Rows>>, Fp8Pairs<Rows>, fp8_bytes<Rows>)
