// The exposition text: its figures, and the rules of the format.
#include "server/metrics.h"

#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "tests/support/catch.h"
#include "tests/support/server_fixture.h"

namespace modelcache {
namespace {

TEST_CASE("Metrics: there is a line for every figure", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  const std::string text = f.dispatcher.MetricsText(f.clock.Now());
  CHECK_THAT(text, Contains("modelcache_resident_bytes 100\n"));
  CHECK_THAT(text, Contains("modelcache_misses_total{reason=\"never_loaded\"} 1\n"));
  CHECK_THAT(text, Contains("# TYPE modelcache_hits_total counter\n"));
  CHECK(text.back() == '\n');
}

TEST_CASE("Metrics: the text keeps the rules of the Prometheus format", "[unit]") {
  ServerFixture f;
  f.Resident("/m", f.Stat(1), 100);
  std::istringstream text(f.dispatcher.MetricsText(f.clock.Now()));
  const std::regex help("# HELP (modelcache_[a-z_]+) [A-Z][^\\\\]*\\.");
  const std::regex type("# TYPE (modelcache_[a-z_]+) (counter|gauge)");
  const std::regex sample(
      "(modelcache_[a-z_]+)(\\{[a-z_]+=\"[^\"\\\\]*\"\\})? ([0-9]+(\\.[0-9]+)?)");
  std::string described;                     // the family of the last HELP line
  std::map<std::string, std::string> types;  // of the families so far
  std::set<std::string> samples;             // names with labels
  std::smatch match;
  for (std::string line; std::getline(text, line);) {
    INFO(line);
    if (std::regex_match(line, match, help)) {
      described = match[1];
      CHECK(types.count(described) == 0);  // all lines of a family stand together
    } else if (std::regex_match(line, match, type)) {
      CHECK(match[1] == described);
      CHECK(types.emplace(match[1], match[2]).second);
      const bool total = described.ends_with("_total");
      CHECK(total == (match[2] == "counter"));
    } else {
      REQUIRE(std::regex_match(line, match, sample));
      CHECK(match[1] == described);
      CHECK(types.count(match[1]) == 1);
      CHECK(samples.insert(match[1].str() + match[2].str()).second);
    }
  }
  CHECK(samples.size() > types.size());  // misses have labels
  CHECK(types.count("modelcache_load_seconds_total") == 1);
}

}  // namespace
}  // namespace modelcache
