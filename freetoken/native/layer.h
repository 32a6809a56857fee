/* The small operations of a layer, called through ctypes by native/ops.py: norm, rotation and page writes, attention
 * of one token, the recurrent step, the choice of experts, products and gates. What each means is the contract in kernels/<op>.
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

/* kernels/linear, with a norm before and a residual after: ft_linear's arguments. */
typedef struct ft_product {
  const void* x;
  const float* norm;
  const void* w;
  const void* bias;
  const void* residual;
  void* y;
  int64_t rows, n, k;
  float eps;
  int32_t dtype;
} ft_product;

/* kernels/coded_linear. */
typedef struct ft_coded_product {
  const void* x;
  const void* w;
  const void* bias;
  void* y;
  int64_t rows, n, k;
  int32_t format, dtype;
} ft_coded_product;

/* ft_executor_layer as a job; the tier is the executor's own. */
typedef struct ft_experts {
  ft_executor* executor;
  ft_moe* moe;
  uint32_t deadline_ms, reserved;
} ft_experts;

/* kernels/gating: act_mul, sigmoid_mul, add_routed, widen. */
typedef struct ft_act_mul {
  const void* gate;
  const void* up;
  void* y;
  int64_t rows, width, gate_stride, up_stride;
  int32_t dtype, activation; /* ft_activation */
} ft_act_mul;
typedef struct ft_sigmoid_mul {
  const void* x;
  const void* gate;
  void* y; /* [rows, heads, dim] */
  int64_t rows, heads, dim, x_row, x_head, gate_row, gate_head;
  int32_t dtype, reserved;
} ft_sigmoid_mul;
typedef struct ft_add_routed {
  const void* h;
  const float* routed;
  const void* shared; /* null: none */
  const void* gate;
  void* y;
  int64_t rows, width, gate_row;
  int32_t dtype, reserved;
} ft_add_routed;
typedef struct ft_widen {
  const void* x;
  float* y;
  int64_t rows, width;
  int32_t dtype, reserved;
} ft_widen;

/* A decode step as a list of jobs that is run again and again: the same calls without their callers. */
typedef struct ft_step {
  int (*run)(int tier, const void* job);
  const void* job;
} ft_step;
/* Run jobs one after the other. Returns -1, or the index of the first that failed. */
FT_API int64_t ft_program_run(int tier, const ft_step* steps, int64_t count);

FT_API int ft_product_run(int tier, const ft_product*);
FT_API int ft_coded_product_run(int tier, const ft_coded_product*);
FT_API int ft_experts_run(int tier, const ft_experts*);
FT_API int ft_gate_act_mul(int tier, const ft_act_mul*);
FT_API int ft_gate_sigmoid_mul(int tier, const ft_sigmoid_mul*);
FT_API int ft_gate_add_routed(int tier, const ft_add_routed*);
FT_API int ft_gate_widen(int tier, const ft_widen*);
FT_API int ft_norm_rows(int tier, const ft_norm*);
FT_API int ft_rope_store(int tier, const ft_rope*);
FT_API int ft_attend_decode(int tier, const ft_attend*);
FT_API int ft_delta_decode(int tier, const ft_delta*);
FT_API int ft_route_rows(int tier, const ft_route*);

#ifdef __cplusplus
}
#endif
#endif
