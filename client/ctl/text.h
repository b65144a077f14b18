// Text for people: aligned tables, sizes, times, colours.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/utf8.h"

namespace modelcache {

// "1.4 GiB", "512 B".
std::string HumanBytes(std::uint64_t bytes);

// "3.2 s", "5 min", "2 h", "4 d".
std::string HumanSeconds(double seconds);

// A long text with "…" in its middle, at most `most` characters. The end, which tells files apart,
// keeps two thirds.
std::string Shortened(const std::string& text, std::size_t most);

enum class Align { kLeft, kRight };

// Columns as wide as their widest cell.
class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // REQUIRES one cell per column.
  void Add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  // Lines with a title row, which is bold when `colour`.
  [[nodiscard]] std::string Text(bool colour) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Whether standard output wants colours: a terminal, and NO_COLOR is not set.
bool WantsColour();

}  // namespace modelcache
