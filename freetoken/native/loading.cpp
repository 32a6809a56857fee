// What loading does with bytes on their way into the bank: checksums, and matrices cut into tiles.
//
// Called from the loader's own threads, each on its own record, so nothing here uses the pool. CRC-32 is the
// one of zlib and PNG (reflected, 0xEDB88320), by carry-less multiplication where the CPU has it.
#include <algorithm>
#include <array>
#include <cstring>

#include "api.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(FT_HAVE_X86)
#include <immintrin.h>
#endif

namespace {

// --- checksums ------------------------------------------------------------------------------------

typedef std::array<std::array<uint32_t, 256>, 8> CrcTables;

CrcTables make_tables() {
  CrcTables t{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0);
    t[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; i++)
    for (int k = 1; k < 8; k++) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 0xFF];
  return t;
}

// Eight bytes at a time, each through the table of its distance from the end.
uint32_t crc_tables(uint32_t crc, const uint8_t* p, uint64_t n) {
  static const CrcTables t = make_tables();
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    v ^= crc;
    crc = 0;
    for (int k = 0; k < 8; k++) crc ^= t[7 - k][v >> 8 * k & 0xFF];
  }
  for (; n; p++, n--) crc = crc >> 8 ^ t[0][(crc ^ *p) & 0xFF];
  return crc;
}

#if defined(FT_HAVE_X86)
// Four 128-bit lanes are folded forward by 512 bits a step (multiplying by x^(512+-32) mod P), then into one,
// which the tables finish: its 16 bytes have the remainder of all that went before.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i lane, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(lane, by, 0x00), high = _mm_clmulepi64_si128(lane, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) uint32_t crc_folded(uint32_t crc, const uint8_t* p, uint64_t n) {
  const __m128i by512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);  // x^480, x^544 mod P, reflected
  const __m128i by128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);  // x^96, x^160 mod P, reflected
  auto at = [&](uint64_t i) { return _mm_loadu_si128((const __m128i*)(p + i)); };
  __m128i lanes[4] = {_mm_xor_si128(at(0), _mm_cvtsi32_si128((int)crc)), at(16), at(32), at(48)};
  for (p += 64, n -= 64; n >= 64; p += 64, n -= 64)
    for (int i = 0; i < 4; i++) lanes[i] = fold(lanes[i], by512, at(16 * i));
  for (int i = 1; i < 4; i++) lanes[i] = fold(lanes[i - 1], by128, lanes[i]);
  for (; n >= 16; p += 16, n -= 16) lanes[3] = fold(lanes[3], by128, at(0));
  uint8_t rest[16];
  _mm_storeu_si128((__m128i*)rest, lanes[3]);
  return crc_tables(crc_tables(0, rest, 16), p, n);
}
#endif

// --- transposing ----------------------------------------------------------------------------------

template <typename T>
void transpose_plain(const uint8_t* src, uint64_t src_step, uint8_t* dst, uint64_t dst_step, int64_t rows,
                     int64_t columns) {
  for (int64_t c = 0; c < columns; c++)
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(dst + c * dst_step + r * sizeof(T), src + r * src_step + c * sizeof(T), sizeof(T));
}

#if defined(__SSE2__)
// Squares of 16 bytes a row: pairs of rows are interleaved, then pairs of pairs, until columns are rows.
template <typename T>
inline __m128i low_of(__m128i a, __m128i b) {
  return sizeof(T) == 1 ? _mm_unpacklo_epi8(a, b) : sizeof(T) == 2 ? _mm_unpacklo_epi16(a, b) : _mm_unpacklo_epi32(a, b);
}
template <typename T>
inline __m128i high_of(__m128i a, __m128i b) {
  return sizeof(T) == 1 ? _mm_unpackhi_epi8(a, b) : sizeof(T) == 2 ? _mm_unpackhi_epi16(a, b) : _mm_unpackhi_epi32(a, b);
}

template <typename T>
inline void square(const uint8_t* src, uint64_t src_step, uint8_t* dst, uint64_t dst_step) {
  constexpr int N = 16 / (int)sizeof(T);
  __m128i a[N], b[N];
  for (int i = 0; i < N; i++) a[i] = _mm_loadu_si128((const __m128i*)(src + i * src_step));
  // Interleaving row i with row i + N / 2, log2(N) times over, is a transposition (a perfect shuffle each).
  for (int round = 1; round < N; round *= 2) {
    for (int i = 0; i < N / 2; i++) {
      b[2 * i] = low_of<T>(a[i], a[i + N / 2]);
      b[2 * i + 1] = high_of<T>(a[i], a[i + N / 2]);
    }
    for (int i = 0; i < N; i++) a[i] = b[i];
  }
  for (int i = 0; i < N; i++) _mm_storeu_si128((__m128i*)(dst + i * dst_step), a[i]);
}
#endif

