// What rank processes print: read from their pipes, written to rotated files, the last lines kept in memory, batches
// passed on for people. Has a thread and a loop of its own, because it writes to a disk. Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/base/status.h"
#include "worker/io/event_loop.h"
#include "worker/io/unique_fd.h"

namespace everstep {

struct OutputCaptureLimits {
  size_t log_bytes_max = 16 << 20;     // per file; the file before it is kept too
  size_t line_bytes_max = 4096;        // longer lines are passed on in pieces
  size_t last_lines_max = 20;
  size_t batch_lines_max = 128;        // passed on at once; more are counted
  Duration batch_delay = Milliseconds(50);
};

class OutputCapture {
 public:
  struct Handler {
    // All run on the main loop.
    std::function<void(ProcessId, std::vector<std::string>)> on_lines;
    std::function<void(Reason, std::string)> on_trouble;  // a log file can't be written; once a minute at most
  };
  static Result<std::unique_ptr<OutputCapture>> Create(EventLoop& main, OutputCaptureLimits limits, Handler handler);
  ~OutputCapture();

  // Takes the read end, non-blocking, of a process's output.
  void Add(ProcessId process, std::string log_file, UniqueFd output);
  // Reads what is left without waiting for more (a grandchild may hold the pipe for ever), closes, and hands the last
  // lines to `done` on the main loop.
  void Finish(ProcessId process, std::function<void(std::vector<std::string>)> done);

 private:
  struct Stream {
    UniqueFd output;
    UniqueFd file;
    std::string log_file;
    size_t file_bytes = 0;
    std::string partial;                 // a line not ended yet
    std::deque<std::string> last_lines;
    std::vector<std::string> batch;
    int64_t batch_left_out = 0;
    bool batch_scheduled = false;
  };
  OutputCapture(EventLoop& main, OutputCaptureLimits limits, Handler handler, std::unique_ptr<EventLoop> loop);
  void Read(ProcessId process, size_t bytes_max);
  void Take(ProcessId process, Stream& stream, const char* data, size_t bytes);
  void TakeLine(ProcessId process, Stream& stream, std::string line);
  void WriteLog(Stream& stream, const char* data, size_t bytes);
  Status OpenLog(Stream& stream);
  void SendBatch(ProcessId process, Stream& stream);
  void Trouble(int error, const std::string& log_file);

  EventLoop& main_;
  const OutputCaptureLimits limits_;
  const Handler handler_;
  std::unique_ptr<EventLoop> loop_;
  std::map<ProcessId, Stream> streams_;  // of the capture thread
  Instant trouble_next_{};
  std::thread thread_;
};

}  // namespace everstep
