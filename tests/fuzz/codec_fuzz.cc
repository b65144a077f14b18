// Decode of every message: the first byte chooses it, the rest is the body. What decodes must
// encode, and decode again to the same text.
#include <string>

#include "proto/codec.h"
#include "tests/fuzz/fuzz_target.h"

namespace modelcache {
namespace {

template <typename Message>
void Try(std::string_view body) {
  auto message = Decode<Message>(body);
  if (!message.ok()) {
    Require(message.error().code == ErrorCode::kProtocol, "a bad body is a protocol error");
    Require(!message.error().message.empty(), "an error says something");
    return;
  }
  const std::string text = Encode(*message);
  auto again = Decode<Message>(text);
  Require(again.ok(), "what was encoded decodes");
  Require(Encode(*again) == text, "encoding is stable");
}

template <typename... Messages>
void TryNumber(std::size_t number, std::string_view body) {
  std::size_t index = 0;
  ((index++ == number % sizeof...(Messages) ? Try<Messages>(body) : void()), ...);
}

}  // namespace
}  // namespace modelcache

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace modelcache;  // NOLINT(google-build-using-namespace): the list below names them
                               // all
  if (size == 0) {
    return 0;
  }
  TryNumber<HelloRequest, HelloReply, ErrorReply, OpenRequest, OpenReply, ReleaseRequest,
            ArenaDescriptorsRequest, ProgressEvent, ModelRequest, PinRequest, ListReply,
            StatusReply, WhyReply, VerifyReply, MetricsReply, JobRequest, CandidatesRequest,
            CandidatesReply, ReserveRequest, ReserveReply, CommitRequest, LoaderProgressEvent>(
      data[0], AsText(data + 1, size - 1));
  return 0;
}
