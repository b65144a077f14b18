// Writes the seeds of the frame, codec and manifest corpora, made by the real encoders:
//   fuzz_seeds tests/fuzz/corpus
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/manifest.h"

namespace modelcache {
namespace {

void Write(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// The first byte is the message's place in the list of codec_fuzz.cc.
template <typename Message>
std::string CodecSeed(char number, const Message& message) {
  return number + Encode(message);
}

void WriteCodecSeeds(const std::filesystem::path& folder) {
  OpenRequest open;
  open.files = {{"model.safetensors", "/srv/model.safetensors"}};
  OpenReply opened;
  opened.arenas = {{ArenaId{}, 7, 42, 4096}};
  ListReply list;
  list.models.resize(2);
  WhyReply why;
  why.history = {{1.5, "miss", "not resident"}};
  JobRequest job;
  job.files = open.files;
  job.arenas = {{ArenaId{}, 8192}};
  CandidatesRequest candidates;
  candidates.storages = {{3, 65536, Digest{}}};
  CandidatesReply found;
  found.arenas = job.arenas;
  found.candidates = {{3, 0, 4096}};
  ReserveRequest reserve;
  reserve.arenas = {{8192, 8192}};
  reserve.borrowed = {ArenaId{}};
  Write(folder / "hello_request", CodecSeed(0, HelloRequest{1, 1, "ctl"}));
  Write(folder / "hello_reply", CodecSeed(1, HelloReply{1, "0.1.0", 17, 4026531836U}));
  Write(folder / "error", CodecSeed(2, ErrorReply{ErrorCode::kNoRoom, "8 GiB do not fit", 0}));
  Write(folder / "open_request", CodecSeed(3, open));
  Write(folder / "open_reply", CodecSeed(4, opened));
  Write(folder / "list", CodecSeed(10, list));
  Write(folder / "status", CodecSeed(11, StatusReply{}));
  Write(folder / "why", CodecSeed(12, why));
  Write(folder / "verify", CodecSeed(13, VerifyReply{true, 3, 4096, "same", {"w differs"}}));
  Write(folder / "job", CodecSeed(15, job));
  Write(folder / "candidates_request", CodecSeed(16, candidates));
  Write(folder / "candidates_reply", CodecSeed(17, found));
  Write(folder / "reserve", CodecSeed(18, reserve));
  Write(folder / "deep", std::string("\x0b", 1) + std::string(2000, '['));
  Write(folder / "huge_number", std::string("\x04", 1) + R"({"lease": 1e400, "hit": -0})");
}

void WriteFrameSeeds(const std::filesystem::path& folder) {
  FrameHeader header;
  header.request_id = 1;
  const std::string hello = EncodeFrame(header, Encode(HelloRequest{1, 1, "ctl"}));
  header.type = MessageType::kStatus;
  header.request_id = 2;
  const std::string status = EncodeFrame(header, "{}");
  Write(folder / "one", hello);
  Write(folder / "two", hello + status);
  Write(folder / "cut", (hello + status).substr(0, hello.size() + 9));
  std::string long_body = status;
  long_body.replace(12, 4, "\xff\xff\xff\xff");
  Write(folder / "too_long", long_body);
  std::string other_magic = status;
  other_magic[0] = 'X';
  Write(folder / "other_magic", hello + other_magic);
  std::string wants_descriptors = hello;
  wants_descriptors[7] = 3;
  Write(folder / "descriptors_missing", wants_descriptors + status);
}

bool WriteManifestSeeds(const std::filesystem::path& folder) {
  ManifestSpec spec;
  spec.format = "safetensors";
  spec.arenas = {{ArenaId{}, 1U << 20U}};
  spec.storages = {{0, 4096, 4096, {}, {}}, {0, 8192, 64, {}, {}}};
  spec.tensors = {{"a.weight", Dtype::kFloat32, {16, 16}, {16, 1}, 0, 0, 0},
                  {"a.transposed", Dtype::kFloat32, {16, 16}, {1, 16}, 0, 0, 0},
                  {"scalar", Dtype::kFloat64, {}, {}, 1, 8, 0},
                  {"meta", Dtype::kInt64, {3}, {1}, kNoStorage, 0, 0}};
  auto full = EncodeManifest(spec);
  auto empty = EncodeManifest({"torch", "{}", spec.arenas, {}, {}});
  if (!full.ok() || !empty.ok()) {
    return false;
  }
  Write(folder / "four_tensors", *full);
  Write(folder / "no_tensor", *empty);
  Write(folder / "cut", full->substr(0, full->size() / 2 / 8 * 8));
  std::vector<std::byte> page(kArenaHeaderBytes);
  EncodeArenaHeader({ArenaId{}, ModelId{}, 0, 1, std::uint64_t{1} << 30U, {8192, 4096}}, page);
  Write(folder / "arena_header", {reinterpret_cast<const char*>(page.data()), page.size()});
  return true;
}

}  // namespace
}  // namespace modelcache

int main(int argc, char** argv) {
  if (argc != 2) {
    return 2;
  }
  const std::filesystem::path corpus = argv[1];
  modelcache::WriteFrameSeeds(corpus / "frame");
  modelcache::WriteCodecSeeds(corpus / "codec");
  return modelcache::WriteManifestSeeds(corpus / "manifest") ? 0 : 1;
}
