// Drives the library through its C surface, for runs under sanitisers. `stress TIER` computes with one tier: all
// formats as records and as matrices, with both kinds of activations, and a layer's operations. `stress pool` is about
// threads: how numbers are shared, two callers, limits, restarts, faults, poison, a device that rings; and about what
// loads weights. Without an argument it says what these are. Exits with 1 if an answer ever changes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "stress_memory.h"

#include "../../freetoken/native/layer.h"
#include "../../freetoken/native/matrix_api.h"
#include "../../freetoken/native/ranges.h"
#include "../../freetoken/native/unblock.h"

namespace {

std::vector<std::string> words(const char* text) {
  std::vector<std::string> out{""};
  for (; *text; text++) {
    if (*text == ' ') out.emplace_back();
    else out.back() += *text;
  }
  return out;
}

// --- weights in formats ---------------------------------------------------------------------------

void experts(int tier, int format, Shape shape, const std::vector<Some>& items, std::vector<int> dtypes) {
  const Layer layer(tier, format, shape);
  if (!layer.executor) return;
  for (int dtype : dtypes) {
    Request request(layer.l, items, dtype);
    alike("experts", request.out->memory, request.answer().size() * 4, [&] { return request.ask(layer.executor); });
  }
}

void matrices(int tier, int format, std::vector<int64_t> rows_of, int64_t n, int64_t k) {
  const uint64_t bytes = ft_matrix_bytes(format, n, k);
  if (!bytes) return;
  const Codes w(bytes, 16);
  for (int dtype : {FT_BF16, FT_F16, FT_F32})
    for (int64_t rows : rows_of) {
      if (rows > ft_coded_rows(tier, format, dtype)) continue;
      Numbers x(rows * k, dtype), bias(n, dtype), y(rows * n, dtype);
      const ft_coded_product job{x.memory, w.memory, bias.memory, y.memory, rows, n, k, format, dtype};
      alike("coded product", y.memory, rows * n * bytes_of(dtype), [&] { return ft_coded_product_run(tier, &job); });
    }
  Numbers decoded((n - 1) * k, FT_F32);
  if (ft_coded_numbers(tier, format, w.memory, decoded.floats(), n, k, 0, 0) != FT_OK) return;  // int8: no decoding
  alike("coded numbers", decoded.memory, (n - 1) * k * 4,
        [&] { return ft_coded_numbers(tier, format, w.memory, decoded.floats(), n, k, 1, n); });
}

// Shapes that some formats have, those of spans of 32 and those of 256; as many rows as any loop takes at once, and more.
void weights(int tier, int format) {
  const std::vector<int> all{FT_BF16, FT_F16, FT_F32};
  const std::vector<Some> few{{1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 0}, {7, 0}, {15, 0}, {1, 1}, {5, 2}};
  experts(tier, format, {40, 8, 3, 2, true}, {{1, 0}, {2, 0}, {7, 0}, {40, 0}, {150, 0}, {1, 1}, {5, 2}}, all);
  experts(tier, format, {96, 32, 3, 2}, few, all);
  experts(tier, format, {96, 32, 3, 2}, {{16, 0}, {40, 0}}, {FT_BF16});
  experts(tier, format, {544, 32, 2, 2}, {{1, 0}, {2, 0}, {4, 0}, {3, 1}}, {FT_BF16});
  experts(tier, format, {256, 256, 2, 2, true}, {{1, 0}, {2, 0}, {17, 0}, {5, 1}}, all);
  experts(tier, format, {768, 256, 1, 2}, {{1, 0}, {2, 0}, {4, 0}}, {FT_BF16});
  matrices(tier, format, {1, 2, 3, 6, 33}, 19, 96);
  matrices(tier, format, {1, 5, 33}, 18, 256);
}

// --- a layer's operations: outputs exactly as large as they must be ---------------------------------

void attention(int tier, int dtype, int64_t rows, int dim, int page) {
  const int heads = 6, kv = 2, half = dim / 2, width = 40 / page + 1;
  const int64_t stride = 2ll * page * kv * dim, pages = 1 + rows * width, columns = (heads * 2 + 2 * kv) * dim;
  Numbers qkv(rows * columns, dtype), cache(pages * stride, dtype), q(rows * heads * dim, dtype), out(rows * heads * dim, dtype);
  Numbers norm(dim, FT_F32, 1), cos(64 * half, FT_F32), sin(64 * half, FT_F32), sinks(heads, FT_F32);
  std::vector<int64_t> positions, seqs, table;
  std::vector<int32_t> context;
  for (int64_t r = 0; r < rows; r++) {
    positions.push_back(39 - r % 7), seqs.push_back(r), context.push_back(r % 3 == 2 ? 0 : (int32_t)(40 - r % 7));
    for (int p = 0; p < width; p++) table.push_back(1 + r * width + p);
  }
  const Words<int64_t> at(positions), of(seqs), pages_of(table);
  const Words<int32_t> seen(context);
  const Words<uint8_t> live(std::vector<uint8_t>(rows, 1));
  const ft_rope rope{qkv.memory, q.memory, cache.memory, norm.floats(), norm.floats(), cos.floats(), sin.floats(),
                     at.data(), of.data(), pages_of.data(), live.data(), rows, columns, stride, width, 64,
                     dtype, heads, kv, dim, half, page, 1, 1e-6f};
  alike("rope", q.memory, rows * heads * dim * bytes_of(dtype), [&] { return ft_rope_store(tier, &rope); });
  for (int window : {0, 5}) {
    const ft_attend attend{q.memory, cache.memory, out.memory, pages_of.data(), seen.data(), window ? sinks.floats() : nullptr,
                           rows, stride, width, dtype, heads, kv, dim, page, window, 0.25f, 0};
    alike("attend", out.memory, rows * heads * dim * bytes_of(dtype), [&] { return ft_attend_decode(tier, &attend); });
  }
}

void recurrent(int tier, int dtype, int64_t rows, int k_dim, int v_dim) {
  const int k_heads = 2, v_heads = 4, taps = 4;
  const int64_t channels = 2ll * k_heads * k_dim + v_heads * v_dim, columns = channels + v_heads * v_dim + 2 * v_heads;
  const int64_t conv_stride = channels * (taps - 1), state = (int64_t)v_heads * k_dim * v_dim;
  Numbers in(rows * columns, dtype), conv((rows + 1) * conv_stride, dtype), delta((rows + 1) * state, FT_F32);
  Numbers weight(taps * channels, FT_F32), decay(v_heads, FT_F32, -1), bias(v_heads, FT_F32), norm(v_dim, FT_F32, 1);
  Numbers out(rows * v_heads * v_dim, dtype);
  std::vector<int64_t> units;
  for (int64_t r = 0; r < rows; r++) units.push_back(r + 1);
  const Words<int64_t> ids(units);
  const Words<uint8_t> fresh(std::vector<uint8_t>(rows, 1));  // a step of its own each time
  auto part = [&](int64_t at) { return (const char*)in.memory + at * bytes_of(dtype); };
  const ft_delta job{part(0), part(channels), part(columns - 2 * v_heads), part(columns - v_heads), conv.memory, out.memory,
                     delta.floats(), weight.floats(), decay.floats(), bias.floats(), norm.floats(), ids.data(), fresh.data(),
                     rows, columns, conv_stride, state, dtype, taps, k_heads, k_dim, v_heads, v_dim, 1e-6f, 0};
  alike("delta", out.memory, rows * v_heads * v_dim * bytes_of(dtype), [&] { return ft_delta_decode(tier, &job); });
}

void rows_of(int tier, int dtype, int64_t rows, int64_t width) {
  const size_t size = rows * width * bytes_of(dtype);
  Numbers x(rows * width, dtype), other(rows * width, dtype), gate(rows * (2 * width + 1), dtype), y(rows * width, dtype);
  Numbers weight(width, FT_F32, 1), wide(rows * width, FT_F32), router(9 * width, FT_F32), shares(rows * 3, FT_F32);
  Words<int32_t> ids(std::vector<int32_t>(rows * 3));
  const Words<uint8_t> live(std::vector<uint8_t>(rows, 1));
  const char* second = (const char*)gate.memory + width * bytes_of(dtype);
  const ft_norm norm{x.memory, weight.floats(), y.memory, rows, width, 1e-6f, dtype};
  alike("norm", y.memory, size, [&] { return ft_norm_rows(tier, &norm); });
  for (int kind = FT_SWIGLU; kind <= FT_RELU; kind++) {
    const ft_act_mul act{gate.memory, second, y.memory, rows, width, 2 * width + 1, 2 * width + 1, dtype, kind};
    alike("act_mul", y.memory, size, [&] { return ft_gate_act_mul(tier, &act); });
  }
  const ft_sigmoid_mul sigmoid{x.memory, second, y.memory, rows, 1, width, width, width, 2 * width + 1, 0, dtype, 0};
  alike("sigmoid_mul", y.memory, size, [&] { return ft_gate_sigmoid_mul(tier, &sigmoid); });
  const ft_add_routed routed{x.memory, wide.floats(), other.memory, second, y.memory, rows, width, 2 * width + 1, dtype, 0};
  alike("add_routed", y.memory, size, [&] { return ft_gate_add_routed(tier, &routed); });
  const ft_route route{x.memory, weight.floats(), router.floats(), live.data(), y.memory, ids.data(), shares.floats(),
                       rows, width, 9, dtype, 3, 1, 1e-6f};
  alike("route", ids.memory, rows * 12, [&] { return ft_route_rows(tier, &route); });
  const ft_widen widen{x.memory, wide.floats(), rows, width, dtype, 0};
  alike("widen", wide.memory, rows * width * 4, [&] { return ft_gate_widen(tier, &widen); });
  const ft_step steps[] = {{(int (*)(int, const void*))ft_norm_rows, &norm},
                           {(int (*)(int, const void*))ft_gate_widen, &widen}};
  alike("program", wide.memory, rows * width * 4, [&] { return ft_program_run(tier, steps, 2) == -1 ? FT_OK : FT_FAILED; });
  Numbers w(37 * width, dtype), bias(37, dtype), residual(rows * 37, dtype), sums(rows * 37, dtype);
  const ft_product product{x.memory, weight.floats(), w.memory, bias.memory, residual.memory, sums.memory, rows, 37, width, 1e-6f, dtype};
  alike("product", sums.memory, rows * 37 * bytes_of(dtype), [&] { return ft_product_run(tier, &product); });
}

void operations(int tier) {
  for (int dtype : {FT_BF16, FT_F16, FT_F32})
    for (int64_t rows : {1, 3, 17}) {
      attention(tier, dtype, rows, 20, 4);
      attention(tier, dtype, rows, 64, 16);
      recurrent(tier, dtype, rows, 16, 24);
      recurrent(tier, dtype, rows, 9, 5);
      rows_of(tier, dtype, rows, 33);
      rows_of(tier, dtype, rows, 350);
    }
}

// Routes sorted by expert, computed in items, weighed.
void whole_layer(int tier, int format, uint32_t tokens) {
  constexpr uint32_t hidden = 256, top_k = 3;
  const Layer layer(tier, format, {hidden, 256, 2, 5});
  Numbers x(tokens * hidden, FT_BF16), weights(tokens * top_k, FT_F32), y(tokens * hidden, FT_F32);
  std::vector<int32_t> routes;
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t r = 0; r < top_k; r++) routes.push_back(t % 6 == 5 ? -1 : (int32_t)(t % 3 + r));
  const Words<int32_t> ids(routes);
  ft_moe moe{x.memory, ids.data(), weights.floats(), y.floats(), 0, FT_BF16, tokens, top_k, 0, 0};
  const ft_experts job{layer.executor, &moe, 60000, 0};
  alike("whole layer", y.memory, tokens * hidden * 4, [&] { return ft_experts_run(tier, &job); });
}

