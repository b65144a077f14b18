// Where a socket lies, and which folders it may lie in.
#include "common/socket_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "tests/support/catch.h"
#include "tests/support/temp_dir.h"

using namespace modelcache;

TEST_CASE("SocketFolder: a missing one is made, for this user alone", "[unit]") {
  const TempDir dir;
  REQUIRE(PrepareSocketFolder(dir / "run/socket").ok());
  struct stat status = {};
  REQUIRE(::stat((dir / "run").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777U) == 0700U);
  CHECK(PrepareSocketFolder(dir / "run/socket").ok());
  CHECK(PrepareSocketFolder(dir / "no/such/socket").error().code == ErrorCode::kNotFound);
}

TEST_CASE("SocketFolder: a check makes nothing", "[unit]") {
  const TempDir dir;
  CHECK(CheckSocketFolder(dir / "run/socket").error().code == ErrorCode::kNotFound);
  CHECK_FALSE(std::filesystem::exists(dir / "run"));
  CHECK(CheckSocketFolder(dir / "socket").ok());
}

TEST_CASE("SocketFolder: daemon and client refuse the same folders", "[unit]") {
  const TempDir dir;
  const std::string inner = dir / "run";
  std::filesystem::create_directory(inner);
  const auto code = [](const std::string& path) { return PrepareSocketFolder(path).error().code; };
  SECTION("a symlink, a file") {
    std::filesystem::create_symlink(inner, dir / "link");
    (void)dir.Write("file", "x");
    CHECK(code(dir / "link/socket") == ErrorCode::kInvalidArgument);
    CHECK(code(dir / "file/socket") == ErrorCode::kInvalidArgument);
  }
  SECTION("writable by others, unless sticky") {
    for (const mode_t mode : {0777U, 0770U}) {
      REQUIRE(::chmod(inner.c_str(), mode) == 0);
      CHECK(code(inner + "/socket") == ErrorCode::kPermission);
    }
    REQUIRE(::chmod(inner.c_str(), 01777) == 0);
    CHECK(PrepareSocketFolder(inner + "/socket").ok());
  }
  SECTION("of another user") {
    if (::geteuid() != 0) {
      WARN("skipped: only root can give a folder away");
      return;
    }
    REQUIRE(::chown(inner.c_str(), 12345, 12345) == 0);
    CHECK(code(inner + "/socket") == ErrorCode::kPermission);
  }
}

TEST_CASE("SocketFolder: the folder of a path", "[unit]") {
  CHECK(FolderOf("socket") == ".");
  CHECK(FolderOf("/socket") == "/");
  CHECK(FolderOf("/run/x/socket") == "/run/x");
}

TEST_CASE("SocketFolder: a path of 107 bytes is accepted, 108 is refused with both numbers",
          "[unit]") {
  CHECK(CheckSocketPath(std::string(107, 'a')).ok());
  const auto refused = CheckSocketPath(std::string(108, 'a'));
  REQUIRE_FALSE(refused.ok());
  CHECK_THAT(refused.error().message, Contains("108 bytes, limit 107"));
  CHECK_FALSE(CheckSocketPath("").ok());
}

TEST_CASE("SocketFolder: the default path follows the environment", "[unit]") {
  REQUIRE(::setenv("MODELCACHE_SOCKET", "/x/socket", 1) == 0);
  CHECK(DefaultSocketPath().value() == "/x/socket");
  REQUIRE(::unsetenv("MODELCACHE_SOCKET") == 0);
  REQUIRE(::setenv("XDG_RUNTIME_DIR", "/run/user/7", 1) == 0);
  CHECK(DefaultSocketPath().value() == "/run/user/7/modelcache/socket");
  REQUIRE(::setenv("XDG_RUNTIME_DIR", ("/" + std::string(200, 'd')).c_str(), 1) == 0);
  CHECK(DefaultSocketPath().error().code == ErrorCode::kInvalidArgument);
}
