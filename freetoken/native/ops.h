// How a tier computes the jobs of layer.h: `row`, `part` and `head` name the pieces that threads take, and a
// piece's result depends on the job alone. Included by tiers: no C++ standard header here.
#pragma once
#include <stdint.h>

#include "layer.h"

constexpr int FT_KEYS = 256;  // keys of one part of attention
inline int64_t first_key(const ft_attend& j, int64_t seq) {
  const int64_t length = j.context[seq];
  return j.window > 0 && length > j.window ? length - j.window : 0;
}
// Floats of one part: the peaks and the sums of a group's heads, then their values.
inline int64_t part_floats(const ft_attend& j) { return (int64_t)(j.num / j.num_kv) * (j.dim + 2); }

struct TierOps {
  void (*norm)(const ft_norm&, int64_t row);
  void (*rope)(const ft_rope&, int64_t row, float* scratch);  // 2 dim floats
  void (*attend)(const ft_attend&, int64_t seq, int kv_head, int64_t part, float* out, float* scratch);
  void (*merge)(const ft_attend&, int64_t seq, int kv_head, const float* parts, int64_t count);
  void (*delta)(const ft_delta&, int64_t row, int k_head, float* scratch);
  void (*act_mul)(const ft_act_mul&, int64_t row);
  void (*sigmoid_mul)(const ft_sigmoid_mul&, int64_t row, int64_t head);
  void (*add_routed)(const ft_add_routed&, int64_t row);
  void (*route)(const ft_route&, float* logits, int64_t row);  // logits [rows, experts] are overwritten
};
inline int64_t rope_scratch(const ft_rope& j) { return 2ll * j.dim + 64; }
inline int64_t attend_scratch(const ft_attend& j) {
  return (int64_t)(j.num / j.num_kv) * (j.dim + 64 + FT_KEYS) + 2 * j.dim + 128;
}
inline int64_t delta_scratch(const ft_delta& j) { return 2ll * j.k_dim + 3ll * j.v_dim + 256; }
