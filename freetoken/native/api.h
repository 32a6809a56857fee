/* The C surface of the native library, called through ctypes by native/library.py. No torch, no CUDA.
 *
 * Pointers are host addresses. Nothing here keeps a pointer beyond the call, except ft_executor_new, which
 * copies the layers but not the records that they point to. One pool of workers serves the process; a
 * call that finds it busy computes alone, with the same bits. */
#ifndef FREETOKEN_API_H
#define FREETOKEN_API_H

#include <stdint.h>

#include "abi.h"

#if defined(_WIN32)
#define FT_API __declspec(dllexport)
#else
#define FT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FT_API_VERSION 6

enum ft_activation { FT_SWIGLU = 0, FT_GELU = 1, FT_GELU_TANH = 2, FT_RELU = 3 };

/* How the records of one MoE layer lie, and what they compute. The mirror is native/library.py. */
typedef struct ft_layer {
  uint32_t format; /* index into ft_formats() */
  uint32_t activation;
  uint32_t hidden;     /* H */
  uint32_t tile_width; /* columns of I in a tile */
  uint32_t num_tiles;
  uint32_t num_experts;
  uint64_t tile_bytes;
  uint64_t tiles_offset;
  uint64_t record_bytes;
  uint64_t records; /* address of expert 0's record, for items without a source; 0 = none */
  float alpha;      /* FT_SWIGLU: g' sigmoid(alpha g') u', g' = min(g, limit), */
  float limit;      /*            u' = clamp(u, -limit, limit) + up_offset     */
  float up_offset;
  /* In a tile: float32 [2, tile_width], biases of gate and up; then the record begins with float32 [H],
   * the bias of down, added once to the sum that holds tile 0. 0 = no biases. */
  uint32_t bias_offset;
} ft_layer;

typedef struct ft_executor ft_executor;

FT_API int ft_api_version(void);
FT_API const char* ft_tiers(void);   /* tiers that this CPU runs, the default last, space-separated */
FT_API const char* ft_formats(void); /* weight formats by index, space-separated */
/* Bytes of a tile as this library reads it; 0 if the shape can't be. */
FT_API uint64_t ft_tile_bytes(int format, uint32_t tile_width, uint32_t hidden);

/* Set the pool to `threads` threads, the caller being one; cpus restricts the others (num_cpus 0: not). */
FT_API int ft_pool_start(int threads, const int* cpus, int num_cpus);
/* At most so many of them work from now on; a start forgets it. Results are the same. */
FT_API void ft_pool_limit(int threads);
FT_API int ft_pool_threads(void);
/* Fault hook: worker `worker` (0 = the caller) takes percent/100 times as long, then stalls once. */
FT_API void ft_pool_fault(int worker, int percent, int stall_ms);

FT_API ft_executor* ft_executor_new(int tier, const ft_layer* layers, int num_layers);
/* Answer the request in io (see abi.h) into out. Returns ft_status; FT_FAILED after deadline_ms without an
 * end, and as long as a worker of that request still runs. */
FT_API int ft_executor_serve(ft_executor*, const ft_io* io, float* out, uint32_t deadline_ms);
/* All routed experts of one layer for tokens in host memory: y [tokens, H] = the routes' outputs times their
 * weights, added in ascending order of the expert. ids ascend within a token; -1 routes nowhere. */
typedef struct ft_moe {
  const void* x; /* [tokens, H] of x_dtype */
  const int32_t* ids; /* [tokens, top_k] */
  const float* weights;
  float* y;
  uint32_t layer, x_dtype, tokens, top_k;
  uint32_t visited; /* written: distinct experts */
  uint32_t reserved;
} ft_moe;
FT_API int ft_executor_layer(ft_executor*, ft_moe*, uint32_t deadline_ms);
FT_API void ft_executor_free(ft_executor*);

/* A block that a device writes and a thread of ours watches (poller.h); offsets in bytes from `data`. */
typedef struct ft_device_block {
  uint8_t* data;
  uint64_t items_offset, ids_offset, x_offset, out_offset;
  uint32_t hidden, x_dtype, max_rows, top_k, num_experts, deadline_ms;
} ft_device_block;
typedef struct ft_poller ft_poller;
FT_API ft_poller* ft_poller_new(ft_executor*, const ft_device_block* block);
FT_API void ft_poller_wake(ft_poller*);          /* a step is about to be launched: spin for its requests */
FT_API void ft_poller_rest(ft_poller*, int all); /* a step, or all of them, are over */
FT_API void ft_poller_free(ft_poller*); /* before the executor and the block */

/* y [rows, n] = residual + (rms_norm(x) [rows, k] w[n, k]^T + bias), rounded before and after the residual is added;
 * all of dtype (ft_dtype) but norm, sums in float32. norm, bias and residual may be null. */
FT_API int ft_linear(int tier, int dtype, const void* x, const float* norm, float eps, const void* w,
                     const void* bias, const void* residual, void* y, int64_t rows, int64_t n, int64_t k);

/* Read num_bytes with all threads; the returned sum keeps the reads alive. */
FT_API uint64_t ft_read(int tier, const void* data, uint64_t num_bytes);
/* Do nothing on all threads `count` times: what one dispatch costs. */
FT_API int ft_pool_ping(int count);
/* --- loading: single-threaded, the caller brings the threads --- */

/* CRC-32 as zlib's, continued from crc (0 to begin). */
FT_API uint32_t ft_crc32(uint32_t crc, const void* data, uint64_t num_bytes);
/* dst[c][r] = src[r][c] for items of 1, 2 or 4 bytes; steps are bytes from row to row. */
FT_API int ft_transpose(int item_bytes, const void* src, uint64_t src_step, void* dst, uint64_t dst_step,
                        int64_t rows, int64_t columns);
/* Uncoded gate, up [I, H] and down [H, I] into tiles; shape is H, I, tile width, bytes from tile to tile. */
FT_API int ft_pack_plain(int item_bytes, const void* gate, const void* up, const void* down, void* tiles,
                         const uint64_t shape[4]);

/* Ask for huge pages under [data, data + num_bytes). Returns 0 if the system agreed. */
FT_API int ft_advise_huge(void* data, uint64_t num_bytes);
/* Spread what will be touched first in [data, data + num_bytes) over memory nodes by turns. Returns 0 if the system
 * agreed. */
FT_API int ft_interleave(void* data, uint64_t num_bytes, const int* nodes, int num_nodes);
/* Gather what lies in [data, data + num_bytes) in huge pages now. Returns 0 if all of it does. */
FT_API int ft_collapse(void* data, uint64_t num_bytes);
/* Have memory under [data, data + num_bytes) now; what is in use stays as it is. Returns 0 if all is there. */
FT_API int ft_populate(void* data, uint64_t num_bytes);

#ifdef __cplusplus
}
#endif
#endif