void one_tier(int tier) {
  const int formats = (int)words(ft_formats()).size();
  for (int f = 0; f <= 2 * formats; f++) weights(tier, f);  // from formats + 1 on with int8 activations
  operations(tier);
  for (uint32_t tokens : {1u, 20u}) whole_layer(tier, 0, tokens);
}

// --- threads --------------------------------------------------------------------------------------

// An expert that is cut into chunks, whose partials are added: of the first format, which is plain.
constexpr Shape LARGE{512, 128, 6, 3};
const std::vector<Some> WORK{{1, 0}, {2, 0}, {1, 4}, {6, 0}, {1, 0}};

void two_callers(int tier) {
  const Layer layer(tier, 0, LARGE);
  ft_pool_start(1, nullptr, 0);
  std::atomic<int> wrong{0}, working{2};
  auto serve = [&] {
    const Layer own(tier, 0, LARGE);
    Request request(own.l, WORK, FT_BF16);
    check(request.ask(own.executor) == FT_OK, "two callers");
    const std::vector<float> want = request.answer();
    for (int i = 0; i < 60; i++) wrong += request.ask(own.executor) != FT_OK || !same(request.answer(), want);
    working--;
  };
  auto multiply = [&] {
    const std::vector<uint16_t> w(300 * 256, 0x3F80), x(3 * 256, 0x3F80);
    for (int i = 0; i < 200; i++) {
      std::vector<uint16_t> y(3 * 300);
      ft_linear(tier, FT_BF16, x.data(), nullptr, 0, w.data(), nullptr, nullptr, y.data(), 3, 300, 256);
      for (uint16_t v : y) wrong += v != 0x4380;  // 256
    }
    working--;
  };
  std::thread one(serve), other(multiply), limits([&] {
    for (int i = 0; working; i++) ft_pool_limit(1 + i % 3), std::this_thread::yield();
  });
  for (int i = 0; working; i++) {
    ft_pool_start(2 + i % 3, nullptr, 0);
    ft_pool_ping(20);
  }
  one.join(), other.join(), limits.join();
  check(wrong == 0, "two callers at once");
  ft_pool_start(3, nullptr, 0);
  ft_pool_ping(1000);
  const Numbers plain(3000000, FT_BF16);
  ft_read(tier, plain.memory, 6000000);
}

