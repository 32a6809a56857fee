// A tier's norm, rotation, attention, recurrent step and choice of experts (ops.h): rows of a few hundred
// numbers, in float32, rounded where the contracts of kernels/ say.
#include "ops.h"

#include "activation.h"
#include "engine.h"

extern "C" float log1pf(float);
extern "C" float sqrtf(float);

namespace FT_NS {

FT_INLINE F from_any(const void* p, int dtype, int64_t at) {
  if (dtype == FT_BF16) return from_bf16((const uint16_t*)p + at);
  if (dtype == FT_F16) return from_f16((const uint16_t*)p + at);
  return load((const float*)p + at);
}
FT_INLINE float one_of(const void* p, int dtype, int64_t at) {
  if (dtype == FT_BF16) return bf16_to_float(((const uint16_t*)p)[at]);
  if (dtype == FT_F16) return f16_to_float(((const uint16_t*)p)[at]);
  return ((const float*)p)[at];
}
FT_INLINE void put_one(void* p, int dtype, int64_t at, float v) {
  if (dtype == FT_BF16) ((uint16_t*)p)[at] = float_to_bf16(v);
  else if (dtype == FT_F16) ((uint16_t*)p)[at] = float_to_f16(v);
  else ((float*)p)[at] = v;
}
// W numbers, rounded as put_one does.
#if defined(FT_AVX512)
FT_INLINE void narrow_bf16(F v, uint16_t* to) {
  const I top = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(v)), 16);
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(top));
}
FT_INLINE void narrow_f16(F v, uint16_t* to) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(v, 8)); }
#elif defined(FT_AVX2)
FT_INLINE void narrow_bf16(F v, uint16_t* to) {
  const I top = _mm256_srli_epi32(_mm256_castps_si256(round_bf16(v)), 16);
  _mm_storeu_si128((__m128i*)to, _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1)));
}
FT_INLINE void narrow_f16(F v, uint16_t* to) { _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(v, 8)); }
#elif defined(FT_NEON)
FT_INLINE void narrow_bf16(F v, uint16_t* to) { vst1_u16(to, vshrn_n_u32(bits_of(round_bf16(v)), 16)); }
FT_INLINE void narrow_f16(F v, uint16_t* to) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
#else
FT_INLINE void narrow_bf16(F v, uint16_t* to) { *to = float_to_bf16(v); }
FT_INLINE void narrow_f16(F v, uint16_t* to) { *to = float_to_f16(v); }
#endif
FT_INLINE F rounded(F v, int dtype) {
  return dtype == FT_BF16 ? round_bf16(v) : dtype == FT_F16 ? round_f16(v) : v;
}
static void put(void* p, int dtype, int64_t at, const float* from, int64_t n) {
  if (dtype == FT_F32) {
    memcpy((float*)p + at, from, n * sizeof(float));
    return;
  }
  uint16_t* to = (uint16_t*)p + at;
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const F v = load(from + i);
    if (dtype == FT_F16) narrow_f16(v, to + i);
    else narrow_bf16(v, to + i);
  }
  for (; i < n; i++) put_one(p, dtype, at + i, from[i]);
}
FT_INLINE float sum_of_squares(const float* x, int64_t n) {
  F acc = zero();
  int64_t i = 0;
  for (; i + W <= n; i += W) acc = fma(load(x + i), load(x + i), acc);
  float rest = 0;
  for (; i < n; i++) rest += x[i] * x[i];
  return sum(acc) + rest;
}
FT_INLINE float scalar_exp(float x) {
  float lanes[W];
  store(lanes, exp(set1(x)));
  return lanes[0];
}
FT_INLINE float scalar_sigmoid(float x) { return 1.0f / (1.0f + scalar_exp(-x)); }

// --- norm -----------------------------------------------------------------------------------------

