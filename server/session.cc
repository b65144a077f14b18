// Hello and request framing of one client.
#include "server/session.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "proto/codec.h"
#include "proto/version.h"

namespace modelcache {
namespace {

StreamLimits ClientLimits() {
  StreamLimits limits;
  limits.max_body_bytes = kMaxRequestBytes;
  return limits;
}

}  // namespace

Session::Session(boost::asio::io_context& loop, UniqueFd socket, Identity identity, Owner& owner)
    : loop_(loop),
      identity_(identity),
      owner_(owner),
      stream_(std::make_shared<FrameStream>(loop, std::move(socket), ClientLimits(),
                                            static_cast<FrameStream::Owner&>(*this))) {}

Session::~Session() { stream_->Close(); }

void Session::Start(std::chrono::steady_clock::duration hello_timeout) {
  hello_timer_.emplace(loop_, hello_timeout);
  hello_timer_->async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
    const std::shared_ptr<Session> self = weak.lock();
    if (!error && self != nullptr && !self->greeted_) {
      self->End("no hello in time");
    }
  });
  stream_->Start();
}

void Session::OnFrame(Frame frame) {
  if (ended_) {
    return;
  }
  if (frame.header.IsReply()) {
    End("a client sent a reply");
    return;
  }
  if (greeted_) {
    owner_.OnRequest(identity_.id, std::move(frame));
    return;
  }
  if (frame.header.type != MessageType::kHello) {
    Refuse(frame, Error{ErrorCode::kProtocol, "the first message was no hello", 0});
    return;
  }
  OnHello(frame);
}

void Session::OnHello(const Frame& frame) {
  Result<HelloRequest> request = Decode<HelloRequest>(frame.body);
  if (!request.ok()) {
    Refuse(frame, request.error());
    return;
  }
  const std::uint32_t version = std::min(request->max_version, kProtocolVersion);
  if (version < std::max(request->min_version, kOldestProtocolVersion)) {
    Refuse(frame,
           Error{ErrorCode::kVersion,
                 "the client speaks protocol versions " + std::to_string(request->min_version) +
                     " to " + std::to_string(request->max_version) + ", the daemon " +
                     std::to_string(kOldestProtocolVersion) + " to " +
                     std::to_string(kProtocolVersion),
                 0});
    return;
  }
  greeted_ = true;
  hello_timer_.reset();
  program_ = request->program.substr(0, 64);
  HelloReply reply;
  reply.version = version;
  reply.daemon_version = kProductVersion;
  reply.daemon_pid = identity_.daemon_pid;
  reply.pid_namespace = identity_.pid_namespace;
  FrameHeader header;
  header.type = MessageType::kHello;
  header.flags = kFlagReply;
  header.request_id = frame.header.request_id;
  stream_->Send(header, Encode(reply), {});
}

void Session::Refuse(const Frame& frame, const Error& error) {
  FrameHeader header;
  header.type = frame.header.type;
  header.flags = kFlagReply | kFlagError;
  header.request_id = frame.header.request_id;
  stream_->Send(header, Encode(ToReply(error)), {});
  End(error.message);
}

void Session::OnStreamClosed(const Error& why) { End(why.message); }

// Told later from the loop: the caller may be this session's own stream.
void Session::End(const std::string& why) {
  if (ended_) {
    return;
  }
  ended_ = true;
  boost::asio::post(loop_,
                    [&owner = owner_, id = identity_.id, why] { owner.OnSessionClosed(id, why); });
}

}  // namespace modelcache