// Whoever comes late, or is slow, every number is taken once.
void shares() {
  for (int round = 0; round < 60; round++)
    for (uint32_t count : {0u, 1u, 2u, 7u, 48u, 1000u}) {
      const int workers = 1 + round % 5;
      ft::Ranges left;
      left.deal(count, workers, 1 + round % workers);
      std::vector<std::atomic<int>> taken(count);
      std::vector<std::thread> threads;
      for (int worker = 0; worker < workers; worker++)
        threads.emplace_back([&, worker] {
          bool more;
          for (uint32_t number; left.take(worker, number, more); taken[number]++)
            if ((number + round) % 9 == 0) std::this_thread::yield();
        });
      for (auto& thread : threads) thread.join();
      for (auto& times : taken) check(times == 1, "each number once");
    }
}

void faults(int tier) {
  const Layer layer(tier, 0, LARGE);
  Request request(layer.l, WORK, FT_BF16);
  alike("faults", request.out->memory, request.answer().size() * 4, [&] { return request.ask(layer.executor); });
  const std::vector<float> want = request.answer();
  ft_pool_start(3, nullptr, 0);
  ft_pool_fault(1, 300, 20);
  for (int i = 0; i < 10; i++) check(request.ask(layer.executor) == FT_OK && same(request.answer(), want), "a slow worker");
  ft_pool_fault(1, 100, 400);
  int late = 0;
  for (int i = 0; i < 200 && !late; i++) late += request.ask(layer.executor, 50) == FT_FAILED;
  check(late == 1, "a stalled worker is an error in time");
  const std::vector<uint16_t> w(300 * 256, 0x3F80), x(256, 0x3F80);
  std::vector<uint16_t> y(300);
  ft_linear(tier, FT_BF16, x.data(), nullptr, 0, w.data(), nullptr, nullptr, y.data(), 1, 300, 256);  // meanwhile
  check(y[7] == 0x4380, "others compute without the pool");
  check(request.ask(layer.executor) == FT_OK && same(request.answer(), want), "after the stalled worker");

  auto* poison = (std::atomic<uint32_t>*)&request.io->poison.word;
  int served = 0, left = 0;
  for (int i = 0; i < 40; i++) {
    std::thread device([&] { std::this_thread::sleep_for(std::chrono::microseconds(100 * i)), poison->store(1); });
    const int status = request.ask(layer.executor);
    device.join();
    if (status == FT_OK) served++, check(same(request.answer(), want), "before the poison");
    else left += status == FT_POISONED;
    poison->store(0);
  }
  check(served + left == 40, "a poisoned block is left alone");
  check(request.ask(layer.executor) == FT_OK && same(request.answer(), want), "after the poison");
}