static void norm(const ft_norm& j, int64_t row) {
  const int64_t at = row * j.width;
  F acc = zero();
  int64_t i = 0;
  for (; i + W <= j.width; i += W) {
    F v = from_any(j.x, j.dtype, at + i);
    acc = fma(v, v, acc);
  }
  float rest = 0;
  for (int64_t k = i; k < j.width; k++) rest += one_of(j.x, j.dtype, at + k) * one_of(j.x, j.dtype, at + k);
  const float scale = 1.0f / sqrtf((sum(acc) + rest) / (float)j.width + j.eps);
  float lanes[W];
  for (i = 0; i + W <= j.width; i += W) {
    store(lanes, mul(mul(from_any(j.x, j.dtype, at + i), set1(scale)), load(j.weight + i)));
    put(j.y, j.dtype, at + i, lanes, W);
  }
  for (; i < j.width; i++) put_one(j.y, j.dtype, at + i, one_of(j.x, j.dtype, at + i) * scale * j.weight[i]);
}

// --- rotation and page writes -----------------------------------------------------------------------

// One head: normed, rounded, turned, rounded by the store.
static void turn(const ft_rope& j, int64_t from, const float* weight, const float* cos, const float* sin, void* to,
                 int64_t at, float* x) {
  float* y = x + j.dim;
  widen(j.qkv, j.dtype, from, j.dim, x);
  if (weight) {
    const float scale = 1.0f / sqrtf(sum_of_squares(x, j.dim) / (float)j.dim + j.eps);
    for (int d = 0; d < j.dim; d++) x[d] = x[d] * scale * weight[d];
    put(y, j.dtype, 0, x, j.dim);
    widen(y, j.dtype, 0, j.dim, x);
  }
  memcpy(y, x, j.dim * sizeof(float));
  for (int d = 0; d < j.half; d++) {
    y[d] = x[d] * cos[d] - x[d + j.half] * sin[d];
    y[d + j.half] = x[d + j.half] * cos[d] + x[d] * sin[d];
  }
  put(to, j.dtype, at, y, j.dim);
}

static void rope(const ft_rope& j, int64_t row, float* scratch) {
  const int64_t position = j.positions[row], dim = j.dim;
  const float *cos = j.cos + position * j.half, *sin = j.sin + position * j.half;
  int64_t from = row * j.qkv_stride;
  for (int n = 0; n < j.num; n++, from += dim * (1 + j.gated))
    turn(j, from, j.q_norm, cos, sin, j.out, (row * j.num + n) * dim, scratch);
  const int64_t page = j.live[row] ? j.page_table[j.seq_of[row] * j.table_width + position / j.page_size] : 0;
  const int64_t slot = page * j.page_stride + position % j.page_size * j.num_kv * dim;
  const int64_t value_at = slot + (int64_t)j.page_size * j.num_kv * dim, size = j.dtype == FT_F32 ? 4 : 2;
  for (int n = 0; n < j.num_kv; n++, from += dim) turn(j, from, j.k_norm, cos, sin, j.pages, slot + n * dim, scratch);
  memcpy((char*)j.pages + value_at * size, (const char*)j.qkv + from * size, j.num_kv * dim * size);
}

// --- attention of one token -------------------------------------------------------------------------

constexpr int KEYS_AHEAD = 8;

// scores[g][k] = q[g] . key for R heads; key is padded with zeros, as q is.
template <int R>
FT_INLINE void dots(const float* key, const float* q, int64_t stride, int padded, float* scores) {
  F acc[R];
  for (int g = 0; g < R; g++) acc[g] = zero();
  for (int d = 0; d < padded; d += W) {
    const F k = load(key + d);
    for (int g = 0; g < R; g++) acc[g] = fma(k, load(q + g * stride + d), acc[g]);
  }
  for (int g = 0; g < R; g++) scores[g * FT_KEYS] = sum(acc[g]);
}

