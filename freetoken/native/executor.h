// Answers IO blocks (abi.h): items become chunks, chunks become ordered sums.
//
// A chunk is a run of tiles of one item, or a piece of one, over up to FT_ROWS of its rows, or as many as its format
// says. Where chunks end depends on the layer's geometry, the item's row count and who asks; workers take them in any order (pool.h). Each makes a float32
// partial, and the partials of an item are added in ascending order. Who computes an item's first chunk and then its
// second adds them at once, and so on; what others made of the rest lies in memory until all of them are there, and is
// added by slabs of columns. So neither thread count nor schedule nor other items change a bit.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace ft {

// Where chunks of `rows` rows end: tiles per chunk, or, if it is one, how many pieces of a tile. hurried: a device waits
// for some twenty tiles, and larger chunks would leave workers without one (12 workers: 258 -> 277 tok/s on an H200; 15:
// no change).
struct ChunkSize {
  uint32_t tiles, pieces;
  uint32_t count(uint32_t num_tiles) const { return pieces > 1 ? num_tiles * pieces : (num_tiles + tiles - 1) / tiles; }
};

class Executor {
 public:
  Executor(const TierKernels& kernels, const ft_layer* layers, int num_layers)
      : kernels_(kernels), layers_(layers, layers + num_layers), job_(std::make_shared<Wave>()) {}

  int serve(const ft_io& io, float* out, uint32_t deadline_ms);
  // A whole layer in host memory (ft_executor_layer): rows by expert, items, sums, then the weighted routes.
  int layer(ft_moe& job, uint32_t deadline_ms);
  // False if a worker is still inside; the object must then live on.
  bool idle(uint32_t deadline_ms);

 private:
  struct Chunk {
    TileJob tiles;
    uint32_t owner;  // index of its Block
  };
  // Some rows of one item: the sum of num_parts chunks.
  struct Block {
    float* total;        // of the first `together`
    const float* parts;  // num_parts - 1, of the second chunk and so on
    uint32_t first_chunk, num_parts;
    int64_t count;       // floats of one part
    uint32_t together;
  };
  struct Slab {
    uint32_t owner;
    int64_t first, count;
  };
  struct Wave : Job {
    void work(int worker) override;
    bool take(int worker, uint32_t& number, bool& more);
    void compute(int worker, uint32_t number, bool first, bool joins);
    bool goes_on();
    bool wait_for(uint32_t owner);

    const TierKernels* kernels = nullptr;
    const std::atomic<uint32_t>* poison = nullptr;
    std::vector<Chunk> chunks;
    std::vector<Block> blocks;
    std::vector<Slab> slabs;
    std::unique_ptr<std::atomic<uint32_t>[]> done;  // chunks of each block that are there
    size_t done_size = 0, scratch = 0, own_floats = 0;  // a worker's: of a format, of a part
    std::atomic<uint32_t> next_slab{0};
    uint32_t next_alone = 0;
    std::atomic<bool> abandoned{false};
    uint32_t deadline_ms = 0;
    bool pooled = false;
    std::vector<uint8_t> own_scratch;
    std::vector<float> parts;
  };

  // Where a request's numbers lie.
  struct Input {
    const void* x;
    int x_dtype;
    const int32_t* rows;
    const std::atomic<uint32_t>* poison;
  };
  // A layer's routes by expert: an item and its rows for each expert that any token visits.
  struct Routes {
    std::vector<ft_item> items;
    std::vector<int32_t> rows, counts, places;  // places: row of the output of each route, -1 = none
  };

  int run(const Input& in, const ft_layer& layer, const ft_item* items, uint32_t num_items, float* out,
          uint32_t deadline_ms);
  void sort_routes(const ft_moe& job, const ft_layer& layer);
  void add_item(const Input& in, const ft_layer& layer, const ft_item& item, float* out, size_t& used);
  void add_block(const ft_layer& layer, const TileJob& whole, ChunkSize size, float* out, size_t& used);
  const TileFormat& format_of(const ft_layer& layer) const { return *kernels_.formats[layer.format]; }
  int block_rows(const ft_layer& layer, const ft_item& item) const;
  size_t parts_of(const ft_layer& layer, const ft_item& item) const;
  bool run_wave(uint32_t deadline_ms);

  const TierKernels& kernels_;
  std::vector<ft_layer> layers_;
  std::shared_ptr<Wave> job_;
  bool whole_sums_ = false;
  Routes routes_;
  std::vector<float> outputs_;
  bool stuck_ = false;  // a worker was still inside when a request was given up
};

}  // namespace ft
