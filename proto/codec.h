// Messages to JSON and back, fully validated.
#pragma once

#include <string>
#include <string_view>

#include "common/result.h"
#include "proto/messages.h"

namespace modelcache {

// The JSON body of a message. Total: every struct of messages.h has one. Text that is not UTF-8
// (paths may be anything) is kept by replacing the bad bytes.
template <typename Message>
std::string Encode(const Message& message);

// The message of a body. Unknown members are ignored; missing ones take the struct's default where
// docs/protocol.md calls them optional. Errors: kProtocol naming the member and what was expected.
template <typename Message>
Result<Message> Decode(std::string_view body);

}  // namespace modelcache