// totals[g][d..d+n) = sum over keys of scores[g][k] value[k][d..d+n), for R heads and n <= 2 W columns.
template <class T, F (*Convert)(const T*), int R>
FT_INLINE void weigh(const T* const* values, const float* scores, int count, int d, int n, int dim, float* totals) {
  F acc[R][2];
  for (int g = 0; g < R; g++) acc[g][0] = acc[g][1] = zero();
  for (int k = 0; k < count; k++) {
    const T* p = values[k] + d;
    const F low = n >= W ? Convert(p) : load_some<T, Convert>(p, n);
    const F high = n >= 2 * W ? Convert(p + W) : n > W ? load_some<T, Convert>(p + W, n - W) : zero();
    for (int g = 0; g < R; g++) {
      const F weight = set1(scores[g * FT_KEYS + k]);
      acc[g][0] = fma(weight, low, acc[g][0]);
      acc[g][1] = fma(weight, high, acc[g][1]);
    }
  }
  for (int g = 0; g < R; g++)
    for (int v = 0; v < 2; v++) {
      float lanes[W];
      store(lanes, acc[g][v]);
      for (int i = 0; i < W && v * W + i < n; i++) totals[g * dim + d + v * W + i] = lanes[i];
    }
}

#if defined(FT_AVX512) || defined(FT_NEON)  // 32 registers
constexpr int HEADS = 8;
#else
constexpr int HEADS = 4;
#endif
// CALL(R) for runs of heads g.. of a group.
#define FT_HEAD_GROUPS(group, CALL)                                      \
  for (int g = 0; g < (group);) {                                        \
    const int left = (group) - g;                                        \
    if (HEADS >= 8 && left >= 8) { CALL(HEADS); g += HEADS; }            \
    else if (left >= 4) { CALL(4); g += 4; }                             \
    else if (left >= 2) { CALL(2); g += 2; }                             \
    else { CALL(1); g += 1; }                                            \
  }

template <class T, F (*Convert)(const T*)>
static void attend_keys(const ft_attend& j, int64_t seq, int kv_head, int64_t part, float* out, float* scratch) {
  const int group = j.num / j.num_kv, dim = j.dim, padded = (int)ft_align(dim, 16);
  const int64_t length = j.context[seq], first = first_key(j, seq) + part * FT_KEYS;
  const int count = (int)(first + FT_KEYS < length ? FT_KEYS : length - first);
  float *q = scratch, *key = q + (int64_t)group * padded, *scores = key + padded;
  for (int g = 0; g < group; g++) {
    float* to = q + (int64_t)g * padded;
    widen(j.q, j.dtype, (seq * j.num + kv_head * group + g) * dim, dim, to);
    for (int d = 0; d < dim; d++) to[d] *= j.scale;
    for (int d = dim; d < padded; d++) to[d] = 0;
  }
  for (int d = dim; d < padded; d++) key[d] = 0;
  const T* rows[FT_KEYS];
  const int64_t step = (int64_t)j.num_kv * dim, values = step * j.page_size;
  const int64_t* table = j.page_table + seq * j.table_width;
  for (int k = 0; k < count;) {
    const int64_t slot = (first + k) % j.page_size;
    const T* p = (const T*)j.pages + table[(first + k) / j.page_size] * j.page_stride + slot * step + kv_head * dim;
    for (int64_t s = slot; s < j.page_size && k < count; s++, p += step) rows[k++] = p;
  }
  for (int k = 0; k < count; k++) {
    if (k + KEYS_AHEAD < count) prefetch_near(rows[k + KEYS_AHEAD], dim * (int64_t)sizeof(T));
    widen(rows[k], j.dtype, 0, dim, key);
#define FT_CALL(R) dots<R>(key, q + (int64_t)g * padded, padded, padded, scores + g * FT_KEYS + k)
    FT_HEAD_GROUPS(group, FT_CALL)
#undef FT_CALL
    rows[k] += values;
  }
  float *peaks = out, *sums = out + group, *totals = out + 2 * group;
  for (int g = 0; g < group; g++) {
    float* s = scores + g * FT_KEYS;
    float peak = s[0], total = 0;
    for (int k = 1; k < count; k++) peak = s[k] > peak ? s[k] : peak;
    for (int k = count; k % W; k++) s[k] = peak;
    for (int k = 0; k < count; k += W) store(s + k, exp(sub(load(s + k), set1(peak))));
    for (int k = 0; k < count; k++) total += s[k];
    peaks[g] = peak, sums[g] = total;
  }
  for (int d = 0; d < dim; d += 2 * W) {
    const int n = dim - d < 2 * W ? dim - d : 2 * W;
#define FT_CALL(R) weigh<T, Convert, R>(rows, scores + g * FT_KEYS, count, d, n, dim, totals + (int64_t)g * dim)
    FT_HEAD_GROUPS(group, FT_CALL)
#undef FT_CALL
  }
}

