// Four-bit integers, a scale and a zero for 64 elements.
#include "../int4.h"

FT_BLOCKS(int4_zp_g64, Int4Zeros<64>, 64, 64)
