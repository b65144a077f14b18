// FrameStream: frames over a non-blocking socket, driven by the event loop.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "common/unique_fd.h"
#include "proto/frame.h"

namespace modelcache {

struct StreamLimits {
  std::size_t max_body_bytes = 1U << 20U;    // of a frame from the peer
  std::size_t max_queue_bytes = 64U << 20U;  // of frames the peer does not read
};

// Reads whole frames and hands them to its owner; writes what the owner sends, at once where the
// socket takes it. While output is queued nothing more is read, so a peer that asks without reading
// holds up itself alone. Event loop thread only. Held by shared_ptr, because pending waits keep it
// alive until they have run; the owner must call Close() before it dies.
class FrameStream : public std::enable_shared_from_this<FrameStream> {
 public:
  class Owner {
   public:
    // May send and may close the stream.
    virtual void OnFrame(Frame frame) = 0;
    // The peer is gone, broke the protocol or reads too slowly. Called at most once, never from
    // inside Send, and not after Close().
    virtual void OnStreamClosed(const Error& why) = 0;

   protected:
    ~Owner() = default;
  };

  FrameStream(boost::asio::io_context& loop, UniqueFd socket, StreamLimits limits, Owner& owner);

  void Start();

  // Queues a frame. The descriptors are sent or duplicated before it returns.
  void Send(FrameHeader header, std::string_view body, std::span<const int> descriptors);

  // Hands over every frame that has arrived by now, without waiting. For a peer that has ended:
  // what is queued for it is dropped.
  void DrainNow();

  // Drops whatever is queued. No callback follows.
  void Close();

  [[nodiscard]] bool idle() const { return output_.empty(); }
  [[nodiscard]] int fd() { return socket_.native_handle(); }

 private:
  struct Output {
    std::string bytes;
    std::size_t sent = 0;
    std::vector<UniqueFd> descriptors;
  };

  void WaitReadable();
  void WaitWritable();
  void OnReadable();
  void OnWritable();
  enum class Read : std::uint8_t {
    kFull,     // as much as the buffer holds; there may be more
    kShort,    // more only if it came just now, or if descriptors ended the read
    kStopped,  // nothing there, or the stream is closed
  };
  Read ReadOnce();
  void TakeFrames();
  void HandlePending();
  bool WriteFront();
  void Queue(std::string bytes, std::size_t sent, std::span<const int> descriptors);
  void Fail(Error why);

  boost::asio::posix::stream_descriptor socket_;
  StreamLimits limits_;
  Owner* owner_;
  FrameReader reader_;
  std::deque<Frame> pending_;  // read, but not handled while output is queued
  std::deque<Output> output_;
  std::size_t queued_bytes_ = 0;
  bool reading_ = false;
  bool writing_ = false;
  bool failed_ = false;
};

}  // namespace modelcache