static void attend(const ft_attend& j, int64_t seq, int kv_head, int64_t part, float* out, float* scratch) {
  if (j.dtype == FT_BF16) attend_keys<uint16_t, from_bf16>(j, seq, kv_head, part, out, scratch);
  else if (j.dtype == FT_F16) attend_keys<uint16_t, from_f16>(j, seq, kv_head, part, out, scratch);
  else attend_keys<float, from_f32>(j, seq, kv_head, part, out, scratch);
}

// Parts in ascending order; no parts give zeros.
static void merge(const ft_attend& j, int64_t seq, int kv_head, const float* parts, int64_t count) {
  const int group = j.num / j.num_kv, dim = j.dim;
  const int64_t stride = part_floats(j);
  for (int g = 0; g < group; g++) {
    const int head = kv_head * group + g;
    const int64_t at = (seq * j.num + head) * dim;
    float peak = -3.0e38f, total = 0;
    for (int64_t p = 0; p < count; p++) peak = parts[p * stride + g] > peak ? parts[p * stride + g] : peak;
    if (count && j.sinks) {
      peak = j.sinks[head] > peak ? j.sinks[head] : peak;
      total = scalar_exp(j.sinks[head] - peak);
    }
    for (int64_t p = 0; p < count; p++)
      total += scalar_exp(parts[p * stride + g] - peak) * parts[p * stride + group + g];
    for (int d = 0; d < dim; d += 64) {
      const int n = dim - d < 64 ? dim - d : 64;
      float value[64] = {0};
      for (int64_t p = 0; p < count; p++) {
        const float share = scalar_exp(parts[p * stride + g] - peak) / total;
        const float* one = parts + p * stride + 2 * group + g * dim + d;
        for (int i = 0; i < n; i++) value[i] += share * one[i];
      }
      put(j.out, j.dtype, at + d, value, n);
    }
  }
}

// --- gated delta rule, one token --------------------------------------------------------------------

// Channels [first, first + n): convolve, apply SiLU, move the window on.
static void convolve(const ft_delta& j, int64_t row, int64_t first, int n, float* out) {
  const int64_t channels = 2ll * j.k_heads * j.k_dim + (int64_t)j.v_heads * j.v_dim, unit = j.state_ids[row];
  const int past = j.taps - 1;
  const bool fresh = j.fresh[row];
  for (int c = 0; c < n; c++) {
    const int64_t channel = first + c, at = unit * j.conv_stride + channel * past;
    float total = 0, rounded_x;
    for (int t = 0; t < past; t++) {
      const float seen = fresh ? 0.0f : one_of(j.conv, j.dtype, at + t);
      total = t ? total + seen * j.conv_weight[t * channels + channel] : seen * j.conv_weight[channel];
      if (t) put_one(j.conv, j.dtype, at + t - 1, seen);
    }
    rounded_x = one_of(j.qkv, j.dtype, row * j.input_stride + channel);
    total += rounded_x * j.conv_weight[past * channels + channel];
    if (past) put_one(j.conv, j.dtype, at + past - 1, rounded_x);
    out[c] = total;
  }
  for (int c = n; c % W; c++) out[c] = 0;
  for (int c = 0; c < n; c += W) store(out + c, mul(load(out + c), sigmoid(load(out + c))));
}

static void normalise(float* x, int n, float factor) {
  const float scale = 1.0f / sqrtf(sum_of_squares(x, n) + 1e-6f) * factor;
  for (int i = 0; i < n; i++) x[i] *= scale;
}

