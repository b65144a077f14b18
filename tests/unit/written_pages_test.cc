// Which pages of a private map are this process's own, as the kernel tells.
#include "client/written_pages.h"

#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "common/memfd.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kBytes = 8U << 20U;

// Private maps of one sealed memfd.
std::vector<Mapping> Maps(std::size_t count) {
  const std::string text(kBytes, 'x');
  const auto fd = MakeSealedMemfd("test", std::as_bytes(std::span(text)));
  std::vector<Mapping> maps;
  for (std::size_t i = 0; i < count; ++i) {
    maps.push_back(*Mapping::Map(fd->get(), {0, kBytes}, Access::kCopyOnWrite));
  }
  return maps;
}

TEST_CASE("WrittenPages: reading is no writing, one byte is", "[unit]") {
  std::vector<Mapping> maps = Maps(2);
  CHECK_FALSE(*AnyPageWritten(maps));
  std::uint64_t sum = 0;
  for (const std::byte byte : maps[0].bytes()) {
    sum += static_cast<std::uint64_t>(byte);
  }
  CHECK(sum == kBytes * 'x');
  maps[1].PopulateRead({0, kBytes});
  CHECK_FALSE(*AnyPageWritten(maps));
  maps[1].data()[kBytes - 1] = std::byte{0};
  CHECK(*AnyPageWritten(maps));
  CHECK_FALSE(*AnyPageWritten(std::span(maps).first(1)));
}

TEST_CASE("WrittenPages: nothing, and empty maps, are not written", "[unit]") {
  CHECK_FALSE(*AnyPageWritten({}));
  const std::vector<Mapping> empty(3);
  CHECK_FALSE(*AnyPageWritten(empty));
}

TEST_CASE("WrittenPages: a forked child sees what its parent wrote, and not the reverse",
          "[unit]") {
  std::vector<Mapping> maps = Maps(2);
  maps[0].data()[5] = std::byte{0};
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const bool inherited = *AnyPageWritten(std::span(maps).first(1));
    maps[1].data()[5] = std::byte{0};
    ::_exit(inherited && *AnyPageWritten(std::span(maps).last(1)) ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK_FALSE(*AnyPageWritten(std::span(maps).last(1)));
}

}  // namespace
}  // namespace modelcache