// dst[c][r] = src[r][c]. Squares go down the rows so that each line of dst is written in one go.
template <typename T>
void transpose(const uint8_t* src, uint64_t src_step, uint8_t* dst, uint64_t dst_step, int64_t rows,
               int64_t columns) {
  int64_t whole_rows = 0, whole_columns = 0;
#if defined(__SSE2__)
  constexpr int64_t N = 16 / sizeof(T);
  constexpr int64_t STRIP = 4 * N;  // rows that fill a cache line of dst
  whole_rows = rows / N * N;
  whole_columns = columns / N * N;
  for (int64_t r0 = 0; r0 < whole_rows; r0 += STRIP)
    for (int64_t c = 0; c < whole_columns; c += N)
      for (int64_t r = r0; r < std::min(r0 + STRIP, whole_rows); r += N)
        square<T>(src + r * src_step + c * sizeof(T), src_step, dst + c * dst_step + r * sizeof(T), dst_step);
#endif
  const int64_t item = sizeof(T);
  transpose_plain<T>(src + whole_columns * item, src_step, dst + whole_columns * dst_step, dst_step, whole_rows,
                     columns - whole_columns);
  transpose_plain<T>(src + whole_rows * src_step, src_step, dst + whole_rows * item, dst_step, rows - whole_rows,
                     columns);
}

}  // namespace

extern "C" {

uint32_t ft_crc32(uint32_t crc, const void* data, uint64_t num_bytes) {
  const uint8_t* p = (const uint8_t*)data;
#if defined(FT_HAVE_X86)
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && num_bytes >= 128) return ~crc_folded(~crc, p, num_bytes);
#endif
  return ~crc_tables(~crc, p, num_bytes);
}

int ft_transpose(int item_bytes, const void* src, uint64_t src_step, void* dst, uint64_t dst_step, int64_t rows,
                 int64_t columns) {
  const uint8_t* from = (const uint8_t*)src;
  uint8_t* to = (uint8_t*)dst;
  if (item_bytes == 1) transpose<uint8_t>(from, src_step, to, dst_step, rows, columns);
  else if (item_bytes == 2) transpose<uint16_t>(from, src_step, to, dst_step, rows, columns);
  else if (item_bytes == 4) transpose<uint32_t>(from, src_step, to, dst_step, rows, columns);
  else return FT_FAILED;
  return FT_OK;
}

int ft_pack_plain(int item_bytes, const void* gate, const void* up, const void* down, void* tiles,
                  const uint64_t shape[4]) {
  const int64_t hidden = (int64_t)shape[0], size = (int64_t)shape[1], width = (int64_t)shape[2];
  const uint64_t row = (uint64_t)(hidden * item_bytes), part = (uint64_t)width * row;
  if (width < 1 || size % width) return FT_FAILED;
  for (int64_t tile = 0; tile < size / width; tile++) {
    uint8_t* out = (uint8_t*)tiles + tile * shape[3];
    std::memcpy(out, (const uint8_t*)gate + tile * part, part);
    std::memcpy(out + part, (const uint8_t*)up + tile * part, part);
    const uint8_t* columns = (const uint8_t*)down + tile * width * item_bytes;
    const int status = ft_transpose(item_bytes, columns, (uint64_t)(size * item_bytes), out + 2 * part, row, hidden, width);
    if (status != FT_OK) return status;
  }
  return FT_OK;
}

int ft_collapse(void* data, uint64_t num_bytes) {
#if defined(__linux__)
  const uint64_t page = 2 << 20, first = ((uint64_t)data + page - 1) / page * page;
  const uint64_t last = ((uint64_t)data + num_bytes) / page * page;
  constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, since Linux 6.1
  return last > first ? madvise((void*)first, last - first, COLLAPSE) : 0;
#else
  (void)data, (void)num_bytes;
  return -1;
#endif
}

int ft_interleave(void* data, uint64_t num_bytes, const int* nodes, int num_nodes) {
#if defined(__linux__) && defined(SYS_mbind)
  constexpr int INTERLEAVE = 3, MOST = 1024, BITS = 8 * sizeof(unsigned long);
  unsigned long mask[MOST / BITS] = {};
  for (int i = 0; i < num_nodes; i++) {
    if (nodes[i] < 0 || nodes[i] >= MOST) return -1;
    mask[nodes[i] / BITS] |= 1ul << nodes[i] % BITS;
  }
  const uint64_t page = 4096, first = ((uint64_t)data + page - 1) / page * page;
  const uint64_t last = ((uint64_t)data + num_bytes) / page * page;
  return last > first ? (int)syscall(SYS_mbind, first, last - first, INTERLEAVE, mask, (unsigned long)MOST + 1, 0) : 0;
#else
  (void)data, (void)num_bytes, (void)nodes, (void)num_nodes;
  return -1;
#endif
}

int ft_populate(void* data, uint64_t num_bytes) {
#if defined(__linux__)
  const uint64_t page = 4096, first = (uint64_t)data / page * page;
  const uint64_t last = ((uint64_t)data + num_bytes + page - 1) / page * page;
  constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, since Linux 5.14
  return last > first ? madvise((void*)first, last - first, POPULATE_WRITE) : 0;
#else
  (void)data, (void)num_bytes;
  return -1;
#endif
}

}  // extern "C"
