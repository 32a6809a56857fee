// Q2_K: two-bit codes; nibbles as scale and minimum for 16 elements, two float16 factors for 256:
// weight = d low code - dmin high.
#include "../blocks.h"

namespace FT_NS {

struct Q2K : Integers<2> {
  static constexpr int SPAN = 16;
  static constexpr bool OFFSET = true;
  Part<LowNibble, 16> scales;
  Part<Half, 256> d, dmin;
  FT_PARTS(scales, d, dmin)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d) * at(scales);
  }
  template <class At>
  FT_INLINE_MEMBER auto offset(At at) const {
    return -at(dmin) * at(scales.as<HighNibble>());
  }
};

}  // namespace FT_NS

FT_BLOCKS(q2_k, Q2K, 256, 256)
