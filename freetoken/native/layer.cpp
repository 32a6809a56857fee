// The small operations of a layer (layer.h): cut into pieces, handed to threads where that pays.
#include "layer.h"

#include <memory>

#include "isa.h"
#include "matrix_api.h"
#include "ops.h"
#include "pieces.h"

using namespace ft;

namespace {

constexpr int64_t WORTH = 64 << 10;  // bytes of work below which waking threads costs more than it saves

// CALL(index, memory) for each index.
template <class Call>
struct Each : Pieces {
  Each(int64_t n, size_t scratch_floats, const Call& c) : Pieces(n, scratch_floats * sizeof(float)), call(c) {}
  void piece(int64_t index, uint8_t* memory) override { call(index, (float*)memory); }
  const Call& call;
};

template <class Call>
void for_each(int64_t count, int64_t scratch_floats, int64_t num_bytes, const Call& call) {
  Each<Call>(count, (size_t)scratch_floats, call).run(num_bytes < WORTH);
}

int64_t size_of(int dtype) { return dtype == FT_F32 ? 4 : 2; }

}  // namespace

extern "C" {

int64_t ft_program_run(int tier, const ft_step* steps, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (steps[i].run(tier, steps[i].job) != FT_OK) return i;
  return -1;
}

int ft_product_run(int tier, const ft_product* j) {
  return ft_linear(tier, j->dtype, j->x, j->norm, j->eps, j->w, j->bias, j->residual, j->y, j->rows, j->n, j->k);
}

int ft_coded_product_run(int tier, const ft_coded_product* j) {
  return ft_coded_linear(tier, j->format, j->dtype, j->x, j->w, j->bias, j->y, j->rows, j->n, j->k);
}

int ft_experts_run(int, const ft_experts* job) {
  return ft_executor_layer(job->executor, job->moe, job->deadline_ms);
}

int ft_gate_act_mul(int tier, const ft_act_mul* job) {
  const TierOps& ops = *tier_at(tier)->ops;
  for_each(job->rows, 0, job->rows * job->width * 8, [&](int64_t row, float*) { ops.act_mul(*job, row); });
  return FT_OK;
}

int ft_gate_sigmoid_mul(int tier, const ft_sigmoid_mul* job) {
  const TierOps& ops = *tier_at(tier)->ops;
  const int64_t count = job->rows * job->heads;
  for_each(count, 0, count * job->dim * 8,
           [&](int64_t i, float*) { ops.sigmoid_mul(*job, i / job->heads, i % job->heads); });
  return FT_OK;
}

int ft_gate_add_routed(int tier, const ft_add_routed* job) {
  const TierOps& ops = *tier_at(tier)->ops;
  for_each(job->rows, 0, job->rows * job->width * 8, [&](int64_t row, float*) { ops.add_routed(*job, row); });
  return FT_OK;
}

int ft_gate_widen(int tier, const ft_widen* job) {
  const TierKernels& kernels = *tier_at(tier);
  for_each(job->rows, 0, job->rows * job->width * 2, [&](int64_t row, float*) {
    kernels.widen(job->x, job->dtype, row * job->width, job->width, job->y + row * job->width);
  });
  return FT_OK;
}

int ft_norm_rows(int tier, const ft_norm* job) {
  const TierOps& ops = *tier_at(tier)->ops;
  for_each(job->rows, 0, job->rows * job->width * 8, [&](int64_t row, float*) { ops.norm(*job, row); });
  return FT_OK;
}

int ft_rope_store(int tier, const ft_rope* job) {
  const int64_t room = job->table_width * job->page_size;
  for (int64_t row = 0; row < job->rows; row++)
    if (job->positions[row] < 0 || job->positions[row] >= job->num_positions ||
        (job->live[row] && job->positions[row] >= room))
      return FT_FAILED;
  const TierOps& ops = *tier_at(tier)->ops;
  const int64_t num_bytes = job->rows * (job->num + 2 * job->num_kv) * job->dim * 8;
  for_each(job->rows, rope_scratch(*job), num_bytes, [&](int64_t row, float* scratch) { ops.rope(*job, row, scratch); });
  return FT_OK;
}

int ft_attend_decode(int tier, const ft_attend* job) {
  const TierOps& ops = *tier_at(tier)->ops;
  const int64_t heads = job->seqs * job->num_kv;
  for (int64_t s = 0; s < job->seqs; s++)
    if (job->context[s] > job->table_width * job->page_size) return FT_FAILED;
  std::vector<int64_t> starts(1, 0);  // of each (sequence, key head), in parts
  int64_t keys = 0;
  for (int64_t s = 0; s < job->seqs; s++) {
    const int64_t count = job->context[s] > 0 ? job->context[s] - first_key(*job, s) : 0;
    keys += count;
    for (int h = 0; h < job->num_kv; h++) starts.push_back(starts.back() + (count + FT_KEYS - 1) / FT_KEYS);
  }
  const int64_t floats = part_floats(*job), num_bytes = 2 * keys * job->num_kv * job->dim * size_of(job->dtype);
  const std::unique_ptr<float[]> parts(new float[(size_t)(starts.back() * floats + 1)]);
  for_each(starts.back(), attend_scratch(*job), num_bytes, [&](int64_t index, float* scratch) {
    const int64_t head = std::upper_bound(starts.begin(), starts.end(), index) - starts.begin() - 1;
    ops.attend(*job, head / job->num_kv, (int)(head % job->num_kv), index - starts[head],
               parts.get() + index * floats, scratch);
  });
  for_each(heads, 0, starts.back() * floats * 4, [&](int64_t head, float*) {
    ops.merge(*job, head / job->num_kv, (int)(head % job->num_kv), parts.get() + starts[head] * floats,
              starts[head + 1] - starts[head]);
  });
  return FT_OK;
}

int ft_delta_decode(int tier, const ft_delta* job) {
  const TierOps& ops = *tier_at(tier)->ops;
  const int64_t num_bytes = job->rows * job->v_heads * job->k_dim * job->v_dim * 8;
  for_each(job->rows * job->k_heads, delta_scratch(*job), num_bytes, [&](int64_t index, float* scratch) {
    ops.delta(*job, index / job->k_heads, (int)(index % job->k_heads), scratch);
  });
  return FT_OK;
}

int ft_route_rows(int tier, const ft_route* job) {
  const TierKernels& kernels = *tier_at(tier);
  const int64_t rows = job->rows, hidden = job->hidden, experts = job->experts;
  const std::unique_ptr<float[]> memory(new float[(size_t)(rows * (hidden + experts))]);
  float *wide = memory.get(), *logits = wide + rows * hidden;
  const ft_norm norm{job->h, job->norm, job->x, rows, hidden, job->eps, job->dtype};
  for_each(rows, 0, rows * hidden * 8, [&](int64_t row, float*) {
    kernels.ops->norm(norm, row);
    kernels.widen(job->x, job->dtype, row * hidden, hidden, wide + row * hidden);
  });
  const LinearJob product{wide, job->weight, nullptr, nullptr, logits, rows, experts, hidden, FT_F32};
  Linear(kernels, product).run(experts * hidden * 4 < WORTH);
  for_each(rows, 0, rows * experts * job->top_k, [&](int64_t row, float*) { kernels.ops->route(*job, logits, row); });
  return FT_OK;
}

}  // extern "C"
