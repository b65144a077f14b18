// End record, directory and local headers, each checked against the others and the file. Offsets
// are those of APPNOTE.TXT, the specification of the format.
#include "server/loader/zip_directory.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "common/checked_math.h"
#include "common/digest.h"
#include "server/loader/storage_stream.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMostRecords = 4U << 20U;
constexpr std::uint64_t kMostDirectoryBytes = 1U << 30U;
// Deflate cannot do better than 1032 : 1; what claims more would only make us reserve memory.
constexpr std::uint64_t kMostInflation = 1032;
constexpr std::uint64_t kInflationSlackBytes = 1024;

constexpr std::string_view kLocalSignature{"PK\x03\x04"};
constexpr std::string_view kCentralSignature{"PK\x01\x02"};
constexpr std::string_view kEndSignature{"PK\x05\x06"};
constexpr std::string_view kEnd64Signature{"PK\x06\x06"};
constexpr std::string_view kLocatorSignature{"PK\x06\x07"};
// Without names, comments and extra fields.
constexpr std::size_t kLocalBytes = 30;
constexpr std::size_t kCentralBytes = 46;
constexpr std::size_t kEndBytes = 22;
constexpr std::size_t kEnd64Bytes = 56;
constexpr std::size_t kLocatorBytes = 20;
constexpr std::uint64_t kMaxCommentBytes = 65535;

