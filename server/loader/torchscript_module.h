// The interface of modelcached_torchscript.so, the only code that sees libtorch. Both sides are
// built together: plain C++ types may cross it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/manifest.h"

namespace modelcache {

inline constexpr const char kTorchscriptEntry[] = "modelcache_read_torchscript";

// How the library reads the archive. `read` gives the bytes that are there, fewer at the end or
// after an error. Any thread.
struct TorchscriptInput {
  std::uint64_t size_bytes = 0;
  std::function<std::size_t(std::uint64_t offset_bytes, void* out, std::size_t size)> read;
  std::string device = "cpu";
  // The module's own code computes tensors while it is loaded: every byte must really be read.
  bool read_everything = false;
};

// A storage of the module, as its record is called in the unified format: "0.storage", ….
struct TorchscriptStorage {
  std::string name;
  std::uint64_t size_bytes = 0;
  bool in_file = false;             // the bytes lie in the archive, at …
  std::uint64_t offset_bytes = 0;   // … this offset; only then
  const std::byte* data = nullptr;  // otherwise here, kept by TorchscriptModule::keep_alive
};

struct TorchscriptModule {
  std::vector<TorchscriptStorage> storages;
  std::vector<TensorSpec> tensors;  // storage: index into `storages`
  std::string archive;              // a zip of everything but the bytes of tensors
  std::shared_ptr<void> keep_alive;
};

// Reads the module, without reading the bytes of large tensors unless `read_everything`. Returns
// true, or false and a message. Never throws. kind says whose fault it is.
enum class TorchscriptFault : std::uint8_t { kNone, kBadFile, kUnsupported };
using TorchscriptEntry = TorchscriptFault (*)(const TorchscriptInput& input,
                                              TorchscriptModule& module, std::string& message);

}  // namespace modelcache
