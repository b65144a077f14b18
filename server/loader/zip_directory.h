// The directory of a zip archive inside a model file: which records, where, how stored.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// One record. Its data range has been checked to lie inside the file.
struct ZipRecord {
  std::string name;                     // as in the directory, folders included
  std::uint64_t data_offset_bytes = 0;  // first byte of its data in the file
  std::uint64_t stored_bytes = 0;       // in the file
  std::uint64_t size_bytes = 0;         // after inflating; equals stored_bytes unless deflated
  std::uint32_t crc32 = 0;              // of the inflated bytes; torch.save may write any number
  bool deflated = false;
  bool name_is_utf8 = false;  // as its writer says
};

// Read once, whole; holds no reference to the file.
class ZipDirectory {
 public:
  // Errors: kBadFile (no or a damaged directory, data before or after the archive, headers that
  // differ from the directory, data outside the file, a size that a deflated record cannot have, a
  // name twice or with a zero byte, records that share bytes), kUnsupported (encryption, other
  // methods than stored and deflated), kFileChanged, kSystem; the message names the record.
  static Result<ZipDirectory> Read(const SourceFile& file);

  [[nodiscard]] const std::vector<ZipRecord>& records() const { return records_; }

  // The one top folder of all records, without '/'; empty when some lie outside of it.
  [[nodiscard]] const std::string& folder() const { return folder_; }
  // Every different first path component, for messages.
  [[nodiscard]] const std::vector<std::string>& tops() const { return tops_; }

  // The record with exactly this name; null if there is none. Valid while the directory lives.
  [[nodiscard]] const ZipRecord* Find(std::string_view name) const;

  // Errors: kBadFile, two names that differ in the case of ASCII letters alone. torch finds records
  // whatever their case, and would take either.
  [[nodiscard]] Result<void> CheckCases(const SourceFile& file) const;

  // The record "<folder>/<base>", whatever the folder is called.
  [[nodiscard]] const ZipRecord* FindInFolder(std::string_view base) const;

 private:
  Result<void> Index(const SourceFile& file);

  std::vector<ZipRecord> records_;  // by ascending name
  std::vector<std::string> tops_;
  std::string folder_;
};

// The whole record, inflated. Errors: kBadFile (damaged, or larger than `max_bytes`: both numbers
// are in the message), kFileChanged, kSystem.
Result<std::string> ReadRecord(std::span<const SourceFile> files, std::size_t file,
                               const ZipRecord& record, std::uint64_t max_bytes);

// Where the first `size_bytes` of a record come from.
StorageBytes RecordBytes(std::size_t file, const ZipRecord& record);

}  // namespace modelcache
