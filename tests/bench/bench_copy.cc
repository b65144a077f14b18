// What parts of a cold load cost by themselves, on the same files; one line of JSON.
//   bench_copy FILE…   seconds to copy the files into fresh memory, to hash them, and to sample
//                      them for the search of equal storages
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/digest.h"
#include "common/mapping.h"
#include "common/memfd.h"

namespace modelcache {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kPieceBytes = std::uint64_t{16} << 20U;  // about one large storage

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Costs {
  double copy_seconds = 0;
  double hash_seconds = 0;
  double sample_seconds = 0;
  std::uint64_t bytes = 0;
};

Result<void> CopyToMemory(std::span<const std::byte> bytes, Costs& costs) {
  const auto start = Clock::now();
  auto memory = CreateMemfd("bench", bytes.size());
  if (!memory.ok()) {
    return std::move(memory).error();
  }
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t size =
        ::pwrite(memory->get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (size < 0) {
      return SystemError("pwrite", errno);
    }
    done += static_cast<std::size_t>(size);
  }
  costs.copy_seconds += SecondsSince(start);
  return {};
}

Result<void> Measure(const char* path, Costs& costs) {
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file.valid()) {
    return SystemError(std::string("open ") + path, errno);
  }
  const off_t end = ::lseek(file.get(), 0, SEEK_END);
  const auto size = static_cast<std::uint64_t>(end);
  auto mapped = Mapping::Map(file.get(), {0, size}, Access::kRead);
  if (!mapped.ok()) {
    return std::move(mapped).error();
  }
  mapped->PopulateRead({0, size});
  auto start = Clock::now();
  Digest last = HashStorage(mapped->bytes());
  costs.hash_seconds += SecondsSince(start);
  start = Clock::now();
  for (std::uint64_t at = 0; at < size; at += kPieceBytes) {
    last = SampleStorage(mapped->bytes().subspan(at, std::min(kPieceBytes, size - at)));
  }
  costs.sample_seconds += SecondsSince(start);
  asm volatile("" : : "r"(&last) : "memory");  // keeps the work
  costs.bytes += size;
  return CopyToMemory(mapped->bytes(), costs);
}

}  // namespace
}  // namespace modelcache

int main(int argc, char** argv) {
  modelcache::Costs costs;
  for (int i = 1; i < argc; ++i) {
    auto measured = modelcache::Measure(argv[i], costs);
    if (!measured.ok()) {
      (void)std::fprintf(stderr, "bench_copy: %s\n", measured.error().message.c_str());
      return 1;
    }
  }
  (void)std::printf(R"({"copy_s": %.6f, "hash_s": %.6f, "sample_s": %.6f, "bytes": %llu})"
                    "\n",
                    costs.copy_seconds, costs.hash_seconds, costs.sample_seconds,
                    static_cast<unsigned long long>(costs.bytes));
  return 0;
}
