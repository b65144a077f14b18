// Names of the error codes and the mapping from errno.
#include "common/error.h"

#include <cerrno>
#include <system_error>

namespace modelcache {

std::string_view ErrorCodeName(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kNotFound:
      return "not_found";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kProtocol:
      return "protocol";
    case ErrorCode::kVersion:
      return "version";
    case ErrorCode::kPermission:
      return "permission";
    case ErrorCode::kSystem:
      return "system";
    case ErrorCode::kNoRoom:
      return "no_room";
    case ErrorCode::kBadFile:
      return "bad_file";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kFileChanged:
      return "file_changed";
    case ErrorCode::kLoaderFailed:
      return "loader_failed";
    case ErrorCode::kInUse:
      return "in_use";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kLimit:
      return "limit";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kInternal:
      return "internal";
    case ErrorCode::kAlreadyRunning:
      return "already_running";
  }
  return "unknown";
}

Error SystemError(std::string_view operation, int errno_value) {
  Error error{ErrorCode::kSystem, std::string(operation), errno_value};
  error.message += ": " + std::generic_category().message(errno_value);
  switch (errno_value) {
    case EMFILE:
      error.code = ErrorCode::kLimit;
      error.message += " (limit on open descriptors of this process, RLIMIT_NOFILE)";
      break;
    case ENFILE:
      error.code = ErrorCode::kLimit;
      error.message += " (limit on open files of this system, fs.file-max)";
      break;
    case EACCES:
    case EPERM:
      error.code = ErrorCode::kPermission;
      break;
    case ENOENT:
      error.code = ErrorCode::kNotFound;
      break;
    default:
      break;
  }
  return error;
}

}  // namespace modelcache
