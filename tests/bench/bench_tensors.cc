// Connect, open and build every at::Tensor of a model, once, in a fresh process; one line of JSON.
//   bench_tensors PATH
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "modelcache/torch.hpp"

namespace {

template <typename T>
T Must(modelcache::Result<T> result) {
  if (!result.ok()) {
    (void)std::fprintf(stderr, "bench_tensors: %s\n", result.error().message.c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    (void)std::fprintf(stderr, "usage: bench_tensors PATH\n");
    return 2;
  }
  const auto start = std::chrono::steady_clock::now();
  auto client = Must(modelcache::Client::Connect());
  const auto tensors = Must(modelcache::LoadStateDict(Must(client.Open(argv[1]))));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  (void)std::printf(R"({"seconds": %.9f, "tensors": %zu})"
                    "\n",
                    elapsed.count(), tensors.size());
  return 0;
}
