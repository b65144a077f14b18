// Memfds and mappings: seals, copy-on-write, alignment, and no leak whatever call fails.
#include "common/memfd.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "common/mapping.h"
#include "tests/support/catch.h"
#include "tests/support/fake_sys.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kHuge = 2U << 20U;

int CountOpenDescriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) {
    ++count;
  }
  ::closedir(folder);
  return count;
}

int CountMaps() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(maps, line)) {
    ++count;
  }
  return count;
}

TEST_CASE("Memfd: has its final size and cannot grow or shrink", "[unit]") {
  auto fd = CreateMemfd("test", 8192);
  REQUIRE(fd.ok());
  const auto info = InspectMemfd(fd->get());
  REQUIRE(info.ok());
  CHECK(info->size_bytes == 8192);
  CHECK(info->allocated_bytes == 0);
  CHECK(info->inode != 0);
  CHECK_FALSE(IsSealed(*info));
  CHECK(::ftruncate(fd->get(), 4096) == -1);
  CHECK(::ftruncate(fd->get(), 16384) == -1);
  CHECK((::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("Memfd: is not executable", "[unit]") {
  auto fd = CreateMemfd("test", 4096);
  REQUIRE(fd.ok());
  struct stat status = {};
  REQUIRE(::fstat(fd->get(), &status) == 0);
  CHECK((status.st_mode & 0111U) == 0);
}

TEST_CASE("Memfd: a kernel without the no-exec flag still gets a sealable one", "[unit]") {
  FakeSys sys(0, EINVAL);
  auto fd = CreateMemfd("test", 4096, sys);
  REQUIRE(fd.ok());
  CHECK((sys.last_memfd_flags() & MFD_ALLOW_SEALING) != 0);
  CHECK((sys.last_memfd_flags() & 8U) == 0);
}

TEST_CASE("Memfd: sealing needs the writable map gone, then nothing writes any more", "[unit]") {
  auto fd = CreateMemfd("test", 4096);
  REQUIRE(fd.ok());
  {
    auto map = Mapping::Map(fd->get(), {0, 4096}, Access::kWrite);
    REQUIRE(map.ok());
    map->data()[0] = std::byte{7};
    CHECK(SealMemfd(fd->get()).error().code == ErrorCode::kInUse);
  }
  REQUIRE(SealMemfd(fd->get()).ok());
  CHECK(IsSealed(InspectMemfd(fd->get()).value()));
  CHECK(::pwrite(fd->get(), "x", 1, 0) == -1);
  CHECK_FALSE(Mapping::Map(fd->get(), {0, 4096}, Access::kWrite).ok());
}

TEST_CASE("Memfd: a private map of a sealed memfd keeps its writes to itself", "[unit]") {
  auto fd = CreateMemfd("test", 4096);
  REQUIRE(fd.ok());
  REQUIRE(SealMemfd(fd->get()).ok());
  auto first = Mapping::Map(fd->get(), {0, 4096}, Access::kCopyOnWrite);
  auto second = Mapping::Map(fd->get(), {0, 4096}, Access::kCopyOnWrite);
  REQUIRE(first.ok());
  REQUIRE(second.ok());
  first->data()[10] = std::byte{1};
  CHECK(second->data()[10] == std::byte{0});
}

TEST_CASE("Memfd: an ordinary descriptor is refused", "[unit]") {
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK(InspectMemfd(null.get()).error().code == ErrorCode::kCorrupt);
}

TEST_CASE("Mapping: address and offset agree modulo 2 MiB for large ranges", "[unit]") {
  auto fd = CreateMemfd("test", 4 * kHuge);
  REQUIRE(fd.ok());
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{4096}, kHuge + 100}) {
    auto map = Mapping::Map(fd->get(), {offset, 2 * kHuge}, Access::kRead);
    REQUIRE(map.ok());
    CHECK((reinterpret_cast<std::uint64_t>(map->data()) - offset) % kHuge == 0);
    CHECK(map->size() == 2 * kHuge);
    CHECK(map->data()[2 * kHuge - 1] == std::byte{0});
  }
}

TEST_CASE("Mapping: an empty range maps nothing, an impossible one is an error", "[unit]") {
  auto fd = CreateMemfd("test", 4096);
  REQUIRE(fd.ok());
  CHECK(Mapping::Map(fd->get(), {0, 0}, Access::kRead)->size() == 0);
  CHECK_FALSE(Mapping::Map(fd->get(), {UINT64_MAX - 1, 4096}, Access::kRead).ok());
  CHECK_FALSE(Mapping::Map(fd->get(), {0, UINT64_MAX}, Access::kRead).ok());
}

TEST_CASE("Memfd: a sealed one holds its bytes for good", "[unit]") {
  const std::string text(3U << 20U, 'x');
  auto fd = MakeSealedMemfd("test", std::as_bytes(std::span(text)));
  REQUIRE(fd.ok());
  CHECK(IsSealed(*InspectMemfd(fd->get())));
  CHECK(InspectMemfd(fd->get())->size_bytes == text.size());
  auto map = Mapping::Map(fd->get(), {0, text.size()}, Access::kRead);
  REQUIRE(map.ok());
  CHECK(std::memcmp(map->data(), text.data(), text.size()) == 0);
  auto empty = MakeSealedMemfd("test", {});
  REQUIRE(empty.ok());
  CHECK(IsSealed(*InspectMemfd(empty->get())));
}

TEST_CASE("Memfd, Mapping: whichever call fails, no descriptor and no map is left", "[unit]") {
  const int descriptors = CountOpenDescriptors();
  const int maps = CountMaps();
  int failures = 0;
  for (int n = 0;; ++n) {
    FakeSys sys(n);
    bool worked = false;
    {
      auto fd = CreateMemfd("test", 2 * kHuge, sys);
      if (fd.ok()) {
        auto map = Mapping::Map(fd->get(), {0, 2 * kHuge}, Access::kCopyOnWrite, sys);
        worked = map.ok() && InspectMemfd(fd->get(), sys).ok() && SealMemfd(fd->get(), sys).ok();
      }
    }
    CHECK(CountOpenDescriptors() == descriptors);
    CHECK(CountMaps() <= maps + 1);  // the stream buffer of the counter itself may add one
    if (!sys.failed()) {
      CHECK(worked);
      break;
    }
    CHECK_FALSE(worked);
    ++failures;
  }
  CHECK(failures == 8);
}

}  // namespace
}  // namespace modelcache