// A device that rings, as poller.h says.
void poller(int tier) {
  constexpr uint32_t E = 5, T = 4, K = 3, H = 512;
  const Layer layer(tier, 0, {H, 64, 4, E});
  const uint64_t items = 256, ids = 384, x = 448, out = x + T * H * 2;
  const Block memory(out + 2 * T * K * H * 4);
  uint8_t* data = memory.bytes();
  const Numbers numbers(T * H, FT_BF16);
  std::memcpy(data + x, numbers.memory, T * H * 2);
  const ft_device_block block{data, items, ids, x, out, H, FT_BF16, T, K, E, 20000};
  auto word = [&](int at) { return (std::atomic<uint32_t>*)(data + at); };
  auto* item = (int32_t*)(data + items);
  auto* route = (int32_t*)(data + ids);
  std::vector<float> want[T];
  ft_pool_start(3, nullptr, 0);
  ft_poller* one = ft_poller_new(layer.executor, &block);
  for (uint32_t n = 1; n <= 40; n++) {
    const uint32_t rows = 1 + n % T;
    for (uint32_t i = 0; i < rows * K; i++) route[i] = (int32_t)((i / K + i % K) % E);
    const uint32_t count = std::min(E, rows + K - 1);
    for (int32_t e = 0; e < (int32_t)count; e++) item[4 * e] = e, item[4 * e + 1] = e % 2, item[4 * e + 2] = 4;
    const uint32_t request[4] = {0, count, rows, K};
    std::memcpy(data + 68, request, 16);
    ft_poller_wake(one);
    word(64)->store(n, std::memory_order_release);
    while (word(128)->load(std::memory_order_acquire) != n) std::this_thread::yield();
    const float* p = (const float*)(data + out);
    const std::vector<float> got(p, p + rows * K * H);
    if (want[rows - 1].empty()) want[rows - 1] = got;
    check(same(got, want[rows - 1]), "the same answer to the same ring");
    ft_poller_rest(one, n % 10 == 0);
    if (n % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(15));  // it parks
  }
  ft_poller_free(one);
}

