/* Dense products with a matrix in a weight format's codes, through ctypes by native/library.py. */
#ifndef FREETOKEN_MATRIX_API_H
#define FREETOKEN_MATRIX_API_H

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a coded matrix: the streams of a tile of one matrix (coded.h); 0 if the library can't multiply with it. */
FT_API uint64_t ft_matrix_bytes(int format, int64_t rows, int64_t columns);
/* y [rows, n] = x [rows, k] W^T + bias, x, bias (may be null) and y of dtype; sums in float32, one rounding.
 * With int8 activations: the number of formats + 1 added to `format`. A row's bits don't depend on the others, but for
 * amx, where it counts whether there are 8; nor on threads. */
FT_API int ft_coded_linear(int tier, int format, int dtype, const void* x, const void* w, const void* bias, void* y,
                           int64_t rows, int64_t n, int64_t k);
/* Most rows that ft_coded_linear takes: 32, or any number. */
FT_API int64_t ft_coded_rows(int tier, int format, int dtype);
/* y float [last - first, k] = rows [first, last) of a coded W [n, k]. */
FT_API int ft_coded_numbers(int tier, int format, const void* w, float* y, int64_t n, int64_t k, int64_t first,
                            int64_t last);

#ifdef __cplusplus
}
#endif
#endif
