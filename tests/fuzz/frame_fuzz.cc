// FrameReader: whatever way the bytes are cut, the same frames come out or the same error.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "proto/frame.h"
#include "tests/fuzz/fuzz_target.h"

namespace modelcache {
namespace {

// Small, so that the fuzzer reaches both sides of the limit.
constexpr std::size_t kMaxBody = 4096;

struct Outcome {
  std::vector<std::pair<std::uint32_t, std::string>> frames;
  bool failed = false;

  bool operator==(const Outcome&) const = default;
};

Outcome ReadInPieces(std::span<const std::byte> bytes, std::size_t piece_bytes) {
  FrameReader reader(kMaxBody);
  Outcome outcome;
  while (!bytes.empty() && !outcome.failed) {
    const std::size_t size = std::min(piece_bytes, bytes.size());
    outcome.failed = !reader.Feed(bytes.first(size), {}).ok();
    bytes = bytes.subspan(size);
    while (!outcome.failed) {
      auto frame = reader.Next();
      if (!frame.ok()) {
        outcome.failed = true;
      } else if (!frame->has_value()) {
        break;
      } else {
        Require((*frame)->body.size() <= kMaxBody, "no body is longer than the limit");
        outcome.frames.emplace_back((*frame)->header.request_id, (*frame)->body);
      }
    }
  }
  return outcome;
}

}  // namespace
}  // namespace modelcache

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using modelcache::ReadInPieces;
  const auto bytes = modelcache::AsBytes(data, size);
  const auto whole = ReadInPieces(bytes, std::max<std::size_t>(size, 1));
  modelcache::Require(whole == ReadInPieces(bytes, 1), "cuts do not matter: one byte at a time");
  modelcache::Require(whole == ReadInPieces(bytes, 7), "cuts do not matter: seven bytes at a time");
  return 0;
}
