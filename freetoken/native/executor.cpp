#include "executor.h"

#include <algorithm>
#include <cstring>

#include "pieces.h"

namespace ft {

namespace {
constexpr uint64_t CHUNK_BYTES = 512 << 10;    // a chunk costs a microsecond or two beside what it computes
constexpr uint64_t HURRIED_BYTES = 256 << 10;
constexpr uint32_t MOST_CHUNKS = 64, FEW_CHUNKS = 8, FEW_ROWS = 4, MANY_ROWS = 16;
constexpr size_t WAVE_FLOATS = 16 << 20;       // partials held at a time: 64 MiB
constexpr int64_t SLAB = 512;                  // floats that are added up at once
uint32_t ceil_div(uint64_t a, uint64_t b) { return (uint32_t)((a + b - 1) / b); }
const uint8_t* first_tile(const TileJob& job) { return job.record + job.layer->tiles_offset + job.first * job.layer->tile_bytes; }
bool same_rows(const TileJob& a, const TileJob& b) {
  return a.num_rows == b.num_rows && std::equal(a.rows, a.rows + a.num_rows, b.rows);
}

ChunkSize chunk_size(const ft_layer& l, const TileFormat& format, uint32_t rows, bool hurried) {
  const uint64_t bytes = hurried ? HURRIED_BYTES : CHUNK_BYTES;
  // Tiles of 256 columns are few and large: 24 of eight experts, for 16 workers.
  uint32_t pieces = 1;
  while (format.cut && rows <= FEW_ROWS && l.tile_bytes / pieces > bytes && l.tile_width % (2 * pieces * format.cut) == 0) pieces *= 2;
  if (pieces > 1) return {1, pieces};
  uint32_t tiles = std::max(1u, ceil_div(bytes, l.tile_bytes));
  // A partial is at most about an eighth of the 16-bit weights it comes from; a 32nd where products of many rows cost
  // less than adding partials up (bf16, AMX, 128 rows: 27.6 -> 20.1 ms).
  const uint64_t times = format.most_rows > FT_ROWS && rows >= MANY_ROWS && !hurried ? 64 : 16;
  if (rows > 1) tiles = std::max(tiles, ceil_div(times * rows, 3ull * l.tile_width));
  tiles = std::max(tiles, ceil_div(l.num_tiles, rows > FEW_ROWS ? FEW_CHUNKS : MOST_CHUNKS));
  tiles = std::min(tiles, l.num_tiles);
  uint32_t parts = ceil_div(l.num_tiles, tiles);
  // A multiple of three where that divides evenly: eight experts in five parts are seven rounds of 6 threads and four
  // of 12, the last of them for a few; in six parts they are eight and four smaller ones, all full.
  if (rows == 1 && !hurried)
    for (uint32_t n = parts; n < 2 * parts; n++)
      if (n % 3 == 0 && l.num_tiles % n == 0) { parts = n; break; }
  return {ceil_div(l.num_tiles, parts), 1};  // as many in each
}
}  // namespace

// --- a wave ---------------------------------------------------------------------------------------

bool Executor::Wave::take(int worker, uint32_t& number, bool& more) {
  if (pooled) return Pool::instance().take(worker, number, more);
  number = next_alone++;
  more = next_alone < chunks.size();
  return number < chunks.size();
}

void Executor::Wave::compute(int worker, uint32_t number, bool first, bool joins) {
  Pool& pool = Pool::instance();
  const bool faulty = pooled && pool.has_faults();
  const uint64_t began = faulty ? now_ns() : 0;
  TileJob& job = chunks[number].tiles;
  Block& block = blocks[chunks[number].owner];
  const size_t bytes = scratch + own_floats * sizeof(float);
  if (pooled) {
    job.scratch = pool.scratch(worker, bytes);
  } else {
    own_scratch.resize(bytes + 64);
    job.scratch = (uint8_t*)ft_align((uint64_t)own_scratch.data(), 64);
  }
  if (joins) job.out = (float*)(job.scratch + scratch);
  kernels->formats[job.layer->format]->run(job);
  if (joins) kernels->add(block.total, job.out, 1, 0, block.count);
  if (first || joins) block.together = number - block.first_chunk + 1;
  if (faulty) pool.suffer(worker, now_ns() - began);
  done[chunks[number].owner].fetch_add(1, std::memory_order_release);
}

// Slabs come behind chunks, so what one waits for is already in somebody's hands.
bool Executor::Wave::wait_for(uint32_t owner) {
  uint64_t until = 0;
  for (uint32_t turn = 1; done[owner].load(std::memory_order_acquire) < blocks[owner].num_parts; turn++) {
    pause();
    if (turn % 64) continue;
    if (abandoned.load(std::memory_order_relaxed)) return false;
    const uint64_t now = now_ns();
    if (!until) until = now + deadline_ms * 1000000ull;
    if (now > until) {
      abandoned.store(true);
      return false;
    }
    if (turn > 4096) std::this_thread::yield();
  }
  return true;
}

bool Executor::Wave::goes_on() {
  if (poison->load(std::memory_order_relaxed)) abandoned.store(true);
  return !abandoned.load(std::memory_order_relaxed);
}

void Executor::Wave::work(int worker) {
  constexpr uint32_t NONE = ~0u;
  bool more;
  bool together = false;  // this worker has computed all of the block so far
  for (uint32_t number, last = NONE; goes_on() && take(worker, number, more); last = number) {
    const bool first = number == blocks[chunks[number].owner].first_chunk;
    together = first || (together && last + 1 == number);
    TileJob& job = chunks[number].tiles;
    const TileJob* next = more ? &chunks[number + 1].tiles : nullptr;
    job.next = next ? first_tile(*next) : nullptr;
    job.next_from = next ? next->from : 0;
    job.same_rows = last != NONE && same_rows(chunks[last].tiles, job);
    compute(worker, number, first, together && !first);
  }
  while (goes_on()) {
    const uint32_t number = next_slab.fetch_add(1, std::memory_order_relaxed);
    if (number >= slabs.size()) return;
    const Slab& slab = slabs[number];
    if (!wait_for(slab.owner)) return;
    const Block& b = blocks[slab.owner];
    kernels->add(b.total + slab.first, b.parts + (b.together - 1) * b.count + slab.first, b.num_parts - b.together, b.count, slab.count);
  }
}

// --- a request ------------------------------------------------------------------------------------

// Rows that share chunks: all, or about equal parts of them.
int Executor::block_rows(const ft_layer& layer, const ft_item& item) const {
  const uint64_t rows = (uint64_t)item.num_rows, most = (uint64_t)format_of(layer).most_rows;
  if (rows <= most) return item.num_rows;
  return (int)ft_align(ceil_div(rows, ceil_div(rows, most)), most > FT_ROWS ? 16 : most);
}

size_t Executor::parts_of(const ft_layer& layer, const ft_item& item) const {
  if (item.first_tile > 0 && !whole_sums_) return 0;
  const uint32_t rows = (uint32_t)block_rows(layer, item);
  const uint32_t chunks = chunk_size(layer, format_of(layer), rows, whole_sums_).count(item.last_tile - item.first_tile);
  return chunks > 1 ? (size_t)(chunks - 1) * item.num_rows * layer.hidden : 0;
}

void Executor::add_block(const ft_layer& layer, const TileJob& whole, ChunkSize size, float* out, size_t& used) {
  Wave& wave = *job_;
  const uint32_t tiles = (uint32_t)(whole.last - whole.first), parts = size.count(tiles), owner = (uint32_t)wave.blocks.size();
  const int64_t count = (int64_t)whole.num_rows * layer.hidden;
  float* others = wave.parts.data() + used;
  wave.blocks.push_back({out, others, (uint32_t)wave.chunks.size(), parts, count, 0});
  for (uint32_t part = 0; part < parts; part++) {
    TileJob job = whole;
    job.first = whole.first + (int)(part / size.pieces * size.tiles);
    job.last = std::min(whole.last, job.first + (int)size.tiles);
    job.to = (int)(layer.tile_width / size.pieces);
    job.from = (int)(part % size.pieces) * job.to;
    job.to += job.from;
    job.out = part ? others + (part - 1) * count : out;
    wave.chunks.push_back({job, owner});
  }
  if (parts == 1) return;
  wave.own_floats = std::max(wave.own_floats, (size_t)count);
  used += (size_t)(parts - 1) * count;
  for (int64_t at = 0; at < count; at += SLAB)
    wave.slabs.push_back({owner, at, std::min(SLAB, count - at)});
}

void Executor::add_item(const Input& in, const ft_layer& layer, const ft_item& item, float* out, size_t& used) {
  const uint64_t local = (uint64_t)item.expert % layer.num_experts;
  TileJob job{};
  job.layer = &layer;
  job.record = item.source ? (const uint8_t*)item.source
                           : (const uint8_t*)layer.records + local * layer.record_bytes;
  job.x = in.x;
  job.x_dtype = in.x_dtype;
  job.to = (int)layer.tile_width;
  const int32_t* rows = in.rows + item.first_row;
  const int64_t hidden = layer.hidden;
  const int some = block_rows(layer, item);
  const ChunkSize size = chunk_size(layer, format_of(layer), (uint32_t)some, whole_sums_);
  for (int at = 0; at < item.num_rows; at += some) {
    job.rows = rows + at;
    job.num_rows = std::min(some, item.num_rows - at);
    if (item.first_tile == 0 || whole_sums_) {
      job.first = item.first_tile;
      job.last = item.last_tile;
      add_block(layer, job, size, out + (item.out_row + at) * hidden, used);
      continue;
    }
    for (int t = item.first_tile; t < item.last_tile; t++) {
      job.first = t;
      job.last = t + 1;
      job.out = out + (item.out_row + (int64_t)(t - item.first_tile) * item.num_rows + at) * hidden;
      job_->blocks.push_back({job.out, nullptr, (uint32_t)job_->chunks.size(), 1, (int64_t)job.num_rows * hidden, 0});
      job_->chunks.push_back({job, (uint32_t)job_->blocks.size() - 1});
    }
  }
}

bool Executor::run_wave(uint32_t deadline_ms) {
  Wave& wave = *job_;
  if (wave.chunks.empty()) return true;
  if (wave.done_size < wave.blocks.size()) {
    wave.done_size = 2 * wave.blocks.size();
    wave.done.reset(new std::atomic<uint32_t>[wave.done_size]);
  }
  for (size_t i = 0; i < wave.blocks.size(); i++) wave.done[i].store(0, std::memory_order_relaxed);
  wave.next_slab.store(0);
  wave.next_alone = 0;
  wave.abandoned.store(false);
  wave.deadline_ms = deadline_ms;
  Pool& pool = Pool::instance();
  bool done = true;
  wave.pooled = pool.threads() > 1 && pool.acquire();
  if (wave.pooled) {
    pool.deal((uint32_t)wave.chunks.size());
    done = pool.run(wave, deadline_ms);
    stuck_ = !done;
    pool.release();
  } else {
    wave.work(0);
  }
  return done && !wave.abandoned.load();
}

int Executor::run(const Input& in, const ft_layer& layer, const ft_item* items, uint32_t num_items, float* out,
                  uint32_t deadline_ms) {
  Wave& wave = *job_;
  wave.kernels = &kernels_;
  wave.poison = in.poison;
  wave.scratch = ft_align(scratch_bytes(format_of(layer), layer.hidden, layer.tile_width), 64);
  for (uint32_t i = 0; i < num_items;) {
    size_t parts = 0, used = 0;
    uint32_t end = i;
    do parts += parts_of(layer, items[end]);
    while (++end < num_items && parts + parts_of(layer, items[end]) <= WAVE_FLOATS);
    if (wave.parts.size() < parts) wave.parts = std::vector<float>(parts);
    wave.chunks.clear();
    wave.blocks.clear();
    wave.slabs.clear();
    wave.own_floats = 0;
    for (; i < end; i++) add_item(in, layer, items[i], out, used);
    if (!run_wave(deadline_ms)) return in.poison->load() ? FT_POISONED : FT_FAILED;
  }
  return FT_OK;
}

int Executor::serve(const ft_io& io, float* out, uint32_t deadline_ms) {
  if (!idle(deadline_ms)) return FT_FAILED;
  const uint8_t* base = (const uint8_t*)&io;
  const auto* poison = (const std::atomic<uint32_t>*)&io.poison.word;
  if (poison->load(std::memory_order_acquire)) return FT_POISONED;
  if (io.layout.magic != FT_ABI_MAGIC || io.layout.version != FT_ABI_VERSION) return FT_FAILED;
  if (io.request.layer >= layers_.size()) return FT_FAILED;
  const Input in{base + io.layout.x_offset, (int)io.layout.x_dtype,
                 (const int32_t*)(base + io.layout.rows_offset), poison};
  const ft_item* items = (const ft_item*)(base + io.layout.items_offset);
  whole_sums_ = io.request.whole_sums != 0;
  return run(in, layers_[io.request.layer], items, io.request.num_items, out, deadline_ms);
}

// --- a whole layer ----------------------------------------------------------------------------------

// Counting sort: experts ascending, rows ascending within each.
void Executor::sort_routes(const ft_moe& job, const ft_layer& layer) {
  const int64_t routes = (int64_t)job.tokens * job.top_k;
  Routes& r = routes_;
  r.counts.assign(layer.num_experts + 1, 0);
  for (int64_t i = 0; i < routes; i++)
    if (job.ids[i] >= 0) r.counts[job.ids[i] + 1]++;
  r.items.clear();
  for (uint32_t e = 0; e < layer.num_experts; e++) {
    const int32_t first = r.counts[e], rows = r.counts[e + 1];
    r.counts[e + 1] += first;
    if (rows) r.items.push_back({(int32_t)e, 0, (int32_t)layer.num_tiles, first, rows, first, 0});
  }
  r.rows.resize(r.counts.back());
  r.places.resize(routes);
  for (int64_t i = 0; i < routes; i++) {
    r.places[i] = job.ids[i] < 0 ? -1 : r.counts[job.ids[i]]++;
    if (job.ids[i] >= 0) r.rows[r.places[i]] = (int32_t)(i / job.top_k);
  }
}

struct Combine : Pieces {
  Combine(const TierKernels& t, const ft_moe& j, const int32_t* p, const float* o, int64_t h)
      : Pieces(j.tokens, 0), tier(t), job(j), places(p), outputs(o), hidden(h) {}
  void piece(int64_t token, uint8_t*) override {
    const int64_t at = token * job.top_k;
    tier.combine(job.y + token * hidden, outputs, places + at, job.weights + at, job.top_k, hidden);
  }
  const TierKernels& tier;
  const ft_moe& job;
  const int32_t* places;
  const float* outputs;
  int64_t hidden;
};

int Executor::layer(ft_moe& job, uint32_t deadline_ms) {
  static const std::atomic<uint32_t> never{0};
  if (job.layer >= layers_.size() || !idle(deadline_ms)) return FT_FAILED;
  const ft_layer& layer = layers_[job.layer];
  for (int64_t i = 0; i < (int64_t)job.tokens * job.top_k; i++)
    if (job.ids[i] >= (int32_t)layer.num_experts) return FT_FAILED;
  sort_routes(job, layer);
  job.visited = (uint32_t)routes_.items.size();
  const size_t floats = routes_.rows.size() * layer.hidden;
  if (outputs_.size() < floats) outputs_ = std::vector<float>(floats);
  const Input in{job.x, (int)job.x_dtype, routes_.rows.data(), &never};
  whole_sums_ = false;
  const int status = run(in, layer, routes_.items.data(), (uint32_t)routes_.items.size(), outputs_.data(), deadline_ms);
  if (status == FT_OK) {
    Combine last(kernels_, job, routes_.places.data(), outputs_.data(), layer.hidden);
    last.run(floats < (64 << 10));
  }
  return status;
}

bool Executor::idle(uint32_t deadline_ms) {
  if (stuck_ && Pool::instance().quiet(deadline_ms)) stuck_ = false;
  return !stuck_;
}

}  // namespace ft
