// FP8 e4m3 with one float32 scale for a whole matrix.
#include "../fp8.h"

namespace FT_NS {

struct One : Whole {
  static bool fits(uint32_t) { return true; }
  FT_INLINE_MEMBER float row(int m, int, int64_t) const { return of[m]; }
  FT_INLINE_MEMBER F down(int, int64_t) const { return set1(of[2]); }
};

}  // namespace FT_NS

FT_CODED(fp8_tensor, Coded<Fp8<One>>, Fp8Pairs<One>, fp8_bytes<One>)
