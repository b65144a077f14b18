// pread, memory copies, and zlib's raw inflate in bounded windows.
#include "server/loader/storage_stream.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/digest.h"

namespace modelcache {
namespace {

constexpr std::size_t kInputWindowBytes = 256U << 10U;

// One raw deflate stream of a file, inflated piece by piece.
class Inflater {
 public:
  Inflater(const SourceFile& file, const PlannedStorage& storage, const DeflatedBytes& source)
      : file_(file),
        storage_(storage),
        next_input_(source.offset_bytes),
        input_left_(source.compressed_bytes),
        input_(kInputWindowBytes) {
    ready_ = ::inflateInit2(&stream_, -MAX_WBITS) == Z_OK;
  }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;
  ~Inflater() {
    if (ready_) {
      (void)::inflateEnd(&stream_);
    }
  }

  // Fills all of `out`. Errors: kBadFile when the stream ends before or is damaged.
  Result<void> Fill(std::span<std::byte> out) {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(out.size());
    while (stream_.avail_out > 0) {
      if (auto refilled = Refill(); !refilled.ok()) {
        return refilled;
      }
      const int status = ready_ && !ended_ ? ::inflate(&stream_, Z_NO_FLUSH) : Z_STREAM_ERROR;
      ended_ = ended_ || status == Z_STREAM_END;
      const bool stuck = ended_ && stream_.avail_out > 0;
      if ((status != Z_OK && status != Z_STREAM_END) || stuck) {
        return Damaged();
      }
    }
    return {};
  }

  // Errors: kBadFile when more bytes follow.
  Result<void> CheckEnd() {
    std::byte extra{};
    stream_.next_out = reinterpret_cast<Bytef*>(&extra);
    stream_.avail_out = 1;
    while (!ended_ && stream_.avail_out == 1) {
      if (auto refilled = Refill(); !refilled.ok()) {
        return refilled;
      }
      const int status = ::inflate(&stream_, Z_NO_FLUSH);
      ended_ = status == Z_STREAM_END;
      if (status != Z_OK && status != Z_STREAM_END) {
        return Damaged();
      }
    }
    return stream_.avail_out == 1 ? Result<void>() : Result<void>(Damaged());
  }

 private:
  Result<void> Refill() {
    if (stream_.avail_in > 0 || input_left_ == 0) {
      return {};
    }
    const auto count = std::min<std::uint64_t>(input_left_, input_.size());
    const auto window = std::span(input_).first(count);
    if (auto read = file_.ReadAt(next_input_, window); !read.ok()) {
      return read;
    }
    next_input_ += count;
    input_left_ -= count;
    stream_.next_in = reinterpret_cast<Bytef*>(window.data());
    stream_.avail_in = static_cast<uInt>(count);
    return {};
  }

  [[nodiscard]] Error Damaged() const {
    return file_.Bad(storage_.name + " is compressed and does not inflate to " +
                     std::to_string(storage_.size_bytes) + " bytes (" +
                     std::to_string(stream_.total_out) + " came out)");
  }

  const SourceFile& file_;
  const PlannedStorage& storage_;
  std::uint64_t next_input_;
  std::uint64_t input_left_;
  std::vector<std::byte> input_;
  z_stream stream_ = {};
  bool ready_ = false;
  bool ended_ = false;
};

Result<void> StreamDeflated(std::span<const SourceFile> files, const PlannedStorage& storage,
                            std::span<std::byte> scratch, const LeafSink& sink) {
  const auto& source = std::get<DeflatedBytes>(storage.bytes);
  Inflater inflater(files[source.file], storage, source);
  for (std::uint64_t left = source.skip_bytes; left > 0;) {
    const auto part = scratch.first(std::min<std::uint64_t>(left, scratch.size()));
    if (auto filled = inflater.Fill(part); !filled.ok()) {
      return filled;
    }
    left -= part.size();
  }
  for (std::uint64_t left = storage.size_bytes; left > 0;) {
    const auto leaf = scratch.first(std::min<std::uint64_t>(left, kDigestLeafBytes));
    if (auto filled = inflater.Fill(leaf); !filled.ok()) {
      return filled;
    }
    if (auto taken = sink(leaf); !taken.ok()) {
      return taken;
    }
    left -= leaf.size();
  }
  return inflater.CheckEnd();
}

}  // namespace

bool IsSeekable(const PlannedStorage& storage) {
  return !std::holds_alternative<DeflatedBytes>(storage.bytes);
}

Result<void> ReadStorage(std::span<const SourceFile> files, const PlannedStorage& storage,
                         std::uint64_t offset_bytes, std::span<std::byte> out) {
  if (const auto* source = std::get_if<FileBytes>(&storage.bytes)) {
    return files[source->file].ReadAt(source->offset_bytes + offset_bytes, out);
  }
  std::memcpy(out.data(), std::get<MemoryBytes>(storage.bytes).data + offset_bytes, out.size());
  return {};
}

Result<void> StreamStorage(std::span<const SourceFile> files, const PlannedStorage& storage,
                           std::span<std::byte> scratch, const LeafSink& sink) {
  if (!IsSeekable(storage)) {
    return StreamDeflated(files, storage, scratch, sink);
  }
  for (std::uint64_t at = 0; at < storage.size_bytes; at += kDigestLeafBytes) {
    const auto leaf = scratch.first(std::min(kDigestLeafBytes, storage.size_bytes - at));
    if (auto read = ReadStorage(files, storage, at, leaf); !read.ok()) {
      return read;
    }
    if (auto taken = sink(leaf); !taken.ok()) {
      return taken;
    }
  }
  return {};
}

Result<Digest> SamplePlanned(std::span<const SourceFile> files, const PlannedStorage& storage) {
  Result<void> status;
  const auto sample =
      SampleStorage(storage.size_bytes, [&](std::uint64_t offset_bytes, std::span<std::byte> out) {
        status = ReadStorage(files, storage, offset_bytes, out);
        return status.ok();
      });
  if (!sample) {
    return std::move(status).error();
  }
  return *sample;
}

}  // namespace modelcache
