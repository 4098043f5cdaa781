#include "worker/io/output_capture.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

namespace everstep {

Result<std::unique_ptr<OutputCapture>> OutputCapture::Create(EventLoop& main, OutputCaptureLimits limits,
                                                             Handler handler) {
  EVERSTEP_ASSIGN_OR_RETURN(std::unique_ptr<EventLoop> loop, EventLoop::Create());
  return std::unique_ptr<OutputCapture>(new OutputCapture(main, limits, std::move(handler), std::move(loop)));
}

OutputCapture::OutputCapture(EventLoop& main, OutputCaptureLimits limits, Handler handler,
                             std::unique_ptr<EventLoop> loop)
    : main_(main), limits_(limits), handler_(std::move(handler)), loop_(std::move(loop)) {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "output");
    loop_->Run();
  });
}

OutputCapture::~OutputCapture() {
  loop_->Stop();
  thread_.join();
}

void OutputCapture::Add(ProcessId process, std::string log_file, UniqueFd output) {
  auto shared = std::make_shared<UniqueFd>(std::move(output));
  loop_->Post([this, process, log_file = std::move(log_file), shared] {
    Stream& stream = streams_[process];
    stream.output = std::move(*shared);
    stream.log_file = log_file;
    if (Status opened = OpenLog(stream); !opened.ok()) Trouble(errno, log_file);
    const Status watched = loop_->Watch(stream.output.get(), EPOLLIN, [this, process](uint32_t) {
      constexpr size_t kTurnBytes = 256 << 10;  // so that one noisy process doesn't starve the others
      Read(process, kTurnBytes);
    });
    if (!watched.ok()) stream.output.Reset();
  });
}

void OutputCapture::Finish(ProcessId process, std::function<void(std::vector<std::string>)> done) {
  loop_->Post([this, process, done = std::move(done)] {
    std::vector<std::string> last_lines;
    if (auto it = streams_.find(process); it != streams_.end()) {
      constexpr size_t kLeftBytesMax = 4 << 20;  // a grandchild may go on writing
      Read(process, kLeftBytesMax);
      Stream& stream = it->second;
      if (!stream.partial.empty()) TakeLine(process, stream, std::exchange(stream.partial, {}));
      SendBatch(process, stream);
      if (stream.output.valid()) loop_->Unwatch(stream.output.get());
      last_lines.assign(stream.last_lines.begin(), stream.last_lines.end());
      streams_.erase(it);
    }
    main_.Post([done, last_lines = std::move(last_lines)] { done(last_lines); });
  });
}

void OutputCapture::Read(ProcessId process, size_t bytes_max) {
  auto it = streams_.find(process);
  if (it == streams_.end() || !it->second.output.valid()) return;
  Stream& stream = it->second;
  char buffer[65536];
  size_t total = 0;
  while (total < bytes_max) {
    const ssize_t got = read(stream.output.get(), buffer, sizeof(buffer));
    if (got > 0) {
      total += static_cast<size_t>(got);
      Take(process, stream, buffer, static_cast<size_t>(got));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    loop_->Unwatch(stream.output.get());
    stream.output.Reset();
    return;
  }
}

void OutputCapture::Take(ProcessId process, Stream& stream, const char* data, size_t bytes) {
  WriteLog(stream, data, bytes);
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] == '\n') {
      TakeLine(process, stream, std::exchange(stream.partial, {}));
    } else {
      stream.partial.push_back(data[i]);
      if (stream.partial.size() >= limits_.line_bytes_max) TakeLine(process, stream, std::exchange(stream.partial, {}));
    }
  }
}

void OutputCapture::TakeLine(ProcessId process, Stream& stream, std::string line) {
  stream.last_lines.push_back(line);
  if (stream.last_lines.size() > limits_.last_lines_max) stream.last_lines.pop_front();
  if (stream.batch.size() >= limits_.batch_lines_max) {
    ++stream.batch_left_out;
    return;
  }
  stream.batch.push_back(std::move(line));
  if (stream.batch_scheduled) return;
  stream.batch_scheduled = true;
  loop_->At(BootTimeNow() + limits_.batch_delay, [this, process] {
    auto it = streams_.find(process);
    if (it != streams_.end()) SendBatch(process, it->second);
  });
}

void OutputCapture::SendBatch(ProcessId process, Stream& stream) {
  stream.batch_scheduled = false;
  if (stream.batch.empty()) return;
  std::vector<std::string> batch = std::exchange(stream.batch, {});
  if (stream.batch_left_out > 0) {
    batch.push_back("[" + std::to_string(stream.batch_left_out) + " lines left out; the log file has them]");
    stream.batch_left_out = 0;
  }
  main_.Post([this, process, batch = std::move(batch)] { handler_.on_lines(process, batch); });
}

Status OutputCapture::OpenLog(Stream& stream) {
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(stream.log_file).parent_path(), ignored);
  stream.file.Reset(open(stream.log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!stream.file.valid()) return Internal("cannot open " + stream.log_file);
  struct stat status{};
  stream.file_bytes = fstat(stream.file.get(), &status) == 0 ? static_cast<size_t>(status.st_size) : 0;
  return OkStatus();
}

void OutputCapture::WriteLog(Stream& stream, const char* data, size_t bytes) {
  if (stream.file_bytes + bytes > limits_.log_bytes_max && stream.file.valid()) {
    stream.file.Reset();
    rename(stream.log_file.c_str(), (stream.log_file + ".1").c_str());
  }
  if (!stream.file.valid()) {
    if (Status opened = OpenLog(stream); !opened.ok()) {
      Trouble(errno, stream.log_file);
      return;
    }
  }
  while (bytes > 0) {
    const ssize_t written = write(stream.file.get(), data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      Trouble(errno, stream.log_file);
      return;
    }
    data += written;
    bytes -= static_cast<size_t>(written);
    stream.file_bytes += static_cast<size_t>(written);
  }
}

void OutputCapture::Trouble(int error, const std::string& log_file) {
  const Instant now = BootTimeNow();
  if (now < trouble_next_) return;
  trouble_next_ = now + Seconds(60);
  const Reason reason = error == ENOSPC || error == EDQUOT ? Reason::kStorageFull : Reason::kStorageFailed;
  std::string message = log_file + ": " + std::error_code(error, std::generic_category()).message();
  main_.Post([this, reason, message = std::move(message)] { handler_.on_trouble(reason, message); });
}

}  // namespace everstep
