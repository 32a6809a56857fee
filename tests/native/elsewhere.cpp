// Answers what a file asks of the library, on a machine that Python isn't on: `elsewhere TIER FROM TO`, or the tiers that
// there are without an argument. FROM holds requests, each a word and blobs, a length and so many bytes:
//   0   ft_layer, records, ft_io with what was asked   TO gets the floats that an executor answers
//   1   a function's name, its job, places, memory     TO gets the memory as the function leaves it
// Places are pairs: where in the job an address belongs, and where in the memory it leads. Exits with 1 if an answer
// depends on the number of threads.
#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "stress_memory.h"

namespace {

struct Blob : Block {
  explicit Blob(std::FILE* from) : Blob(from, length(from)) {}
  const size_t size;

 private:
  Blob(std::FILE* from, uint64_t n) : Block(n), size(n) { check(std::fread(memory, 1, n, from) == n, "a whole file"); }
  static uint64_t length(std::FILE* from) {
    uint64_t n = 0;
    check(std::fread(&n, 8, 1, from) == 1, "a whole file");
    return n;
  }
};

void experts(int tier, std::FILE* from, std::FILE* to) {
  const Blob layer(from), records(from), asked(from);
  auto* l = (ft_layer*)layer.memory;
  auto* io = (ft_io*)asked.memory;
  l->records = (uint64_t)records.memory;
  const size_t bytes = (size_t)io->layout.max_out_rows * io->layout.hidden * 4;
  const Block out(bytes);
  ft_executor* executor = ft_executor_new(tier, l, 1);
  check(executor, "executor");
  if (!executor) return;
  alike("experts", out.memory, bytes, [&] { return ft_executor_serve(executor, io, out.floats(), 60000); });
  ft_executor_free(executor);
  std::fwrite(out.memory, 1, bytes, to);
}

void call(int tier, std::FILE* from, std::FILE* to) {
  const Blob name(from), job(from), places(from), given(from);
  const Block memory(given.size);
  const auto* place = (const uint64_t*)places.memory;
  for (size_t i = 0; i < places.size / 16; i++)
    *(uint64_t*)(job.bytes() + place[2 * i]) = (uint64_t)memory.bytes() + place[2 * i + 1];
  const std::string function((const char*)name.memory, name.size);
  const auto run = (int (*)(int, const void*))dlsym(RTLD_DEFAULT, function.c_str());
  check(run, function.c_str());
  if (!run) return;
  alike(function.c_str(), memory.memory, given.size, [&] {
    std::memcpy(memory.memory, given.memory, given.size);
    return run(tier, job.memory);
  });
  std::fwrite(memory.memory, 1, given.size, to);
}

// Its index, -1 if the library lacks it.
int tier_named(const std::string& wanted) {
  const std::string names = " " + std::string(ft_tiers()) + " ";
  const size_t at = names.find(" " + wanted + " ");
  return at == std::string::npos ? -1 : (int)std::count(names.begin() + 1, names.begin() + at + 1, ' ');
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return std::printf("%s\n", ft_tiers()), 0;
  const int tier = tier_named(arguments[1]);
  check(tier >= 0, "a tier of this library");
  std::FILE *from = std::fopen(arguments[2], "rb"), *to = std::fopen(arguments[3], "wb");
  for (uint64_t kind; !failures && std::fread(&kind, 8, 1, from) == 1;) (kind ? call : experts)(tier, from, to);
  std::fclose(from), std::fclose(to);
  return failures ? 1 : 0;
}
