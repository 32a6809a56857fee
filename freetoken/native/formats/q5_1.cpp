// Q5_1: five-bit codes, a float16 step and offset for 32 elements: weight = d code + m.
#include "../blocks.h"

namespace FT_NS {

struct Q5_1 : Integers<4, 1> {
  static constexpr int SPAN = 32;
  static constexpr bool OFFSET = true;
  Part<Half, 32> d, m;
  FT_PARTS(d, m)
  template <class At>
  FT_INLINE_MEMBER auto step(At at) const {
    return at(d);
  }
  template <class At>
  FT_INLINE_MEMBER auto offset(At at) const {
    return at(m);
  }
};

}  // namespace FT_NS

FT_BLOCKS(q5_1, Q5_1, 32, 32)
