// Messages: round trips, and every way a body can be wrong.
#include "proto/codec.h"

#include <string>

#include "tests/support/catch.h"

namespace modelcache {
namespace {

ModelId SomeId() { return *ModelId::FromHex("00112233445566778899aabbccddeeff"); }

template <typename Message>
Message RoundTrip(const Message& message) {
  auto decoded = Decode<Message>(Encode(message));
  REQUIRE(decoded.ok());
  return *decoded;
}

template <typename Message>
std::string ErrorOf(const std::string& body) {
  auto decoded = Decode<Message>(body);
  REQUIRE_FALSE(decoded.ok());
  CHECK(decoded.error().code == ErrorCode::kProtocol);
  return decoded.error().message;
}

TEST_CASE("Codec: an open request keeps every member", "[unit]") {
  OpenRequest request;
  request.files = {{"a.safetensors", "/m/a.safetensors"}, {"b", ""}};
  request.model = "m";
  request.name = "näme";
  request.format = "torch";
  request.device = "cuda:1";
  request.pin = request.want_descriptors = request.want_progress = true;
  request.timeout_ms = UINT64_MAX;
  const OpenRequest back = RoundTrip(request);
  CHECK(back.files.size() == 2);
  CHECK(back.files[0].path == "/m/a.safetensors");
  CHECK(back.name == request.name);
  CHECK(back.format == "torch");
  CHECK(back.device == "cuda:1");
  CHECK((back.pin && back.want_descriptors && back.want_progress));
  CHECK(back.timeout_ms == UINT64_MAX);
}

TEST_CASE("Codec: an open reply keeps 64-bit numbers and ids", "[unit]") {
  OpenReply reply;
  reply.model_id = SomeId();
  reply.lease = 1ULL << 63U;
  reply.hit = true;
  reply.reason = "resident";
  reply.load_seconds = 0.25;
  reply.arenas = {{*ArenaId::FromHex("ffeeddccbbaa99887766554433221100"), 7, 1ULL << 60U, 4096}};
  const OpenReply back = RoundTrip(reply);
  CHECK(back.model_id == reply.model_id);
  CHECK(back.lease == reply.lease);
  CHECK(back.load_seconds == 0.25);
  REQUIRE(back.arenas.size() == 1);
  CHECK(back.arenas[0].id == reply.arenas[0].id);
  CHECK(back.arenas[0].inode == 1ULL << 60U);
}

TEST_CASE("Codec: loader messages keep nested records", "[unit]") {
  CandidatesReply candidates;
  candidates.arenas = {{*ArenaId::FromHex("ffeeddccbbaa99887766554433221100"), 8192}};
  candidates.candidates = {{3, 0, 4096}};
  CHECK(RoundTrip(candidates).candidates[0].offset_bytes == 4096);
  ReserveRequest reserve;
  reserve.arenas = {{1U << 20U, 4096}};
  reserve.borrowed = {candidates.arenas[0].id};
  CHECK(RoundTrip(reserve).borrowed[0] == reserve.borrowed[0]);
  JobRequest job;
  job.kind = JobKind::kVerify;
  job.model_id = SomeId();
  CHECK(RoundTrip(job).kind == JobKind::kVerify);
  ErrorReply error{ErrorCode::kNoRoom, "no room", 12};
  CHECK(RoundTrip(error).code == ErrorCode::kNoRoom);
  CHECK(RoundTrip(error).errno_value == 12);
}

TEST_CASE("Codec: a call travels whole, and an open without one has none", "[unit]") {
  OpenRequest request;
  CHECK_FALSE(RoundTrip(request).call);
  CHECK(Encode(request).find("call") == std::string::npos);
  request.call.emplace();
  request.call->key = *CallKey::FromHex("ffeeddccbbaa99887766554433221100");
  request.call->arguments = {"/usr/bin/python3", "-m", "x"};
  request.call->environment = {"A=b=c"};
  request.call->folder = "/";
  CHECK_FALSE(RoundTrip(request).call->stale);
  request.call->stale = SomeId();
  request.call->stale_reason = "a file changed";
  const auto back = RoundTrip(request).call;
  REQUIRE(back);
  CHECK(back->key == request.call->key);
  CHECK(back->arguments == request.call->arguments);
  CHECK(back->environment == request.call->environment);
  CHECK(back->stale == SomeId());
  CHECK(back->stale_reason == "a file changed");
  CHECK(CallPath(back->key) == "call:ffeeddccbbaa99887766554433221100");
}

TEST_CASE("Codec: a failure keeps its detail through an Error", "[unit]") {
  const ErrorReply reply = RoundTrip(ToReply(Error{ErrorCode::kLoaderFailed, "x", 5, "AAEC"}));
  CHECK(ToError(reply).detail == "AAEC");
  CHECK(ToError(reply).errno_value == 5);
}

TEST_CASE("Codec: hostile calls are refused", "[unit]") {
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"call":null})"), Contains("'call'"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"call":{}})"), Contains("'call.key'"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"call":{"key":"xyz"}})"), Contains("32 hexadecimal digits"));
  const std::string start = R"({"call":{"key":"00112233445566778899aabbccddeeff",)";
  CHECK_THAT(ErrorOf<OpenRequest>(start + R"("folder":"/"}})"), Contains("'call.arguments'"));
  CHECK_THAT(ErrorOf<OpenRequest>(start + R"("arguments":["/x",1],"folder":"/"}})"),
             Contains("'call.arguments[1]'"));
  CHECK_THAT(ErrorOf<OpenRequest>(start + R"("arguments":[],"folder":"/","stale":""}})"),
             Contains("'call.stale'"));
  CHECK_THAT(ErrorOf<OpenRequest>(start + R"("arguments":[],"folder":"/","environment":{}}})"),
             Contains("an array"));
}

