// Q4_0: four-bit codes, a float16 step for 32 elements: weight = d (code - 8).
#include "../blocks.h"

namespace FT_NS {

struct Q4_0 : Integers<4, 0, 8> {
  static constexpr int SPAN = 32;
  Part<Half, 32> d;
  FT_PARTS(d)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d);
  }
};

}  // namespace FT_NS

FT_BLOCKS(q4_0, Q4_0, 32, 32)