// --- loading --------------------------------------------------------------------------------------

void loading() {
  for (int n = 0; n < 300; n++) {
    const Numbers data(n / 2 + 1, FT_BF16);
    const uint32_t whole = ft_crc32(0, data.memory, n);
    check(ft_crc32(ft_crc32(0, data.memory, n / 3), data.bytes() + n / 3, n - n / 3) == whole, "crc");
  }
  for (int item : {1, 2, 4})
    for (int rows : {1, 17, 70})
      for (int columns : {1, 16, 39}) {
        const Codes from(rows * columns * item, item);
        const Block to(rows * columns * item, item), back(rows * columns * item, item);
        ft_transpose(item, from.memory, columns * item, to.memory, rows * item, rows, columns);
        ft_transpose(item, to.memory, rows * item, back.memory, columns * item, columns, rows);
        check(!std::memcmp(from.memory, back.memory, rows * columns * item), "transposed twice");
      }
  const uint64_t shape[4] = {24, 32, 8, 3 * 24 * 8 * 2};
  const Numbers gate(24 * 32, FT_BF16), up(24 * 32, FT_BF16), down(24 * 32, FT_BF16), tiles(3 * 24 * 32, FT_BF16);
  check(ft_pack_plain(2, gate.memory, up.memory, down.memory, tiles.memory, shape) == FT_OK, "packed");
  ft_blocks q4{};  // a half and 16 bytes of codes for 32
  q4.num_fields = 2, q4.num_planes = 1, q4.num_parts = 1, q4.columns = 32, q4.block_bytes = 18, q4.words = 1;
  q4.plane_bits[0] = 4, q4.part_bytes[0] = 2, q4.part_columns[0] = 32, q4.part_check[0] = FT_CHECK_HALF;
  q4.fields[0] = {1, FT_FIELD_RAW, 0, 0, 2, 0}, q4.fields[1] = {0, FT_FIELD_DIGITS, 4, 0, 16, 16};
  const int64_t rows = 37, columns = 96, step = columns / 32 * 18;
  const Codes raw(rows * step, 2);
  const Block codes(rows * 64, 1), scales(rows * columns / 32 * 2, 2), turned(rows * columns / 2, 1);
  uint8_t* const as_rows[] = {codes.bytes(), scales.bytes()};
  uint8_t* const as_columns[] = {turned.bytes(), scales.bytes()};
  check(!ft_unblock_rows(&q4, raw.bytes(), step, rows, columns, as_rows), "rows cut");
  check(!ft_unblock_down(&q4, raw.bytes(), step, rows, columns, as_columns), "columns cut");
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const auto tiers = words(ft_tiers());
  if (count < 2) return std::printf("%s pool\n", ft_tiers()), 0;
  const std::string what = arguments[1];
  const int last = (int)tiers.size() - 1;
  if (what == "pool") shares(), two_callers(last), faults(last), poller(last), loading();
  for (int tier = 0; tier <= last; tier++)
    if (tiers[tier] == what) one_tier(tier);
  std::printf("%s\n", failures ? "failures" : "all good");
  return failures ? 1 : 0;
}
