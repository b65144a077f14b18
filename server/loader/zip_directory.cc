// minizip over pread with a read cache; every number it reports is checked against the file.
#include "server/loader/zip_directory.h"

#include <minizip/unzip.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "common/checked_math.h"
#include "common/digest.h"
#include "server/loader/storage_stream.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMostRecords = 4U << 20U;
// Deflate cannot do better than 1032 : 1; what claims more would only make us reserve memory.
constexpr std::uint64_t kMostInflation = 1032;
constexpr std::uint64_t kInflationSlackBytes = 1024;

// What minizip reads through. It asks for single bytes, so they come from a cached window.
struct CachedStream {
  const SourceFile& file;
  std::uint64_t position = 0;
  std::uint64_t window_start = 0;
  std::size_t window_size = 0;
  std::array<std::byte, 16384> window{};
  Result<void> status;

  bool Load() {
    window_start = position;
    window_size = std::min<std::uint64_t>(window.size(), file.size() - position);
    status = file.ReadAt(position, std::span(window).first(window_size));
    window_size = status.ok() ? window_size : 0;
    return status.ok();
  }

  std::size_t Read(void* out, std::size_t size) {
    std::size_t done = 0;
    while (done < size && position < file.size()) {
      const bool inside = position >= window_start && position - window_start < window_size;
      if (!inside && !Load()) {
        break;
      }
      const std::size_t at = position - window_start;
      const std::size_t part = std::min(size - done, window_size - at);
      std::memcpy(static_cast<char*>(out) + done, window.data() + at, part);
      done += part;
      position += part;
    }
    return done;
  }

  bool Seek(std::uint64_t offset, int origin) {
    const std::uint64_t base = origin == ZLIB_FILEFUNC_SEEK_CUR   ? position
                               : origin == ZLIB_FILEFUNC_SEEK_END ? file.size()
                                                                  : 0;
    const auto target = CheckedAdd(base, offset);
    if (!target || *target > file.size()) {
      return false;
    }
    position = *target;
    return true;
  }
};

zlib_filefunc64_def Callbacks(CachedStream& stream) {
  zlib_filefunc64_def calls{};
  calls.opaque = &stream;
  calls.zopen64_file = [](voidpf opaque, const void*, int) -> voidpf { return opaque; };
  calls.zread_file = [](voidpf, voidpf raw, void* out, uLong size) -> uLong {
    return static_cast<CachedStream*>(raw)->Read(out, size);
  };
  calls.zwrite_file = [](voidpf, voidpf, const void*, uLong) -> uLong { return 0; };
  calls.ztell64_file = [](voidpf, voidpf raw) -> ZPOS64_T {
    return static_cast<CachedStream*>(raw)->position;
  };
  calls.zseek64_file = [](voidpf, voidpf raw, ZPOS64_T offset, int origin) -> long {
    return static_cast<CachedStream*>(raw)->Seek(offset, origin) ? 0 : -1;
  };
  calls.zclose_file = [](voidpf, voidpf) -> int { return 0; };
  calls.zerror_file = [](voidpf, voidpf raw) -> int {
    return static_cast<CachedStream*>(raw)->status.ok() ? 0 : 1;
  };
  return calls;
}

struct CloseZip {
  void operator()(void* zip) const { (void)unzClose(zip); }
};
using ZipHandle = std::unique_ptr<void, CloseZip>;

Result<void> CheckRecord(const SourceFile& file, const ZipRecord& record, uLong method,
                         uLong flags) {
  const std::string what = "record " + Quoted(record.name);
  if ((flags & 1U) != 0) {
    return file.Fault(ErrorCode::kUnsupported, what + " is encrypted");
  }
  if (method != 0 && method != Z_DEFLATED) {
    return file.Fault(ErrorCode::kUnsupported,
                      what + " is compressed by method " + std::to_string(method) +
                          ", only stored (0) and deflated (8) records are read");
  }
  if (!Within({record.data_offset_bytes, record.stored_bytes}, file.size())) {
    return file.Bad(what + " has " + std::to_string(record.stored_bytes) + " bytes at byte " +
                    std::to_string(record.data_offset_bytes) + ", but the file has " +
                    std::to_string(file.size()));
  }
  const bool plausible = method == 0 ? record.size_bytes == record.stored_bytes
                                     : record.size_bytes / kMostInflation <=
                                           record.stored_bytes + kInflationSlackBytes;
  if (!plausible) {
    return file.Bad(what + " claims " + std::to_string(record.size_bytes) + " bytes in " +
                    std::to_string(record.stored_bytes) + " stored ones");
  }
  return {};
}

