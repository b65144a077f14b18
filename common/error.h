// Error codes shared by the wire protocol, the C ABI and every program, and the Error value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace modelcache {

// The numbers are part of the protocol and of the C ABI (`mc_status`): never reuse or renumber one;
// add new ones at the end.
enum class ErrorCode : std::uint16_t {
  kOk = 0,
  kInvalidArgument = 1,  // the caller passed something no daemon could accept
  kNotFound = 2,         // no such model, tensor or file
  kTimeout = 3,          // the caller's deadline passed
  kUnavailable = 4,      // no daemon answers, or it is shutting down
  kProtocol = 5,         // the peer sent something outside the protocol
  kVersion = 6,          // no common protocol version
  kPermission = 7,       // the peer's user may not do this
  kSystem = 8,           // a system call failed; the message names it, `errno_value` holds errno
  kNoRoom = 9,           // the memory budget cannot hold it; the message has both numbers
  kBadFile = 10,         // the model file is malformed; the message names file, tensor and numbers
  kUnsupported = 11,     // a format, dtype or option this build does not know
  kFileChanged = 12,     // the file changed while it was being read
  kLoaderFailed = 13,    // the loader process died or was killed
  kInUse = 14,           // leases or a pin forbid it
  kCancelled = 15,       // the request was withdrawn before it finished
  kLimit = 16,           // a resource limit was met (descriptors, message size, queue)
  kCorrupt = 17,         // an arena is not what its description says
  kInternal = 18,        // a fault of ours
  kAlreadyRunning = 19,  // another daemon serves this socket
};

// The stable lower-case name of a code ("no_room"), "unknown" for a number outside the enum.
std::string_view ErrorCodeName(ErrorCode code);

// One failure: what kind, a complete message for a person, and errno where a system call failed.
struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  int errno_value = 0;
  std::string detail{};  // for programs: what a Python loader sent with its failure, else empty
};

// An Error of kind kSystem whose message is "<operation>: <strerror>".
// Errno values that have a code of their own are mapped: EMFILE/ENFILE to kLimit (the message names
// the limit), EACCES/EPERM to kPermission, ENOENT to kNotFound.
Error SystemError(std::string_view operation, int errno_value);

}  // namespace modelcache
