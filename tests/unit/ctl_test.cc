// Texts of the command-line tool.
#include <nlohmann/json.hpp>

#include "client/ctl/progress_bar.h"
#include "client/ctl/render.h"
#include "client/ctl/text.h"
#include "tests/support/catch.h"

using namespace modelcache;

TEST_CASE("Ctl: sizes and times for people", "[unit]") {
  CHECK(HumanBytes(0) == "0 B");
  CHECK(HumanBytes(1023) == "1023 B");
  CHECK(HumanBytes(1536) == "1.5 KiB");
  CHECK(HumanBytes((1ULL << 20U) - 1) == "1.0 MiB");
  CHECK(HumanBytes(1ULL << 60U) == "1024.0 PiB");
  CHECK(HumanSeconds(0.0123) == "12 ms");
  CHECK(HumanSeconds(59.96) == "60.0 s");
  CHECK(HumanSeconds(600) == "10 min");
  CHECK(HumanSeconds(86400) == "24 h");
  CHECK(HumanSeconds(864000) == "10 d");
}

TEST_CASE("Ctl: columns are aligned by what is seen, not by bytes", "[unit]") {
  Table table({{"NAME"}, {"N", Align::kRight}});
  table.Add({"ü", "5"});
  table.Add({"abcdef", "12"});
  CHECK(table.Text(false) == "NAME     N\nü        5\nabcdef  12\n");
  CHECK_THAT(table.Text(true), Contains("\033[1mNAME     N\033[0m"));
}

TEST_CASE("Ctl: long names lose their middle, control characters are shown", "[unit]") {
  CHECK(Shortened("abcdef", 6) == "abcdef");
  CHECK(Shortened("/a/long/path", 7) == "/a…path");
  CHECK(Shortened("äöüäöüß", 4) == "ä…üß");
  CHECK(Shortened("abcdef", 1) == "…");
  CHECK(Printable("a\033[2Jb\n") == "a\\x1b[2Jb\\x0a");
}

TEST_CASE("Ctl: calls are listed without their module", "[unit]") {
  ModelInfo call;
  call.format = "python";
  call.name = "pkg.mod:Class.load('C:/x')";
  CHECK_THAT(RenderList({{call}}, {}), Contains("  Class.load('C:/x')"));
  call.name = "load('a:b')";
  CHECK_THAT(RenderList({{call}}, {}), Contains("  load('a:b')"));
  call.format = "safetensors";
  call.name = "C:/x(1)";
  CHECK_THAT(RenderList({{call}}, {}), Contains("  C:/x(1)"));
}

TEST_CASE("Ctl: the progress line fits its width", "[unit]") {
  const std::string line = ProgressLine({1U << 20U, 4U << 20U}, 2, 200);
  CHECK_THAT(line, Contains("25%") && Contains("1.0 MiB of 4.0 MiB") && Contains("512.0 KiB/s") &&
                       Contains("6.0 s left"));
  CHECK(ProgressLine({1, 4}, 2, 20).size() == 20);
  CHECK_THAT(ProgressLine({5, 0}, 0, 80), Contains("5 B"));
}

TEST_CASE("Ctl: replies as text", "[unit]") {
  CHECK_THAT(RenderList({}, {}), Contains("no models") && Contains("load"));
  ModelInfo model;
  model.name = "m";
  model.pinned = true;
  model.storage_bytes = 2048;
  CHECK_THAT(RenderList({{model}}, {}), Contains("2.0 KiB") && Contains("pinned"));
  WhyReply why{"m", "absent", {{3, "evict", "room for n"}}};
  CHECK_THAT(RenderWhy(why, false),
             Contains("m: absent, the next open loads it") && Contains("room for n"));
  CHECK_THAT(RenderWhy({"m", "resident", {}}, false), !Contains("loads it"));
  StatusReply status;
  status.hits = 4;
  CHECK_THAT(RenderStatus(status), Contains("4 hits"));
}

TEST_CASE("Ctl: a list of usual models fits 100 columns, a wide one cuts nothing", "[unit]") {
  ModelInfo model;
  model.name = "/home/someone/checkpoints/llama-3.1-8b-instruct/model-00001-of-00004.safetensors";
  model.path = model.name;
  model.format = "torchscript";
  model.state = "resident";
  model.storage_bytes = 1023ULL << 30U;
  model.resident_bytes = model.storage_bytes;
  model.leases = 123;
  model.hits = 99'999;
  model.idle_seconds = 119.9;
  const std::string text = RenderList({{model}}, {});
  for (std::size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) {
    CHECK(text.find('\n', begin) - begin <= 100 + std::string("…").size() - 1);
  }
  CHECK_THAT(text, Contains("/home/some…") && Contains("of-00004.safetensors"));
  CHECK_THAT(RenderList({{model}}, {false, true}), Contains(model.name) && Contains("torchscript"));
}

TEST_CASE("Ctl: only damaged memory is called damaged", "[unit]") {
  const auto text = [](bool ok, bool memory_ok, const std::string& disk) {
    VerifyReply reply{ok, 2, 2048, disk, {}, memory_ok};
    reply.differences = ok ? std::vector<std::string>{} : std::vector<std::string>{"storage 1"};
    return RenderVerify(reply);
  };
  CHECK_THAT(text(false, true, "differs"),
             Contains("DIFFERS: the files on disk are not what was loaded\n") &&
                 Contains("intact") && !Contains("DAMAGED") && Contains("storage 1"));
  CHECK_THAT(text(false, false, "differs"), Contains("DAMAGED") && !Contains("DIFFERS"));
  CHECK_THAT(text(false, false, "same"), Contains("DAMAGED"));
  CHECK_THAT(text(false, true, "same"), Contains("DAMAGED"));  // a daemon that does not tell
  CHECK_THAT(text(true, true, "same"), Contains("ok: ") && Contains("2.0 KiB"));
  CHECK_THAT(text(true, true, "unavailable"), Contains("ok: ") && Contains("not compared"));
}