Result<ZipRecord> ReadCurrent(const SourceFile& file, void* zip) {
  unz_file_info64 info{};
  if (unzGetCurrentFileInfo64(zip, &info, nullptr, 0, nullptr, 0, nullptr, 0) != UNZ_OK) {
    return file.Bad("the zip directory is damaged");
  }
  ZipRecord record;
  record.name.resize(info.size_filename + 1);
  if (unzGetCurrentFileInfo64(zip, &info, record.name.data(),
                              static_cast<uLong>(record.name.size()), nullptr, 0, nullptr,
                              0) != UNZ_OK) {
    return file.Bad("the zip directory is damaged");
  }
  record.name.resize(info.size_filename);
  record.stored_bytes = info.compressed_size;
  record.size_bytes = info.uncompressed_size;
  record.deflated = info.compression_method == Z_DEFLATED;
  int method = 0;
  int level = 0;
  if (unzOpenCurrentFile2(zip, &method, &level, 1) != UNZ_OK) {
    return file.Bad("record " + Quoted(record.name) + ": its local header is damaged");
  }
  record.data_offset_bytes = unzGetCurrentFileZStreamPos64(zip);
  (void)unzCloseCurrentFile(zip);  // checks a CRC of bytes that were not read
  if (auto checked = CheckRecord(file, record, info.compression_method, info.flag); !checked.ok()) {
    return std::move(checked).error();
  }
  return record;
}

Result<std::vector<ZipRecord>> ReadAll(const SourceFile& file, void* zip) {
  std::vector<ZipRecord> records;
  for (int status = unzGoToFirstFile(zip); status != UNZ_END_OF_LIST_OF_FILE;
       status = unzGoToNextFile(zip)) {
    if (status != UNZ_OK) {
      return file.Bad("the zip directory is damaged after " + std::to_string(records.size()) +
                      " records");
    }
    auto record = ReadCurrent(file, zip);
    if (!record.ok()) {
      return std::move(record).error();
    }
    if (record->name.empty() || record->name.back() != '/') {  // entries of folders hold nothing
      records.push_back(std::move(*record));
    }
    if (records.size() > kMostRecords) {
      return file.Bad("zip archive of more than " + std::to_string(kMostRecords) + " records");
    }
  }
  return records;
}

// The end record must be whole and reach exactly to the end of the file. minizip is content with
// the 64-bit one before it, and would take a file that was cut in between.
Result<void> CheckEnd(const SourceFile& file) {
  constexpr std::uint64_t kEndBytes = 22;
  constexpr std::uint64_t kMaxCommentBytes = 65535;
  const std::uint64_t size = std::min(file.size(), kEndBytes + kMaxCommentBytes);
  auto tail = file.ReadText({file.size() - size, size});
  if (!tail.ok()) {
    return std::move(tail).error();
  }
  for (std::size_t at = tail->rfind("PK\x05\x06"); at != std::string::npos && at > 0;
       at = tail->rfind("PK\x05\x06", at - 1)) {
    if (tail->size() - at < kEndBytes) {
      continue;
    }
    const auto comment = static_cast<std::size_t>(static_cast<unsigned char>((*tail)[at + 20])) |
                         static_cast<std::size_t>(static_cast<unsigned char>((*tail)[at + 21]))
                             << 8U;
    if (at + kEndBytes + comment == tail->size()) {
      return {};
    }
  }
  return file.Bad("starts like a zip archive, but has no zip directory at its end: " +
                  std::to_string(file.size()) + " bytes, probably cut short");
}

// From the local header on. Archives whose records share bytes inflate to any size, and a
// checkpoint that two readers see differently is no checkpoint.
ByteRange Extent(const ZipRecord& record) {
  constexpr std::uint64_t kLocalHeaderBytes = 30;
  const std::uint64_t header =
      std::min(record.data_offset_bytes, kLocalHeaderBytes + record.name.size());
  return {record.data_offset_bytes - header, header + record.stored_bytes};
}

