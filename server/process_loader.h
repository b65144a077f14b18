// LoaderProcess: one modelcached-loader, from spawn to reaped.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/ids.h"
#include "common/result.h"
#include "proto/messages.h"
#include "server/actions.h"
#include "server/frame_stream.h"

namespace modelcache {

inline constexpr std::size_t kMaxLoaderOutputBytes = 64U << 10U;  // kept of what it prints

// The environment a loader gets: what finds programs, libraries and devices, nothing else.
// `environment` is a null-terminated array as in environ(7).
std::vector<std::string> LoaderEnvironment(const char* const* environment);

// "the loader was killed by signal 9 (Killed), memory limit?" and the like, with the end of what it
// printed; nothing for a clean exit. `status` is what waitpid gives.
std::optional<Error> DescribeLoaderExit(int status, const std::string& output);

// Event loop thread only. The process runs in a group of its own with its socket at descriptor 3,
// /dev/null as input, a pipe as output, and nothing else open.
class LoaderProcess final : public std::enable_shared_from_this<LoaderProcess>,
                            private FrameStream::Owner {
 public:
  class Owner {
   public:
    virtual void OnLoaderFrame(JobId job, Frame frame) = 0;
    // It sent something outside the protocol. OnLoaderExit follows.
    virtual void OnLoaderBroken(JobId job, const Error& why) = 0;
    // It is gone and reaped; all its frames were handed over before. The last call.
    virtual void OnLoaderExit(JobId job, const std::optional<Error>& error) = 0;

   protected:
    ~Owner() = default;
  };

  LoaderProcess(boost::asio::io_context& loop, JobId job, Owner& owner);
  ~LoaderProcess();

  // Spawns `program`, or what the job itself wants launched, and sends the job; `arena_fds` follow
  // the files' descriptors.
  // Errors: kLimit (descriptors), kLoaderFailed (no such program), kSystem. Then nothing runs.
  Result<void> Start(const std::string& program, const StartJob& job,
                     std::span<const int> arena_fds);

  void Send(FrameHeader header, std::string_view body, std::span<const int> descriptors);

  // Kills the whole process group. OnLoaderExit follows.
  void Kill();

 private:
  void OnFrame(Frame frame) override;
  void OnStreamClosed(const Error& why) override;
  void WaitOutput();
  bool ReadOutput();
  void WaitExit();
  void OnExit();

  boost::asio::io_context& loop_;
  JobId job_;
  Owner& owner_;
  pid_t pid_ = 0;
  std::shared_ptr<FrameStream> stream_;
  boost::asio::posix::stream_descriptor output_pipe_;
  boost::asio::posix::stream_descriptor pidfd_;
  std::string output_;
};

}  // namespace modelcache
