// PAGEMAP_SCAN where the kernel has it (Linux 6.7), else the entries of /proc/self/pagemap.
#include "client/written_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>

#include "common/unique_fd.h"

namespace modelcache {
namespace {

// linux/fs.h of Linux 6.7; headers may be older.
struct PageRegion {
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t categories;
};
struct ScanArguments {
  std::uint64_t size;
  std::uint64_t flags;
  std::uint64_t start;
  std::uint64_t end;
  std::uint64_t walk_end;
  std::uint64_t regions;
  std::uint64_t region_count;
  std::uint64_t max_pages;
  std::uint64_t category_inverted;
  std::uint64_t category_mask;
  std::uint64_t category_anyof_mask;
  std::uint64_t return_mask;
};
constexpr std::uint64_t kIsFile = 1U << 2U;
constexpr std::uint64_t kIsPresent = 1U << 3U;
constexpr std::uint64_t kIsSwapped = 1U << 4U;

// Bits of an entry of pagemap.
constexpr std::uint64_t kEntryFile = std::uint64_t{1} << 61U;
constexpr std::uint64_t kEntrySwapped = std::uint64_t{1} << 62U;
constexpr std::uint64_t kEntryPresent = std::uint64_t{1} << 63U;

struct PageRange {
  std::uint64_t start;
  std::uint64_t end;
};

PageRange PagesOf(const Mapping& mapping) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uint64_t>(mapping.data());
  return {first / page * page, (first + mapping.size() + page - 1) / page * page};
}

// A page that is there and not the file's. -1 and errno as ioctl.
int Scan(int pagemap, const PageRange& range) {
  PageRegion found = {};
  ScanArguments arguments = {};
  arguments.size = sizeof arguments;
  arguments.start = range.start;
  arguments.end = range.end;
  arguments.regions = reinterpret_cast<std::uint64_t>(&found);
  arguments.region_count = 1;
  arguments.max_pages = 1;
  arguments.category_inverted = kIsFile;
  arguments.category_mask = kIsFile;
  arguments.category_anyof_mask = kIsPresent | kIsSwapped;
  arguments.return_mask = kIsPresent;
  return ::ioctl(pagemap, _IOWR('f', 16, ScanArguments), &arguments);
}

Result<bool> ReadEntries(int pagemap, const PageRange& range) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::array<std::uint64_t, 8192> entries{};
  for (std::uint64_t at = range.start / page; at < range.end / page;) {
    const std::size_t count = std::min<std::uint64_t>(entries.size(), range.end / page - at);
    const ssize_t got = ::pread(pagemap, entries.data(), count * sizeof entries[0],
                                static_cast<off_t>(at * sizeof entries[0]));
    if (got <= 0) {
      return SystemError("read of /proc/self/pagemap", got < 0 ? errno : EIO);
    }
    const std::size_t read = static_cast<std::size_t>(got) / sizeof entries[0];
    const auto own = [](std::uint64_t entry) {
      return (entry & (kEntryPresent | kEntrySwapped)) != 0 && (entry & kEntryFile) == 0;
    };
    if (std::any_of(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(read), own)) {
      return true;
    }
    at += read;
  }
  return false;
}

}  // namespace

Result<bool> AnyPageWritten(std::span<const Mapping> mappings) {
  const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap.valid()) {
    return SystemError("open of /proc/self/pagemap", errno);
  }
  for (const Mapping& mapping : mappings) {
    const PageRange range = PagesOf(mapping);
    if (range.start == range.end) {
      continue;
    }
    const int scanned = Scan(pagemap.get(), range);
    Result<bool> written = scanned >= 0 ? scanned > 0 : ReadEntries(pagemap.get(), range);
    if (!written.ok() || *written) {
      return written;
    }
  }
  return false;
}

}  // namespace modelcache