Result<void> CheckDisjoint(const SourceFile& file, const std::vector<ZipRecord>& records) {
  std::vector<const ZipRecord*> by_place;
  by_place.reserve(records.size());
  for (const ZipRecord& record : records) {
    by_place.push_back(&record);
  }
  std::sort(by_place.begin(), by_place.end(), [](const ZipRecord* a, const ZipRecord* b) {
    return Extent(*a).offset_bytes < Extent(*b).offset_bytes;
  });
  for (std::size_t i = 1; i < by_place.size(); ++i) {
    const ByteRange before = Extent(*by_place[i - 1]);
    const ByteRange here = Extent(*by_place[i]);
    if (here.offset_bytes - before.offset_bytes < before.size_bytes) {
      return file.Bad("records " + Quoted(by_place[i - 1]->name) + " and " +
                      Quoted(by_place[i]->name) + " overlap: the first reaches to byte " +
                      std::to_string(before.offset_bytes + before.size_bytes) +
                      ", the second starts at byte " + std::to_string(here.offset_bytes));
    }
  }
  return {};
}

}  // namespace

Result<ZipDirectory> ZipDirectory::Read(const SourceFile& file) {
  if (auto end = CheckEnd(file); !end.ok()) {
    return std::move(end).error();
  }
  const auto stream = std::make_unique<CachedStream>(CachedStream{file, 0, 0, 0, {}, {}});
  auto calls = Callbacks(*stream);
  const ZipHandle zip(unzOpen2_64("model", &calls));
  if (!stream->status.ok()) {
    return std::move(stream->status).error();
  }
  if (zip == nullptr) {
    return file.Bad("the zip directory at its end is damaged");
  }
  unz_global_info64 global{};
  if (unzGetGlobalInfo64(zip.get(), &global) != UNZ_OK || global.number_entry == 0) {
    return file.Bad("is a zip archive without records");
  }
  ZipDirectory directory;
  auto records = ReadAll(file, zip.get());
  if (!records.ok()) {
    return stream->status.ok() ? std::move(records).error() : std::move(stream->status).error();
  }
  directory.records_ = std::move(*records);
  if (auto indexed = directory.Index(file); !indexed.ok()) {
    return std::move(indexed).error();
  }
  return directory;
}

Result<void> ZipDirectory::Index(const SourceFile& file) {
  std::sort(records_.begin(), records_.end(),
            [](const ZipRecord& a, const ZipRecord& b) { return a.name < b.name; });
  std::set<std::string> tops;
  bool outside = false;
  for (std::size_t i = 0; i < records_.size(); ++i) {
    const std::string& name = records_[i].name;
    if (i > 0 && records_[i - 1].name == name) {
      return file.Bad("record " + Quoted(name) + " occurs twice in the zip archive");
    }
    const std::size_t slash = name.find('/');
    outside = outside || slash == std::string::npos;
    tops.insert(name.substr(0, slash));
  }
  tops_.assign(tops.begin(), tops.end());
  folder_ = !outside && tops_.size() == 1 ? tops_.front() : "";
  return CheckDisjoint(file, records_);
}

const ZipRecord* ZipDirectory::Find(std::string_view name) const {
  const auto found = std::lower_bound(
      records_.begin(), records_.end(), name,
      [](const ZipRecord& record, std::string_view wanted) { return record.name < wanted; });
  return found != records_.end() && found->name == name ? &*found : nullptr;
}

const ZipRecord* ZipDirectory::FindInFolder(std::string_view base) const {
  for (const std::string& top : tops_) {
    if (const ZipRecord* record = Find(top + "/" + std::string(base))) {
      return record;
    }
  }
  return nullptr;
}

Result<std::string> ReadRecord(std::span<const SourceFile> files, std::size_t file,
                               const ZipRecord& record, std::uint64_t max_bytes) {
  if (record.size_bytes > max_bytes) {
    return files[file].Bad("record " + Quoted(record.name) + " has " +
                           std::to_string(record.size_bytes) + " bytes, limit " +
                           std::to_string(max_bytes));
  }
  const PlannedStorage storage{"record " + Quoted(record.name), record.size_bytes,
                               RecordBytes(file, record)};
  std::string text;
  text.reserve(record.size_bytes);
  std::vector<std::byte> scratch(std::min(record.size_bytes, kDigestLeafBytes));
  auto streamed = StreamStorage(files, storage, scratch, [&](std::span<const std::byte> leaf) {
    text.append(reinterpret_cast<const char*>(leaf.data()), leaf.size());
    return Result<void>();
  });
  if (!streamed.ok()) {
    return std::move(streamed).error();
  }
  return text;
}

StorageBytes RecordBytes(std::size_t file, const ZipRecord& record) {
  if (record.deflated) {
    return DeflatedBytes{file, record.data_offset_bytes, record.stored_bytes, 0};
  }
  return FileBytes{file, record.data_offset_bytes};
}

}  // namespace modelcache
