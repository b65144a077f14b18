// What every C interface of ours needs: the last error of a thread, no exception out, growing
// structs. Each library that includes it has a last error of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "common/error.h"

namespace modelcache {

// Left behind by the last failing call of this thread.
struct LastError {
  std::string message;
  std::int32_t errno_value = 0;
  std::string detail;
};

inline LastError& Last() {
  static thread_local LastError last;
  return last;
}

inline std::int32_t Fail(const Error& error) noexcept {
  try {
    Last().message = error.message;
    Last().detail = error.detail;
  } catch (...) {
    Last().message.clear();
    Last().detail.clear();
  }
  Last().errno_value = error.errno_value;
  return static_cast<std::int32_t>(error.code);
}

inline std::int32_t FailArgument(const char* what) {
  return Fail(Error{ErrorCode::kInvalidArgument, what, 0});
}

// Runs `body`, which returns a status, and lets no exception out.
template <typename Body>
std::int32_t Guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Fail(Error{ErrorCode::kLimit, "out of memory", 0});
  } catch (const std::exception& e) {
    return Fail(Error{ErrorCode::kInternal, e.what(), 0});
  } catch (...) {
    return Fail(Error{ErrorCode::kInternal, "unknown exception", 0});
  }
}

// A struct of the caller in this library's size: fields it does not have are zero. False when the
// caller's has no size or holds something in fields this library does not know.
template <typename Struct>
bool CopyIn(const Struct* from, Struct& to) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (from == nullptr) {
    return true;
  }
  const std::size_t size = from->struct_size;
  if (size < sizeof(std::uint32_t)) {
    return false;
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return false;
    }
  }
  std::memcpy(&to, from, std::min(size, sizeof(Struct)));
  return true;
}

// Gives the caller as much of `from` as the caller's struct has room for. REQUIRES to != nullptr.
template <typename Struct>
std::int32_t CopyOut(Struct from, Struct* to) {
  const std::uint32_t size = to->struct_size;
  if (size < sizeof(std::uint32_t)) {
    return FailArgument("struct_size is not set");
  }
  from.struct_size = size;
  std::memcpy(to, &from, std::min<std::size_t>(size, sizeof(Struct)));
  return static_cast<std::int32_t>(ErrorCode::kOk);
}

}  // namespace modelcache
