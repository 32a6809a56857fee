// Q8_0 by floats.
#include "../q8_0.h"

namespace FT_NS {

static void q8_0_run(const TileJob& job) { run_tiles<Coded<Q8_0>>(job); }

extern const TileFormat format_q8_0;
const TileFormat format_q8_0 = {"q8_0", q8_0_run, q8_0_bytes, matrix_bytes<Q8_0>, run_matrix<Coded<Q8_0>>,
                                matrix_numbers<Q8_0>, FT_WEIGHTS(Q8_0)};

}  // namespace FT_NS
