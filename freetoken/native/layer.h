/* The small operations of a layer, called through ctypes by native/ops.py: norm, rotation and page writes, attention
 * of one token, the recurrent step, the choice of experts. What each means is the contract in kernels/<op>.
 * Strides count elements; dtype is ft_dtype; nothing is kept beyond the call. Results don't depend on threads.
 * Each returns FT_OK, or FT_FAILED without having written if a position lies beyond its table. */
#ifndef FREETOKEN_LAYER_H
#define FREETOKEN_LAYER_H

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y [rows, width] = x rsqrt(mean(x^2) + eps) weight, in x's type. */
typedef struct ft_norm {
  const void* x;
  const float* weight;
  void* y;
  int64_t rows, width;
  float eps;
  int32_t dtype;
} ft_norm;

/* kernels/rope_store. */
typedef struct ft_rope {
  const void* qkv;
  void* out;
  void* pages;
  const float* q_norm; /* null: not normed */
  const float* k_norm;
  const float* cos;
  const float* sin;
  const int64_t* positions;
  const int64_t* seq_of;
  const int64_t* page_table;
  const uint8_t* live;
  int64_t rows, qkv_stride, page_stride, table_width, num_positions;
  int32_t dtype, num, num_kv, dim, half, page_size, gated;
  float eps;
} ft_rope;

/* kernels/attention: attend_decode. */
typedef struct ft_attend {
  const void* q;
  const void* pages;
  void* out;
  const int64_t* page_table;
  const int32_t* context;
  const float* sinks; /* null: none */
  int64_t seqs, page_stride, table_width;
  int32_t dtype, num, num_kv, dim, page_size, window; /* window 0: all keys */
  float scale;
  int32_t reserved;
} ft_attend;

/* kernels/delta_decode, activation SiLU. */
typedef struct ft_delta {
  const void* qkv;
  const void* z;
  const void* b;
  const void* a;
  void* conv;
  void* out;
  float* delta;
  const float* conv_weight;
  const float* decay;
  const float* dt_bias;
  const float* norm;
  const int64_t* state_ids;
  const uint8_t* fresh;
  int64_t rows, input_stride, conv_stride, delta_stride;
  int32_t dtype, taps, k_heads, k_dim, v_heads, v_dim;
  float eps;
  int32_t reserved;
} ft_delta;

/* kernels/router. */
typedef struct ft_route {
  const void* h;
  const float* norm;
  const float* weight;
  const uint8_t* live;
  void* x;
  int32_t* ids;
  float* weights;
  int64_t rows, hidden, experts;
  int32_t dtype, top_k, normalise;
  float eps;
} ft_route;

FT_API int ft_norm_rows(int tier, const ft_norm*);
FT_API int ft_rope_store(int tier, const ft_rope*);
FT_API int ft_attend_decode(int tier, const ft_attend*);
FT_API int ft_delta_decode(int tier, const ft_delta*);
FT_API int ft_route_rows(int tier, const ft_route*);

#ifdef __cplusplus
}
#endif
#endif
