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

TEST_CASE("Ctl: long names lose their beginning, control characters are shown", "[unit]") {
  CHECK(Shortened("abcdef", 6) == "abcdef");
  CHECK(Shortened("/a/long/path", 5) == "…path");
  CHECK(Shortened("äöüäöü", 3) == "…öü");
  CHECK(Printable("a\033[2Jb\n") == "a\\x1b[2Jb\\x0a");
}

TEST_CASE("Ctl: the progress line fits its width", "[unit]") {
  const std::string line = ProgressLine({1U << 20U, 4U << 20U}, 2, 200);
  CHECK_THAT(line, Contains("25%") && Contains("1.0 MiB of 4.0 MiB") && Contains("512.0 KiB/s") &&
                       Contains("6.0 s left"));
  CHECK(ProgressLine({1, 4}, 2, 20).size() == 20);
  CHECK_THAT(ProgressLine({5, 0}, 0, 80), Contains("5 B"));
}

TEST_CASE("Ctl: replies as text", "[unit]") {
  CHECK(RenderList({}, false) == "no models\n");
  ModelInfo model;
  model.name = "m";
  model.pinned = true;
  model.storage_bytes = 2048;
  CHECK_THAT(RenderList({{model}}, false), Contains("2.0 KiB") && Contains("yes"));
  WhyReply why{"m", "absent", {{3, "evict", "room for n"}}};
  CHECK_THAT(RenderWhy(why, false), Contains("m: absent") && Contains("room for n"));
  CHECK_THAT(RenderVerify({false, 2, 10, "differs", {"storage 1"}}),
             Contains("DAMAGED") && Contains("storage 1"));
  StatusReply status;
  status.hits = 4;
  CHECK_THAT(RenderStatus(status), Contains("4 hits"));
}