TEST_CASE("Codec: unknown members are ignored, missing optional ones take defaults", "[unit]") {
  const auto request = Decode<OpenRequest>(R"({"later":[1],"model":"x"})");
  REQUIRE(request.ok());
  CHECK(request->model == "x");
  CHECK(request->format == "auto");
}

TEST_CASE("Codec: text that is not UTF-8 is sent with replacement characters", "[unit]") {
  ModelRequest request{
      "a\xff"
      "b"};
  CHECK(RoundTrip(request).model ==
        "a\xEF\xBF\xBD"
        "b");
}

TEST_CASE("Codec: every wrong body is an error naming the member", "[unit]") {
  CHECK_THAT(ErrorOf<OpenRequest>("not json"), Contains("is not JSON"));
  CHECK_THAT(ErrorOf<OpenRequest>("[]"), Contains("an object"));
  CHECK_THAT(ErrorOf<ModelRequest>("{}"), Contains("'model'"));
  CHECK_THAT(ErrorOf<ModelRequest>(R"({"model":3})"), Contains("a string"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"pin":1})"), Contains("true or false"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"timeout_ms":-1})"), Contains("non-negative"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"timeout_ms":1.5})"), Contains("'timeout_ms'"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"files":{}})"), Contains("an array"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"files":[{}]})"), Contains("'files[0].name'"));
  CHECK_THAT(ErrorOf<OpenRequest>(R"({"files":[7]})"), Contains("'files[0]'"));
  CHECK_THAT(ErrorOf<HelloRequest>(R"({"min_version":1,"max_version":4294967296})"),
             Contains("at most 4294967295"));
  CHECK_THAT(ErrorOf<JobRequest>(R"({"kind":9,"model_id":"00112233445566778899aabbccddeeff"})"),
             Contains("found 9"));
  CHECK_THAT(ErrorOf<ReserveReply>(R"({"arenas":["xyz"]})"), Contains("32 hexadecimal digits"));
}

TEST_CASE("Codec: deep nesting is refused before it is parsed", "[unit]") {
  const std::string deep(1000000, '[');
  CHECK_THAT(ErrorOf<OpenRequest>(deep), Contains("nested deeper"));
  // Brackets inside text do not count.
  CHECK(Decode<ModelRequest>("{\"model\":\"" + std::string(100, '[') + "\\\"\"}").ok());
}

}  // namespace
}  // namespace modelcache
