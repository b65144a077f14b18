// Formatting of tables and quantities.
#include "client/ctl/text.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

namespace modelcache {
namespace {

std::string Format(const char* format, double value) {
  std::array<char, 64> text{};
  const int length = std::snprintf(text.data(), text.size(), format, value);
  return length > 0 ? text.data() : "";
}

// Code points: what most terminals give one cell each.
std::size_t Width(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

// Where the character with this number starts.
std::size_t OffsetOf(std::string_view text, std::size_t number) {
  std::size_t seen = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    seen += Width(text.substr(i, 1));
    if (seen > number) {
      return i;
    }
  }
  return text.size();
}

void AppendCell(std::string& line, const std::string& cell, std::size_t width, Align align) {
  const std::string padding(width - std::min(width, Width(cell)), ' ');
  line += align == Align::kRight ? padding + cell : cell + padding;
}

void TrimRight(std::string& line) { line.erase(line.find_last_not_of(' ') + 1); }

}  // namespace

std::string HumanBytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) {
    return std::to_string(bytes) + " B";
  }
  auto value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return Format("%.1f ", value) + kUnits[unit];
}

std::string HumanSeconds(double seconds) {
  if (seconds < 0.9995) {
    return Format("%.0f ms", seconds * 1000);
  }
  if (seconds < 120) {
    return Format("%.1f s", seconds);
  }
  if (seconds < 7200) {
    return Format("%.0f min", seconds / 60);
  }
  if (seconds < 172800) {
    return Format("%.0f h", seconds / 3600);
  }
  return Format("%.0f d", seconds / 86400);
}

std::string Shortened(const std::string& text, std::size_t most) {
  const std::size_t width = Width(text);
  if (width <= most) {
    return text;
  }
  const std::size_t end = (most - 1) * 2 / 3;
  return text.substr(0, OffsetOf(text, most - 1 - end)) + "…" +
         text.substr(OffsetOf(text, width - end));
}

std::string Table::Text(bool colour) const {
  std::vector<std::size_t> widths;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    std::size_t width = Width(columns_[i].title);
    for (const auto& row : rows_) {
      width = std::max(width, Width(row[i]));
    }
    widths.push_back(width);
  }
  std::string title;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    title += i > 0 ? "  " : "";
    AppendCell(title, columns_[i].title, widths[i], columns_[i].align);
  }
  TrimRight(title);
  std::string text = colour ? "\033[1m" + title + "\033[0m\n" : title + "\n";
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      line += i > 0 ? "  " : "";
      AppendCell(line, row[i], widths[i], columns_[i].align);
    }
    TrimRight(line);
    text += line + "\n";
  }
  return text;
}

bool WantsColour() {
  const char* refused = std::getenv("NO_COLOR");
  return ::isatty(STDOUT_FILENO) == 1 && (refused == nullptr || *refused == '\0');
}

}  // namespace modelcache
