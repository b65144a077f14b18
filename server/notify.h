// The service manager's notification protocol (sd_notify), without its library.
#pragma once

#include <string>
#include <string_view>

#include "common/result.h"

namespace modelcache {

// Sends states to the socket named by NOTIFY_SOCKET, a path or an abstract name ("@…").
class Notifier {
 public:
  // Takes the address from the environment and removes it there, so that no child inherits it.
  static Notifier FromEnvironment();

  // `address` empty: nobody is notified.
  explicit Notifier(std::string address) : address_(std::move(address)) {}

  // "READY=1", "STOPPING=1", "STATUS=…"; several separated by newlines. Never blocks.
  // Errors: kInvalidArgument (unusable address), kSystem. Success when nobody is to be notified.
  [[nodiscard]] Result<void> Send(std::string_view state) const;

 private:
  std::string address_;
};

}  // namespace modelcache
