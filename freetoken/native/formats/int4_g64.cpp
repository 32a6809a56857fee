// Four-bit integers, a scale for 64 elements.
#include "../int4.h"

FT_BLOCKS(int4_g64, Int4<64>, 64, 64)
