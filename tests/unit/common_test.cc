// Errors, ids, checked arithmetic, descriptors, digests, sockets.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "common/checked_math.h"
#include "common/clock.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/ids.h"
#include "common/result.h"
#include "common/socket.h"
#include "common/unique_fd.h"
#include "common/utf8.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

TEST_CASE("Error: every code has a name of its own", "[unit]") {
  std::vector<std::string_view> names;
  for (std::uint16_t number = 0; number <= 19; ++number) {
    const auto name = ErrorCodeName(static_cast<ErrorCode>(number));
    CHECK(name != "unknown");
    CHECK(std::find(names.begin(), names.end(), name) == names.end());
    names.push_back(name);
  }
  CHECK(ErrorCodeName(static_cast<ErrorCode>(20)) == "unknown");
}

TEST_CASE("Text: control characters and broken UTF-8 are shown, everything else is kept",
          "[unit]") {
  CHECK(Printable("a\033[2Jb\n") == "a\\x1b[2Jb\\x0a");
  CHECK(Printable(std::string("w\0x", 3)) == "w\\x00x");
  CHECK(Printable("n\xc3\xa4me \xe2\x82\xac \xf0\x9f\x98\x80") ==
        "n\xc3\xa4me \xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(Printable("\xc2\x85\x7f") == "\\xc2\\x85\\x7f");
  CHECK(Printable("\xff\xc3") == "\\xff\\xc3");
  CHECK(Printable("").empty());
}

TEST_CASE("Error: errno values with a code of their own are mapped", "[unit]") {
  CHECK(SystemError("open", EMFILE).code == ErrorCode::kLimit);
  CHECK_THAT(SystemError("open", EMFILE).message, Contains("RLIMIT_NOFILE"));
  CHECK(SystemError("open", EACCES).code == ErrorCode::kPermission);
  CHECK(SystemError("open", ENOENT).code == ErrorCode::kNotFound);
  const Error other = SystemError("mmap", EIO);
  CHECK(other.code == ErrorCode::kSystem);
  CHECK(other.errno_value == EIO);
  CHECK_THAT(other.message, Contains("mmap: "));
}

TEST_CASE("Clock: file times of any year are plain, different numbers", "[unit]") {
  CHECK(ToNanoseconds({1, 5}) == 1'000'000'005);
  CHECK(ToNanoseconds({-1, 5}) == -999'999'995);
  CHECK(ToNanoseconds({INT64_MAX, 5}) != ToNanoseconds({INT64_MAX - 1, 5}));
  CHECK(ToNanoseconds({INT64_MIN, 0}) != ToNanoseconds({INT64_MIN, 1}));
  CHECK(Seconds(std::chrono::milliseconds(1500)) == 1.5);
}

TEST_CASE("Ids: hexadecimal text and back, anything else refused", "[unit]") {
  const std::string text = "00112233445566778899aabbccddeeff";
  const auto id = ArenaId::FromHex(text);
  REQUIRE(id);
  CHECK(id->Hex() == text);
  CHECK_FALSE(ArenaId::FromHex(text.substr(1)));
  CHECK_FALSE(ArenaId::FromHex("zz112233445566778899aabbccddeeff"));
}

TEST_CASE("Checked math: overflow is nothing, ranges never wrap", "[unit]") {
  constexpr std::uint64_t kMax = UINT64_MAX;
  CHECK_FALSE(CheckedAdd(kMax, 1));
  CHECK(CheckedAdd(kMax, 0) == kMax);
  CHECK_FALSE(CheckedMul(1ULL << 32U, 1ULL << 32U));
  CHECK(CheckedMul(1ULL << 32U, 2) == 1ULL << 33U);
  CHECK_FALSE(CheckedAlignUp(kMax, 64));
  CHECK(CheckedAlignUp(65, 64) == 128U);
  CHECK(Within({0, 8}, 8));
  CHECK_FALSE(Within({1, 8}, 8));
  CHECK_FALSE(Within({kMax, 2}, 8));
  CHECK_FALSE(Within({2, kMax}, 8));
}

TEST_CASE("UniqueFd: closes once, moves ownership", "[unit]") {
  int raw = -1;
  {
    UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    raw = fd.get();
    UniqueFd other(std::move(fd));
    CHECK(other.get() == raw);
    CHECK(IsOpen(raw));
  }
  CHECK_FALSE(IsOpen(raw));
}

TEST_CASE("Digest: depends on content, order and size", "[unit]") {
  const std::string zeros(kDigestLeafBytes + 5, '\0');
  std::string changed = zeros;
  changed.back() = 1;
  CHECK(HashStorage(Bytes(zeros)) == HashStorage(Bytes(zeros)));
  CHECK(HashStorage(Bytes(zeros)) != HashStorage(Bytes(changed)));
  CHECK(HashStorage(Bytes(zeros)) != HashStorage(Bytes(zeros).first(kDigestLeafBytes)));
  CHECK(HashStorage({}) != HashStorage(Bytes(std::string(1, '\0'))));
}

TEST_CASE("Digest: leaves hashed apart combine to the digest of the whole", "[unit]") {
  std::string text(2 * kDigestLeafBytes + 17, 'x');
  text[kDigestLeafBytes] = 'y';
  const auto bytes = Bytes(text);
  const std::array<Digest, 3> leaves = {
      HashBytes(bytes.first(kDigestLeafBytes)),
      HashBytes(bytes.subspan(kDigestLeafBytes, kDigestLeafBytes)),
      HashBytes(bytes.subspan(2 * kDigestLeafBytes))};
  CHECK(CombineLeaves(leaves, bytes.size()) == HashStorage(bytes));
}

TEST_CASE("Digest: a sample sees the ends, and reads small content whole", "[unit]") {
  std::string large(1U << 20U, 'a');
  std::string other = large;
  other.front() = 'b';
  CHECK(SampleStorage(Bytes(large)) != SampleStorage(Bytes(other)));
  other = large;
  other.back() = 'b';
  CHECK(SampleStorage(Bytes(large)) != SampleStorage(Bytes(other)));
  std::string small(10000, 'a');
  std::string middle = small;
  middle[5000] = 'b';
  CHECK(SampleStorage(Bytes(small)) != SampleStorage(Bytes(middle)));
}

TEST_CASE("Utf8: text is accepted, everything else is not", "[unit]") {
  for (const char* text :
       {"", "a", "n\xC3\xA4me", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\x9F\xBF"}) {
    CHECK(IsUtf8(text));
  }
  for (const char* bytes : {"\xFF\xFE", "\x80", "\xC3", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80",
                            "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE2\x82", "a\xC3("}) {
    CHECK_FALSE(IsUtf8(bytes));
  }
}

TEST_CASE("Socket: descriptors travel with the bytes and are close-on-exec", "[unit]") {
  auto pair = MakeSocketPair();
  REQUIRE(pair.ok());
  UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::array<int, 1> sent = {null.get()};
  REQUIRE(SendAll(pair->first.get(), Bytes("hello"), sent, DeadlineAfter(std::chrono::seconds(5)))
              .ok());
  std::array<std::byte, 64> buffer;
  std::vector<UniqueFd> received;
  auto got = ReceiveSome(pair->second.get(), buffer, received);
  REQUIRE(got.ok());
  CHECK(got->size_bytes == 5);
  REQUIRE(received.size() == 1);
  CHECK((::fcntl(received[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("Socket: an empty socket would block, a closed one says so", "[unit]") {
  auto pair = MakeSocketPair();
  REQUIRE(pair.ok());
  std::array<std::byte, 8> buffer;
  std::vector<UniqueFd> none;
  CHECK(ReceiveSome(pair->second.get(), buffer, none)->would_block);
  CHECK(WaitReadable(pair->second.get(), DeadlineAfter(Duration::zero())).error().code ==
        ErrorCode::kTimeout);
  pair->first.Reset();
  CHECK(ReceiveSome(pair->second.get(), buffer, none)->closed);
  CHECK(SendSome(pair->second.get(), Bytes("x"), {}).error().code == ErrorCode::kUnavailable);
}

TEST_CASE("Socket: nobody listening is kUnavailable", "[unit]") {
  CHECK(ConnectUnix("/nonexistent/socket").error().code == ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace modelcache
