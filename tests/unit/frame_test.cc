// Frames: encoding, hostile headers, pieces of any size, descriptors.
#include "proto/frame.h"

#include <fcntl.h>

#include <string>

#include "common/socket.h"
#include "proto/frame_channel.h"
#include "proto/version.h"
#include "tests/support/catch.h"

namespace modelcache {
namespace {

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string OneFrame(std::string_view body, std::uint8_t descriptors = 0) {
  FrameHeader header;
  header.type = MessageType::kOpen;
  header.request_id = 0x01020304;
  header.descriptor_count = descriptors;
  return EncodeFrame(header, body);
}

UniqueFd Null() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

TEST_CASE("Frame: the header has the documented bytes", "[unit]") {
  const std::string bytes = OneFrame("{}", 2);
  CHECK(bytes.substr(0, 4) == "MDLC");
  CHECK(bytes[4] == static_cast<char>(kProtocolVersion));
  CHECK(bytes[5] == 2);
  CHECK(bytes[6] == 0);
  CHECK(bytes[7] == 2);
  CHECK(bytes.substr(8, 4) == "\x04\x03\x02\x01");
  CHECK(bytes.substr(12, 4) == std::string("\x02\0\0\0", 4));
  CHECK(bytes.substr(16) == "{}");
}

TEST_CASE("FrameReader: byte by byte gives the same frames as all at once", "[unit]") {
  const std::string stream = OneFrame("{\"a\":1}") + OneFrame("") + OneFrame("{}");
  FrameReader reader;
  std::vector<std::string> bodies;
  for (const char& byte : stream) {
    REQUIRE(reader.Feed(Bytes(std::string(1, byte)), {}).ok());
    while (true) {
      auto next = reader.Next();
      REQUIRE(next.ok());
      if (!next->has_value()) {
        break;
      }
      CHECK((*next)->header.request_id == 0x01020304);
      bodies.push_back((*next)->body);
    }
  }
  CHECK(bodies == std::vector<std::string>{"{\"a\":1}", "", "{}"});
}

TEST_CASE("FrameReader: garbage is a protocol error", "[unit]") {
  FrameReader reader;
  REQUIRE(reader.Feed(Bytes(std::string(64, 'g')), {}).ok());
  CHECK(reader.Next().error().code == ErrorCode::kProtocol);
}

TEST_CASE("FrameReader: a body over the limit is refused before it is there", "[unit]") {
  std::string bytes = OneFrame("{}");
  bytes[15] = '\x7f';  // about 2 GiB
  FrameReader reader(1024);
  REQUIRE(reader.Feed(Bytes(bytes), {}).ok());
  const auto next = reader.Next();
  REQUIRE_FALSE(next.ok());
  CHECK_THAT(next.error().message, Contains("limit 1024"));
}

TEST_CASE("FrameReader: an old version is refused except in a hello", "[unit]") {
  std::string bytes = OneFrame("{}");
  bytes[4] = '\0';
  FrameReader reader;
  REQUIRE(reader.Feed(Bytes(bytes), {}).ok());
  CHECK(reader.Next().error().code == ErrorCode::kProtocol);
  bytes[5] = '\x01';
  FrameReader other;
  REQUIRE(other.Feed(Bytes(bytes), {}).ok());
  CHECK(other.Next().ok());
}

TEST_CASE("FrameReader: descriptors go to the frames that announced them", "[unit]") {
  FrameReader reader;
  std::vector<UniqueFd> descriptors;
  descriptors.push_back(Null());
  descriptors.push_back(Null());
  const int second = descriptors[1].get();
  const auto fed = reader.Feed(Bytes(OneFrame("a", 1) + OneFrame("b", 1)), std::move(descriptors));
  REQUIRE(fed.ok());
  auto first_frame = reader.Next();
  auto second_frame = reader.Next();
  REQUIRE(first_frame.ok());
  REQUIRE(second_frame.ok());
  CHECK((*first_frame)->descriptors.size() == 1);
  REQUIRE((*second_frame)->descriptors.size() == 1);
  CHECK((*second_frame)->descriptors[0].get() == second);
}

TEST_CASE("FrameReader: dropped descriptors are noticed and the stream goes on", "[unit]") {
  FrameReader reader;
  std::vector<UniqueFd> one;
  one.push_back(Null());
  const auto fed = reader.Feed(Bytes(OneFrame("a", 3)), std::move(one));
  REQUIRE(fed.ok());
  auto frame = reader.Next();
  REQUIRE(frame.ok());
  CHECK((*frame)->DescriptorsMissing());
  CHECK((*frame)->MissingDescriptorsError().code == ErrorCode::kLimit);
  CHECK_THAT((*frame)->MissingDescriptorsError().message, Contains("3 descriptors were sent, 1"));
  REQUIRE(reader.Feed(Bytes(OneFrame("b")), {}).ok());
  CHECK((*reader.Next())->body == "b");
}

TEST_CASE("FrameReader: unannounced descriptors cannot pile up", "[unit]") {
  FrameReader reader;
  Result<void> fed;
  for (int i = 0; i < 600 && fed.ok(); ++i) {
    std::vector<UniqueFd> one;
    one.push_back(Null());
    fed = reader.Feed({}, std::move(one));
  }
  CHECK(fed.error().code == ErrorCode::kProtocol);
}

TEST_CASE("FrameReader: a frame's worth of descriptors may wait for their frame, no more",
          "[unit]") {
  FrameReader reader;
  const auto feed = [&](std::size_t count) {
    std::vector<UniqueFd> some;
    for (std::size_t i = 0; i < count; ++i) {
      some.push_back(Null());
    }
    const auto fed = reader.Feed({}, std::move(some));
    REQUIRE(fed.ok());
  };
  feed(253);
  CHECK(reader.Next().ok());
  feed(1);
  const auto next = reader.Next();
  REQUIRE_FALSE(next.ok());
  CHECK(next.error().code == ErrorCode::kProtocol);
  CHECK_THAT(next.error().message, Contains("254 descriptors") && Contains("limit 253"));
}

TEST_CASE("FrameChannel: a frame larger than the socket buffer arrives whole", "[unit]") {
  auto pair = MakeSocketPair();
  REQUIRE(pair.ok());
  FrameChannel near(std::move(pair->first));
  FrameChannel far(std::move(pair->second));
  FrameHeader header;
  header.type = MessageType::kList;
  const auto deadline = DeadlineAfter(std::chrono::seconds(5));
  const std::string body(100000, 'x');
  const UniqueFd null = Null();
  const int raw = null.get();
  REQUIRE(near.Send(header, body, std::span(&raw, 1), deadline).ok());
  auto frame = far.Receive(deadline);
  REQUIRE(frame.ok());
  CHECK(frame->body == body);
  CHECK(frame->descriptors.size() == 1);
}

TEST_CASE("FrameChannel: silence is a timeout, a closed peer is kUnavailable", "[unit]") {
  auto pair = MakeSocketPair();
  REQUIRE(pair.ok());
  FrameChannel near(std::move(pair->first));
  CHECK(near.Receive(DeadlineAfter(Duration::zero())).error().code == ErrorCode::kTimeout);
  pair->second.Reset();
  CHECK(near.Receive(kNoDeadline).error().code == ErrorCode::kUnavailable);
}

TEST_CASE("FrameChannel: too many descriptors are refused with both numbers", "[unit]") {
  auto pair = MakeSocketPair();
  REQUIRE(pair.ok());
  FrameChannel near(std::move(pair->first));
  const std::vector<int> many(254, 0);
  const auto sent = near.Send({}, "", many, kNoDeadline);
  REQUIRE_FALSE(sent.ok());
  CHECK_THAT(sent.error().message, Contains("254 descriptors"));
}

}  // namespace
}  // namespace modelcache
