// One measurement in one fresh process, through the C interface; the result is one line of JSON.
//   bench_client open PATH COUNT   warm opens by a connected client, microseconds
//   bench_client touch PATH        open, then the first touch of every page, then a read of all
//   bench_client mmap FILE…        the same over a fresh mmap of the files themselves
//   bench_client hold PATH         reads everything, says "ready", waits for the end of its input
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modelcache/modelcache.h"

namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::span<const std::byte>;

constexpr std::size_t kPageBytes = 4096;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

[[noreturn]] void Fail(const char* what, const char* why) {
  (void)std::fprintf(stderr, "bench_client: %s: %s\n", what, why);
  std::exit(1);
}

void Check(mc_status status, const char* what) {
  if (status != MC_OK) {
    Fail(what, mc_last_error());
  }
}

mc_client* Connect() {
  mc_client* client = nullptr;
  Check(mc_client_connect(nullptr, &client), "connect");
  return client;
}

mc_model* Open(mc_client* client, const char* path) {
  mc_model* model = nullptr;
  Check(mc_model_open(client, &path, 1, nullptr, &model), "open");
  return model;
}

std::vector<Bytes> Storages(const mc_model* model) {
  std::vector<Bytes> ranges(mc_model_storage_count(model));
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    mc_storage storage{};
    storage.struct_size = sizeof storage;
    Check(mc_model_storage_at(model, i, &storage), "storage");
    ranges[i] = {static_cast<const std::byte*>(storage.data), storage.nbytes};
  }
  return ranges;
}

// Reads one byte of each page.
std::uint64_t Touch(std::span<const Bytes> ranges) {
  std::uint64_t sum = 0;
  for (Bytes range : ranges) {
    for (std::size_t at = 0; at < range.size(); at += kPageBytes) {
      sum += static_cast<std::uint64_t>(*static_cast<const volatile std::byte*>(range.data() + at));
    }
  }
  return sum;
}

// Reads every byte.
std::uint64_t ReadAll(std::span<const Bytes> ranges) {
  std::uint64_t sum = 0;
  for (Bytes range : ranges) {
    for (std::size_t at = 0; at + sizeof sum <= range.size(); at += sizeof sum) {
      std::uint64_t word = 0;
      std::memcpy(&word, range.data() + at, sizeof word);
      sum += word;
    }
  }
  return sum;
}

int MeasureTouch(std::span<const Bytes> ranges, double open_seconds) {
  std::uint64_t bytes = 0;
  for (Bytes range : ranges) {
    bytes += range.size();
  }
  auto start = Clock::now();
  std::uint64_t sum = Touch(ranges);
  const double touch_seconds = SecondsSince(start);
  start = Clock::now();
  sum += ReadAll(ranges);
  const double read_seconds = SecondsSince(start);
  (void)std::printf(
      R"({"open_s": %.9f, "touch_s": %.9f, "read_s": %.9f, "bytes": %llu, "sum": %llu})"
      "\n",
      open_seconds, touch_seconds, read_seconds, static_cast<unsigned long long>(bytes),
      static_cast<unsigned long long>(sum));
  return 0;
}

int MeasureOpens(const char* path, std::size_t count) {
  mc_client* client = Connect();
  mc_model_close(Open(client, path));
  std::vector<double> micros(count);
  for (double& each : micros) {
    const auto start = Clock::now();
    mc_model* model = Open(client, path);
    each = SecondsSince(start) * 1e6;
    if (mc_model_tensor_count(model) == 0) {
      Fail("open", "no tensors");
    }
    mc_model_close(model);
  }
  mc_client_close(client);
  std::sort(micros.begin(), micros.end());
  (void)std::printf(R"({"p50_us": %.3f, "p99_us": %.3f, "count": %zu})"
                    "\n",
                    micros[count / 2], micros[count * 99 / 100], count);
  return 0;
}

int MeasureModel(const char* path) {
  mc_client* client = Connect();
  const auto start = Clock::now();
  mc_model* model = Open(client, path);
  const double open_seconds = SecondsSince(start);
  const std::vector<Bytes> storages = Storages(model);
  const int result = MeasureTouch(storages, open_seconds);
  mc_model_close(model);
  mc_client_close(client);
  return result;
}

Bytes MapFile(const char* path) {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  struct stat info {};
  if (fd < 0 || ::fstat(fd, &info) != 0) {
    Fail(path, std::strerror(errno));
  }
  const auto size = static_cast<std::size_t>(info.st_size);
  // Private, as the safetensors library maps its files.
  void* base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  if (base == MAP_FAILED) {
    Fail(path, std::strerror(errno));
  }
  (void)::close(fd);
  return {static_cast<const std::byte*>(base), size};
}

int MeasureFiles(std::span<char* const> paths) {
  const auto start = Clock::now();
  std::vector<Bytes> ranges;
  ranges.reserve(paths.size());
  for (const char* path : paths) {
    ranges.push_back(MapFile(path));
  }
  return MeasureTouch(ranges, SecondsSince(start));
}

int Hold(const char* path) {
  mc_client* client = Connect();
  mc_model* model = Open(client, path);
  const std::uint64_t sum = ReadAll(Storages(model));
  (void)std::printf("ready %llu\n", static_cast<unsigned long long>(sum));
  (void)std::fflush(stdout);
  char byte = 0;
  while (::read(STDIN_FILENO, &byte, 1) > 0) {
  }
  mc_model_close(model);
  mc_client_close(client);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 2 ? argv[1] : "";
  if (what == "open" && argc == 4) {
    return MeasureOpens(argv[2], std::max(1UL, std::strtoul(argv[3], nullptr, 10)));
  }
  if (what == "touch") {
    return MeasureModel(argv[2]);
  }
  if (what == "mmap") {
    return MeasureFiles(std::span(argv + 2, static_cast<std::size_t>(argc - 2)));
  }
  if (what == "hold") {
    return Hold(argv[2]);
  }
  (void)std::fprintf(
      stderr, "usage: bench_client open PATH COUNT | touch PATH | mmap FILE... | hold PATH\n");
  return 2;
}
