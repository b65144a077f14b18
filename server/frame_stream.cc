// Reading, writing and back-pressure of one framed socket.
#include "server/frame_stream.h"

#include <fcntl.h>

#include <array>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <optional>
#include <utility>

#include "common/socket.h"

namespace modelcache {
namespace {

constexpr int kReadsPerWakeup = 4;  // then others get their turn

// One buffer for all streams: there is one event loop, and it is empty between two reads.
std::span<std::byte> ReadBuffer() {
  static std::array<std::byte, 65536> buffer;
  return buffer;
}

}  // namespace

FrameStream::FrameStream(boost::asio::io_context& loop, UniqueFd socket, StreamLimits limits,
                         Owner& owner)
    : socket_(loop, socket.Release()),
      limits_(limits),
      owner_(&owner),
      reader_(limits.max_body_bytes) {}

void FrameStream::Start() { WaitReadable(); }

void FrameStream::WaitReadable() {
  if (reading_ || owner_ == nullptr) {
    return;
  }
  reading_ = true;
  socket_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                     [self = shared_from_this()](const boost::system::error_code& error) {
                       self->reading_ = false;
                       if (!error && self->owner_ != nullptr) {
                         self->OnReadable();
                       }
                     });
}

void FrameStream::WaitWritable() {
  if (writing_ || owner_ == nullptr) {
    return;
  }
  writing_ = true;
  socket_.async_wait(boost::asio::posix::stream_descriptor::wait_write,
                     [self = shared_from_this()](const boost::system::error_code& error) {
                       self->writing_ = false;
                       if (!error && self->owner_ != nullptr) {
                         self->OnWritable();
                       }
                     });
}

void FrameStream::OnReadable() {
  for (int reads = 0; reads < kReadsPerWakeup && output_.empty(); ++reads) {
    if (ReadOnce() != Read::kFull) {
      break;
    }
  }
  if (owner_ != nullptr && output_.empty()) {
    WaitReadable();
  }
}

FrameStream::Read FrameStream::ReadOnce() {
  std::vector<UniqueFd> descriptors;
  const std::span<std::byte> buffer = ReadBuffer();
  Result<Received> received = ReceiveSome(socket_.native_handle(), buffer, descriptors);
  if (!received.ok()) {
    Fail(std::move(received).error());
    return Read::kStopped;
  }
  if (received->closed) {
    Fail(Error{ErrorCode::kUnavailable, "the peer closed the connection", 0});
    return Read::kStopped;
  }
  if (received->would_block) {
    return Read::kStopped;
  }
  auto fed = reader_.Feed(buffer.first(received->size_bytes), std::move(descriptors));
  if (!fed.ok()) {
    Fail(std::move(fed).error());
    return Read::kStopped;
  }
  TakeFrames();
  if (owner_ == nullptr || failed_) {
    return Read::kStopped;
  }
  return received->size_bytes == buffer.size() ? Read::kFull : Read::kShort;
}

void FrameStream::TakeFrames() {
  while (owner_ != nullptr) {
    Result<std::optional<Frame>> frame = reader_.Next();
    if (!frame.ok()) {
      Fail(std::move(frame).error());
      return;
    }
    if (!frame->has_value()) {
      return;
    }
    if (output_.empty() && pending_.empty()) {
      owner_->OnFrame(std::move(**frame));
    } else {
      pending_.push_back(std::move(**frame));
    }
  }
}

void FrameStream::HandlePending() {
  while (owner_ != nullptr && output_.empty() && !pending_.empty()) {
    Frame frame = std::move(pending_.front());
    pending_.pop_front();
    owner_->OnFrame(std::move(frame));
  }
}

void FrameStream::DrainNow() {
  output_.clear();
  HandlePending();
  while (owner_ != nullptr && !failed_ && ReadOnce() != Read::kStopped) {
    output_.clear();
    HandlePending();
  }
}

void FrameStream::Send(FrameHeader header, std::string_view body,
                       std::span<const int> descriptors) {
  if (owner_ == nullptr || failed_) {
    return;
  }
  header.descriptor_count = static_cast<std::uint8_t>(descriptors.size());
  std::string bytes = EncodeFrame(header, body);
  std::size_t sent = 0;
  if (output_.empty()) {
    Result<std::size_t> some =
        SendSome(socket_.native_handle(), std::as_bytes(std::span(bytes)), descriptors);
    if (!some.ok()) {
      Fail(std::move(some).error());
      return;
    }
    sent = *some;
    if (sent == bytes.size()) {
      return;
    }
  }
  Queue(std::move(bytes), sent, sent > 0 ? std::span<const int>() : descriptors);
}

void FrameStream::Queue(std::string bytes, std::size_t sent, std::span<const int> descriptors) {
  Output output{std::move(bytes), sent, {}};
  for (int fd : descriptors) {
    // The caller may close its own before the peer reads; this one goes with the queue.
    output.descriptors.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!output.descriptors.back().valid()) {
      Fail(SystemError("dup of a descriptor to send", errno));
      return;
    }
  }
  queued_bytes_ += output.bytes.size();
  if (queued_bytes_ > limits_.max_queue_bytes) {
    Fail(Error{ErrorCode::kLimit,
               "the peer does not read: " + std::to_string(queued_bytes_) +
                   " bytes wait for it, limit " + std::to_string(limits_.max_queue_bytes),
               0});
    return;
  }
  output_.push_back(std::move(output));
  WaitWritable();
}

bool FrameStream::WriteFront() {
  Output& front = output_.front();
  std::vector<int> descriptors;
  for (const UniqueFd& fd : front.descriptors) {
    descriptors.push_back(fd.get());
  }
  const auto bytes = std::as_bytes(std::span(front.bytes)).subspan(front.sent);
  Result<std::size_t> sent = SendSome(socket_.native_handle(), bytes, descriptors);
  if (!sent.ok()) {
    Fail(std::move(sent).error());
    return false;
  }
  if (*sent > 0) {
    front.descriptors.clear();
  }
  front.sent += *sent;
  if (front.sent < front.bytes.size()) {
    return false;
  }
  queued_bytes_ -= front.bytes.size();
  output_.pop_front();
  return true;
}

void FrameStream::OnWritable() {
  while (!output_.empty() && !failed_ && WriteFront()) {
  }
  HandlePending();
  if (owner_ == nullptr || failed_) {
    return;
  }
  if (output_.empty()) {
    WaitReadable();
  } else {
    WaitWritable();
  }
}

// Told from the event loop, so that no owner is called back from inside its own Send.
void FrameStream::Fail(Error why) {
  if (failed_ || owner_ == nullptr) {
    return;
  }
  failed_ = true;
  output_.clear();
  boost::asio::post(socket_.get_executor(), [self = shared_from_this(), why = std::move(why)] {
    if (self->owner_ != nullptr) {
      self->owner_->OnStreamClosed(why);
    }
  });
}

void FrameStream::Close() {
  owner_ = nullptr;
  pending_.clear();
  output_.clear();
  boost::system::error_code ignored;
  (void)socket_.close(ignored);
}

}  // namespace modelcache
