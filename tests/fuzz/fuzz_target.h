// What every fuzz target defines and how it reports a broken promise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>

// libFuzzer's entry point; replay_main.cc calls the same one for each file of the corpus.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace modelcache {

// Ends the program when `holds` is false, in every build type, so that the fuzzer keeps the input.
inline void Require(bool holds, const char* promise) {
  if (!holds) {
    (void)std::fprintf(stderr, "broken promise: %s\n", promise);
    std::abort();
  }
}

inline std::span<const std::byte> AsBytes(const std::uint8_t* data, std::size_t size) {
  return std::as_bytes(std::span(data, size));
}

inline std::string_view AsText(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace modelcache
