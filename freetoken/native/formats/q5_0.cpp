// Q5_0: five-bit codes, a float16 step for 32 elements: weight = d (code - 16).
#include "../blocks.h"

namespace FT_NS {

struct Q5_0 : Integers<4, 1, 16> {
  static constexpr int SPAN = 32;
  Part<Half, 32> d;
  FT_PARTS(d)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d);
  }
};

}  // namespace FT_NS

FT_BLOCKS(q5_0, Q5_0, 32, 32)