// held = k S after S has decayed; columns of S [k_dim, n] in runs of W, the rest one by one.
static void read_state(float* s, float decay, const float* k, int k_dim, int n, float* held) {
  int c = 0;
  for (; c + W <= n; c += W) {
    F acc = zero();
    for (int r = 0; r < k_dim; r++) {
      const F v = mul(load(s + (int64_t)r * n + c), set1(decay));
      store(s + (int64_t)r * n + c, v);
      acc = fma(set1(k[r]), v, acc);
    }
    store(held + c, acc);
  }
  for (; c < n; c++) {
    held[c] = 0;
    for (int r = 0; r < k_dim; r++) held[c] += k[r] * (s[(int64_t)r * n + c] *= decay);
  }
}

// S += k v, then out = q S.
static void write_state(float* s, const float* q, const float* k, const float* v, int k_dim, int n, float* out) {
  int c = 0;
  for (; c + W <= n; c += W) {
    const F change = load(v + c);
    F acc = zero();
    for (int r = 0; r < k_dim; r++) {
      const F held = fma(set1(k[r]), change, load(s + (int64_t)r * n + c));
      store(s + (int64_t)r * n + c, held);
      acc = fma(set1(q[r]), held, acc);
    }
    store(out + c, acc);
  }
  for (; c < n; c++) {
    out[c] = 0;
    for (int r = 0; r < k_dim; r++) out[c] += q[r] * (s[(int64_t)r * n + c] += k[r] * v[c]);
  }
}

static void delta(const ft_delta& j, int64_t row, int k_head, float* scratch) {
  const int64_t padded_k = ft_align(j.k_dim, 16), padded_v = ft_align(j.v_dim, 16);
  float *q = scratch, *k = q + padded_k, *v = k + padded_k, *held = v + padded_v, *mixed = held + padded_v;
  const int64_t keys = (int64_t)j.k_heads * j.k_dim;
  convolve(j, row, (int64_t)k_head * j.k_dim, j.k_dim, q);
  convolve(j, row, keys + (int64_t)k_head * j.k_dim, j.k_dim, k);
  normalise(q, j.k_dim, 1.0f / sqrtf((float)j.k_dim));
  normalise(k, j.k_dim, 1.0f);
  const int per_key = j.v_heads / j.k_heads, n = j.v_dim;
  for (int head = k_head * per_key; head < (k_head + 1) * per_key; head++) {
    convolve(j, row, 2 * keys + (int64_t)head * n, n, v);
    const float step = one_of(j.a, j.dtype, row * j.input_stride + head) + j.dt_bias[head];
    const float soft = (step > 0 ? step : 0.0f) + log1pf(scalar_exp(step > 0 ? -step : step));
    const float decay = j.fresh[row] ? 0.0f : scalar_exp(j.decay[head] * soft);
    const float beta = scalar_sigmoid(one_of(j.b, j.dtype, row * j.input_stride + head));
    float* state = j.delta + j.state_ids[row] * j.delta_stride + (int64_t)head * j.k_dim * n;
    if (j.fresh[row]) memset(state, 0, (int64_t)j.k_dim * n * sizeof(float));
    read_state(state, decay, k, j.k_dim, n, held);
    for (int i = 0; i < n; i++) v[i] = (v[i] - held[i]) * beta;
    write_state(state, q, k, v, j.k_dim, n, mixed);
    const float scale = 1.0f / sqrtf(sum_of_squares(mixed, n) / (float)n + j.eps);
    for (int i = 0; i < n; i++) {
      const float z = one_of(j.z, j.dtype, row * j.input_stride + (int64_t)head * n + i);
      held[i] = z * scalar_sigmoid(z);
      put_one(j.out, j.dtype, (row * j.v_heads + head) * n + i, mixed[i] * scale * j.norm[i] * held[i]);
    }
  }
}

// --- gates between products -------------------------------------------------------------------------

constexpr int RUN = 256;  // numbers that one pass keeps on the stack
// CALL(at, n) for runs of [0, width).
#define FT_RUNS(width, CALL)                                \
  for (int64_t at = 0; at < (width); at += RUN) {           \
    const int n = (width) - at < RUN ? (int)((width) - at) : RUN; \
    CALL                                                    \
  }
// n numbers as floats, zeros up to whole vectors.
FT_INLINE void fetch(const void* p, int dtype, int64_t at, int n, float* to) {
  widen(p, dtype, at, n, to);
  for (int i = n; i % W; i++) to[i] = 0;
}

