// Leaves are summed by several threads and put together at the end.
#include "server/loader/record_crc.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

#include "common/digest.h"

namespace modelcache {
namespace {

std::string Hex(std::uint32_t sum) {
  std::array<char, 9> text{};
  (void)std::snprintf(text.data(), text.size(), "%08x", sum);
  return text.data();
}

std::size_t FileOf(const PlannedStorage& storage) {
  const auto* deflated = std::get_if<DeflatedBytes>(&storage.bytes);
  return deflated != nullptr ? deflated->file : std::get<FileBytes>(storage.bytes).file;
}

}  // namespace

std::uint32_t CrcOf(std::span<const std::byte> bytes) {
  return static_cast<std::uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

Result<void> CheckCrc(std::span<const SourceFile> files, const PlannedStorage& storage,
                      std::span<const std::uint32_t> leaves) {
  uLong sum = storage.crc->before;
  std::uint64_t left = storage.size_bytes;
  for (const std::uint32_t leaf : leaves) {
    const std::uint64_t size = std::min(left, kDigestLeafBytes);
    sum = ::crc32_combine(sum, leaf, static_cast<z_off_t>(size));
    left -= size;
  }
  if (sum == storage.crc->expected) {
    return {};
  }
  return files[FileOf(storage)].Bad(storage.name + " is damaged: its bytes have the CRC-32 " +
                                    Hex(static_cast<std::uint32_t>(sum)) + ", the archive says " +
                                    Hex(storage.crc->expected));
}

}  // namespace modelcache
