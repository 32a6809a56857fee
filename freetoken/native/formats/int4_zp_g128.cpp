// Four-bit integers, a scale and a zero for 128 elements.
#include "../int4.h"

FT_BLOCKS(int4_zp_g128, Int4Zeros<128>, 128, 128)
