// Model ids from file identities, and differences in words.
#include "server/identity.h"

#include <algorithm>
#include <array>

#include "common/digest.h"

namespace modelcache {
namespace {

// Every text is preceded by its length, so that no two lists of fields give the same bytes.
void AppendText(std::string& bytes, std::string_view text) {
  const std::uint64_t size = text.size();
  bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
  bytes.append(text);
}

void AppendStat(std::string& bytes, const FileStat& stat) {
  const std::array<std::uint64_t, 5> fields{stat.device, stat.inode, stat.size_bytes,
                                            static_cast<std::uint64_t>(stat.mtime_ns),
                                            static_cast<std::uint64_t>(stat.ctime_ns)};
  bytes.append(reinterpret_cast<const char*>(fields.data()), sizeof fields);
}

struct Field {
  std::string_view what;
  std::string_view unit;
  std::string before;
  std::string now;
};

std::string Describe(const std::string& name, const FileStat& before, const FileStat& now) {
  const std::array<Field, 5> fields{{
      {"size", " bytes", std::to_string(before.size_bytes), std::to_string(now.size_bytes)},
      {"inode", "", std::to_string(before.inode), std::to_string(now.inode)},
      {"device", "", std::to_string(before.device), std::to_string(now.device)},
      {"mtime", " ns", std::to_string(before.mtime_ns), std::to_string(now.mtime_ns)},
      {"ctime", " ns", std::to_string(before.ctime_ns), std::to_string(now.ctime_ns)},
  }};
  std::string text;
  for (const Field& field : fields) {
    if (field.before != field.now) {
      text += (text.empty() ? "" : ", ") + std::string(field.what) + " of " + name + " " +
              field.before + " -> " + field.now + std::string(field.unit);
    }
  }
  return text;
}

}  // namespace

ModelId ComputeModelId(std::span<const FileRef> files, std::span<const FileStat> stats,
                       std::string_view format, std::string_view device) {
  std::string bytes;
  bytes.reserve(64 + 64 * files.size());
  AppendText(bytes, format);
  AppendText(bytes, device);
  for (std::size_t i = 0; i < files.size(); ++i) {
    AppendText(bytes, files.size() > 1 ? std::string_view(files[i].name) : std::string_view());
    AppendStat(bytes, stats[i]);
  }
  return ModelId{HashBytes(std::as_bytes(std::span(bytes))).bytes};
}

std::string DefaultName(std::span<const FileRef> files) {
  if (files.empty()) {
    return {};
  }
  const std::string& first = files.front().path;
  const std::size_t slash = first.rfind('/');
  return files.size() == 1 || slash == std::string::npos ? first : first.substr(0, slash);
}

bool SameFiles(std::span<const FileIdentity> before, std::span<const FileIdentity> now) {
  if (before.size() != now.size()) {
    return false;
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool names_count = before.size() > 1;
    if (before[i].stat != now[i].stat || (names_count && before[i].name != now[i].name)) {
      return false;
    }
  }
  return true;
}

bool Supersedes(std::span<const FileIdentity> now, std::span<const FileIdentity> before) {
  // Another device number at the same path is another mount namespace, not a newer file.
  if (now.empty() || before.empty() || now[0].path != before[0].path ||
      now[0].stat.device != before[0].stat.device) {
    return false;
  }
  const auto same_path = [](const FileIdentity& a, const FileIdentity& b) {
    return a.path == b.path;
  };
  return now[0].stat != before[0].stat ||
         (std::equal(now.begin(), now.end(), before.begin(), before.end(), same_path) &&
          !SameFiles(before, now));
}

std::string DescribeChange(std::span<const FileIdentity> before,
                           std::span<const FileIdentity> now) {
  if (before.size() != now.size()) {
    return "number of files " + std::to_string(before.size()) + " -> " + std::to_string(now.size());
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before.size() > 1 && before[i].name != now[i].name) {
      return "file " + std::to_string(i) + " " + before[i].name + " -> " + now[i].name;
    }
    if (before[i].stat != now[i].stat) {
      return Describe(now[i].name, before[i].stat, now[i].stat);
    }
  }
  return "nothing";
}

}  // namespace modelcache
