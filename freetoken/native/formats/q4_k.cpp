// Q4_K: four-bit codes; a six-bit scale and minimum for 32 elements, two float16 factors for 256:
// weight = d sc code - dmin mn. The six-bit numbers lie in bytes of their own.
#include "../blocks.h"

namespace FT_NS {

struct Q4K : Integers<4> {
  static constexpr int SPAN = 32;
  static constexpr bool OFFSET = true;
  Part<uint8_t, 32> sc, mn;
  Part<Half, 256> d, dmin;
  FT_PARTS(sc, mn, d, dmin)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(sc);
  }
  template <class At>
  FT_INLINE_MEMBER auto offset(At at) const {
    return -at(dmin) * at(mn);
  }
};

}  // namespace FT_NS

FT_BLOCKS(q4_k, Q4K, 256, 256)