static void act_mul(const ft_act_mul& j, int64_t row) {
  ft_layer kind{};
  kind.activation = (uint32_t)j.activation, kind.alpha = 1.0f, kind.limit = __builtin_inff();
  float g[RUN], u[RUN];
  FT_RUNS(j.width, {
    fetch(j.gate, j.dtype, row * j.gate_stride + at, n, g);
    fetch(j.up, j.dtype, row * j.up_stride + at, n, u);
    activate(kind, j.dtype, g, u, (int)ft_align(n, W));
    put(j.y, j.dtype, row * j.width + at, g, n);
  })
}

static void sigmoid_mul(const ft_sigmoid_mul& j, int64_t row, int64_t head) {
  float x[RUN], g[RUN];
  FT_RUNS(j.dim, {
    fetch(j.x, j.dtype, row * j.x_row + head * j.x_head + at, n, x);
    fetch(j.gate, j.dtype, row * j.gate_row + head * j.gate_head + at, n, g);
    for (int i = 0; i < n; i += W) store(x + i, mul(load(x + i), sigmoid(load(g + i))));
    put(j.y, j.dtype, (row * j.heads + head) * j.dim + at, x, n);
  })
}

static void add_routed(const ft_add_routed& j, int64_t row) {
  const F share = set1(j.shared ? scalar_sigmoid(one_of(j.gate, j.dtype, row * j.gate_row)) : 0.0f);
  float sum[RUN], other[RUN];
  FT_RUNS(j.width, {
    const int64_t place = row * j.width + at;
    fetch(j.routed, FT_F32, place, n, sum);
    if (j.shared) {
      fetch(j.shared, j.dtype, place, n, other);
      for (int i = 0; i < n; i += W) store(sum + i, add(load(sum + i), mul(load(other + i), share)));
    }
    fetch(j.h, j.dtype, place, n, other);
    for (int i = 0; i < n; i += W) store(sum + i, add(rounded(load(sum + i), j.dtype), load(other + i)));
    put(j.y, j.dtype, place, sum, n);
  })
}

// --- the choice of experts --------------------------------------------------------------------------

static void route(const ft_route& j, float* logits, int64_t row) {
  float* p = logits + row * j.experts;
  int32_t* ids = j.ids + row * j.top_k;
  float* weights = j.weights + row * j.top_k;
  if (!j.live[row]) {
    for (int k = 0; k < j.top_k; k++) ids[k] = -1, weights[k] = 0;
    return;
  }
  float peak = p[0], total = 0;
  for (int64_t e = 1; e < j.experts; e++) peak = p[e] > peak ? p[e] : peak;
  int64_t e = 0;
  for (; e + W <= j.experts; e += W) store(p + e, exp(sub(load(p + e), set1(peak))));
  for (; e < j.experts; e++) p[e] = scalar_exp(p[e] - peak);
  for (e = 0; e < j.experts; e++) total += p[e];
  for (e = 0; e < j.experts; e++) p[e] /= total;
  for (int k = 0; k < j.top_k; k++) {  // ascending ids within the row; ties go to the lowest
    int64_t best = -1;
    for (e = 0; e < j.experts; e++)
      if (p[e] >= 0 && (best < 0 || p[e] > p[best])) best = e;
    if (best < 0) best = k;  // logits that are not numbers: anything, the sampler reports them
    int at = k;
    for (; at > 0 && ids[at - 1] > best; at--) ids[at] = ids[at - 1], weights[at] = weights[at - 1];
    ids[at] = (int32_t)best, weights[at] = p[best];
    p[best] = -1.0f;
  }
  float chosen = 0;
  for (int k = 0; k < j.top_k; k++) chosen += weights[k];
  if (j.normalise)
    for (int k = 0; k < j.top_k; k++) weights[k] /= chosen;
}

extern const TierOps ops;
const TierOps ops = {norm, rope, attend, merge, delta, act_mul, sigmoid_mul, add_routed, route};

}  // namespace FT_NS