template <typename Number>
Number Field(std::string_view bytes, std::size_t at) {
  Number value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Where the directory lies, and how many records it lists.
struct Directory {
  ByteRange range;
  std::uint64_t records = 0;
};

// The last bytes of the file: as many as an end record, its comment and what stands before take.
struct Tail {
  std::string text;
  std::uint64_t offset_bytes = 0;  // of its first byte in the file
};

// The end record is the last one of the file, as in every other reader, and must reach exactly to
// its end: nobody then finds another directory than we do. Gives its place in the tail.
Result<std::size_t> FindEnd(const SourceFile& file, const Tail& tail) {
  const std::size_t at = tail.text.rfind(kEndSignature);
  if (at == std::string::npos) {
    return file.Bad("starts like a zip archive, but has no zip directory at its end: " +
                    std::to_string(file.size()) + " bytes, probably cut short");
  }
  const std::uint64_t left = tail.text.size() - at;
  const std::uint64_t needed =
      left < kEndBytes ? kEndBytes
                       : kEndBytes + Field<std::uint16_t>(tail.text, at + kEndBytes - 2);
  if (needed != left) {
    return file.Bad("the end record of the zip archive at byte " +
                    std::to_string(tail.offset_bytes + at) + " takes " + std::to_string(needed) +
                    " bytes with its comment, but " + std::to_string(left) + " are left: " +
                    (left < needed ? "it is cut short" : "other data follows the archive"));
  }
  return at;
}

// One number that both end records have: all ones in the short one leave it to the long one.
bool Agree(std::uint64_t brief, std::uint64_t full, std::uint64_t all_ones) {
  return brief == full || brief == all_ones;
}

// Takes the numbers of the 64-bit end record that the locator at `locator_at` of the file names.
// Gives where that record starts.
Result<std::uint64_t> ReadEnd64(const SourceFile& file, std::string_view locator,
                                std::uint64_t locator_at, Directory& directory) {
  const auto at = Field<std::uint64_t>(locator, 8);
  const auto damaged = [&] {
    return file.Bad("the 64-bit end record of the zip archive, at byte " + std::to_string(at) +
                    ", does not agree with the other one");
  };
  if (!Within({at, kEnd64Bytes}, locator_at)) {
    return damaged();
  }
  auto record = file.ReadText({at, kEnd64Bytes});
  if (!record.ok()) {
    return std::move(record).error();
  }
  const auto size = CheckedAdd(Field<std::uint64_t>(*record, 4), 12);
  const std::uint64_t count = Field<std::uint64_t>(*record, 32);
  const ByteRange range{Field<std::uint64_t>(*record, 48), Field<std::uint64_t>(*record, 40)};
  const bool sound = record->compare(0, 4, kEnd64Signature) == 0 && size == locator_at - at &&
                     Field<std::uint64_t>(*record, 16) == 0 &&
                     Field<std::uint64_t>(*record, 24) == count &&
                     Agree(directory.records, count, UINT16_MAX) &&
                     Agree(directory.range.size_bytes, range.size_bytes, UINT32_MAX) &&
                     Agree(directory.range.offset_bytes, range.offset_bytes, UINT32_MAX);
  if (!sound) {
    return damaged();
  }
  directory = {range, count};
  return at;
}

// The directory must end where the end records start: what else would stand between could be a
// second archive, and offsets would count from another place than the start of the file.
Result<Directory> FindDirectory(const SourceFile& file) {
  const std::uint64_t size = std::min(file.size(), kLocatorBytes + kEndBytes + kMaxCommentBytes);
  auto text = file.ReadText({file.size() - size, size});
  if (!text.ok()) {
    return std::move(text).error();
  }
  const Tail tail{std::move(*text), file.size() - size};
  auto end = FindEnd(file, tail);
  if (!end.ok()) {
    return std::move(end).error();
  }
  const std::string_view record = std::string_view(tail.text).substr(*end);
  Directory directory{{Field<std::uint32_t>(record, 16), Field<std::uint32_t>(record, 12)},
                      Field<std::uint16_t>(record, 10)};
  std::uint64_t ends_at = tail.offset_bytes + *end;
  const std::string_view before = std::string_view(tail.text).substr(0, *end);
  if (before.size() >= kLocatorBytes &&
      before.substr(before.size() - kLocatorBytes, 4) == kLocatorSignature) {
    const std::string_view locator = before.substr(before.size() - kLocatorBytes);
    auto long_end = ReadEnd64(file, locator, ends_at - kLocatorBytes, directory);
    if (!long_end.ok()) {
      return std::move(long_end).error();
    }
    ends_at = *long_end;
  }
  const auto claimed = CheckedAdd(directory.range.offset_bytes, directory.range.size_bytes);
  if (claimed != ends_at || Field<std::uint32_t>(record, 4) != 0) {
    return file.Bad("the directory of the zip archive should end at byte " +
                    (claimed ? std::to_string(*claimed) : "over 2^64") +
                    ", but the end record starts at byte " + std::to_string(ends_at) +
                    ": other data stands before the archive, or it is one of several parts");
  }
  return directory;
}

// Sizes and place of a record that do not fit 32 bits, from its extra fields.
bool ReadExtra64(std::string_view extra, ZipRecord& record, std::uint64_t& header_at) {
  while (extra.size() >= 4) {
    const auto id = Field<std::uint16_t>(extra, 0);
    const auto size = Field<std::uint16_t>(extra, 2);
    extra.remove_prefix(4);
    if (size > extra.size()) {
      return false;
    }
    std::string_view field = extra.substr(0, size);
    extra.remove_prefix(size);
    if (id != 1) {
      continue;
    }
    for (std::uint64_t* number : {&record.size_bytes, &record.stored_bytes, &header_at}) {
      if (*number == UINT32_MAX) {
        if (field.size() < sizeof *number) {
          return false;
        }
        *number = Field<std::uint64_t>(field, 0);
        field.remove_prefix(sizeof *number);
      }
    }
    return true;
  }
  return record.size_bytes != UINT32_MAX && record.stored_bytes != UINT32_MAX &&
         header_at != UINT32_MAX;
}

struct Method {
  std::uint16_t number = 0;
  std::uint16_t flags = 0;
};

Result<void> CheckRecord(const SourceFile& file, const ZipRecord& record, Method method,
                         std::uint64_t directory_at) {
  const std::string what = "record " + Quoted(record.name);
  if ((method.flags & 1U) != 0) {
    return file.Fault(ErrorCode::kUnsupported, what + " is encrypted");
  }
  if (method.number != 0 && method.number != Z_DEFLATED) {
    return file.Fault(ErrorCode::kUnsupported,
                      what + " is compressed by method " + std::to_string(method.number) +
                          ", only stored (0) and deflated (8) records are read");
  }
  if (record.name.find('\0') != std::string::npos) {
    return file.Bad(what + " has a zero byte in its name");  // readers disagree about such names
  }
  if (!Within({record.data_offset_bytes, record.stored_bytes}, directory_at)) {
    return file.Bad(what + " has " + std::to_string(record.stored_bytes) + " bytes at byte " +
                    std::to_string(record.data_offset_bytes) +
                    ", but the directory starts at byte " + std::to_string(directory_at) +
                    " of the " + std::to_string(file.size()) + " bytes of the file");
  }
  const bool plausible = method.number == 0 ? record.size_bytes == record.stored_bytes
                                            : record.size_bytes / kMostInflation <=
                                                  record.stored_bytes + kInflationSlackBytes;
  if (!plausible) {
    return file.Bad(what + " claims " + std::to_string(record.size_bytes) + " bytes in " +
                    std::to_string(record.stored_bytes) + " stored ones");
  }
  return {};
}

// The header in front of the data must tell the same as the directory: a reader that goes by the
// one must see what a reader that goes by the other sees. Sets where the data starts.
Result<void> ReadLocalHeader(const SourceFile& file, std::uint64_t at, std::uint64_t directory_at,
                             Method method, ZipRecord& record) {
  const std::uint64_t size = kLocalBytes + record.name.size();
  const auto damaged = [&] {
    return file.Bad("record " + Quoted(record.name) + ": its local header at byte " +
                    std::to_string(at) + " is damaged or of another record");
  };
  if (!Within({at, size}, directory_at)) {
    return damaged();
  }
  auto header = file.ReadText({at, size});
  if (!header.ok()) {
    return std::move(header).error();
  }
  const auto same = [&](std::size_t field, std::uint64_t expected) {
    const auto found = Field<std::uint32_t>(*header, field);
    return found == expected || found == UINT32_MAX;
  };
  constexpr std::uint16_t kSizesFollow = 8;  // behind the data; the header has zeros
  const auto flags = Field<std::uint16_t>(*header, 6);
  const bool sound = header->compare(0, 4, kLocalSignature) == 0 &&
                     ((flags ^ method.flags) & 1U) == 0 &&
                     Field<std::uint16_t>(*header, 8) == method.number &&
                     Field<std::uint16_t>(*header, 26) == record.name.size() &&
                     header->compare(kLocalBytes, std::string::npos, record.name) == 0 &&
                     ((flags & kSizesFollow) != 0 ||
                      (Field<std::uint32_t>(*header, 14) == record.crc32 &&
                       same(18, record.stored_bytes) && same(22, record.size_bytes)));
  if (!sound) {
    return damaged();
  }
  record.data_offset_bytes = at + size + Field<std::uint16_t>(*header, 28);
  return {};
}

// The record at the start of `entry`, which becomes the rest of the directory.
Result<ZipRecord> ReadEntry(const SourceFile& file, std::uint64_t directory_at,
                            std::string_view& entry) {
  const auto damaged = [&] {
    return file.Bad("the zip directory is damaged, " + std::to_string(entry.size()) +
                    " bytes before its end");
  };
  if (entry.size() < kCentralBytes || entry.substr(0, 4) != kCentralSignature) {
    return damaged();
  }
  const std::size_t name_bytes = Field<std::uint16_t>(entry, 28);
  const std::size_t extra_bytes = Field<std::uint16_t>(entry, 30);
  const std::size_t size =
      kCentralBytes + name_bytes + extra_bytes + Field<std::uint16_t>(entry, 32);
  if (size > entry.size()) {
    return damaged();
  }
  constexpr std::uint16_t kUtf8Names = 1U << 11U;
  const Method method{Field<std::uint16_t>(entry, 10), Field<std::uint16_t>(entry, 8)};
  ZipRecord record;
  record.name = entry.substr(kCentralBytes, name_bytes);
  record.name_is_utf8 = (method.flags & kUtf8Names) != 0;
  record.crc32 = Field<std::uint32_t>(entry, 16);
  record.stored_bytes = Field<std::uint32_t>(entry, 20);
  record.size_bytes = Field<std::uint32_t>(entry, 24);
  record.deflated = method.number == Z_DEFLATED;
  std::uint64_t header_at = Field<std::uint32_t>(entry, 42);
  if (!ReadExtra64(entry.substr(kCentralBytes + name_bytes, extra_bytes), record, header_at)) {
    return damaged();
  }
  if (auto read = ReadLocalHeader(file, header_at, directory_at, method, record); !read.ok()) {
    return std::move(read).error();
  }
  if (auto checked = CheckRecord(file, record, method, directory_at); !checked.ok()) {
    return std::move(checked).error();
  }
  entry.remove_prefix(size);
  return record;
}

Result<std::vector<ZipRecord>> ReadAll(const SourceFile& file, const Directory& directory) {
  if (directory.range.size_bytes > kMostDirectoryBytes || directory.records > kMostRecords) {
    return file.Bad("zip archive of " + std::to_string(directory.records) +
                    " records in a directory of " + std::to_string(directory.range.size_bytes) +
                    " bytes, limits " + std::to_string(kMostRecords) + " and " +
                    std::to_string(kMostDirectoryBytes));
  }
  auto text = file.ReadText(directory.range);
  if (!text.ok()) {
    return std::move(text).error();
  }
  std::vector<ZipRecord> records;
  std::uint64_t count = 0;
  for (std::string_view rest = *text; !rest.empty(); ++count) {
    auto record = ReadEntry(file, directory.range.offset_bytes, rest);
    if (!record.ok()) {
      return std::move(record).error();
    }
    if (!record->name.ends_with('/')) {  // entries of folders hold nothing
      records.push_back(std::move(*record));
    }
  }
  if (count != directory.records) {
    return file.Bad("the zip directory lists " + std::to_string(count) +
                    " records, its end record says " + std::to_string(directory.records));
  }
  return records;
}

// From the local header on. Archives whose records share bytes inflate to any size, and a
// checkpoint that two readers see differently is no checkpoint.
ByteRange Extent(const ZipRecord& record) {
  const std::uint64_t header =
      std::min<std::uint64_t>(record.data_offset_bytes, kLocalBytes + record.name.size());
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
  auto found = FindDirectory(file);
  if (!found.ok()) {
    return std::move(found).error();
  }
  if (found->records == 0) {
    return file.Bad("is a zip archive without records");
  }
  auto records = ReadAll(file, *found);
  if (!records.ok()) {
    return std::move(records).error();
  }
  ZipDirectory directory;
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

Result<void> ZipDirectory::CheckCases(const SourceFile& file) const {
  std::map<std::string, std::string_view> known;
  for (const ZipRecord& record : records_) {
    std::string lower = record.name;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    const auto [first, added] = known.emplace(std::move(lower), record.name);
    if (!added) {
      return file.Bad("records " + Quoted(first->second) + " and " + Quoted(record.name) +
                      " differ in upper and lower case alone, which torch does not tell apart");
    }
  }
  return {};
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
