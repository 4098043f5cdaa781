// The command line's side of AdminService: where the controller is, calls with a deadline, statuses
// as one-line errors that name the address and the remedy. Thread-safe after construction.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "everstep/v1/admin.pb.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep::cli {

namespace v1 = ::everstep::v1;

// Where an address came from, for error messages.
struct ControllerAddress {
  std::string address;  // host:port
  std::string origin;   // "--controller", "EVERSTEP_CONTROLLER", "/home/u/.everstep/config.yaml",
                        // "local cluster in DIR"
};

// The flag, else EVERSTEP_CONTROLLER, else `controller:` in ~/.everstep/config.yaml, else the local
// cluster in `local_directory` when its controller runs. kNotFound: none of them; kInvalidArgument:
// malformed, with its origin.
Result<ControllerAddress> FindController(const std::string& flag,
                                         const std::string& local_directory);

// ~/.everstep, or below $EVERSTEP_HOME when that is set.
std::string HomeDirectory();

std::string NewRequestId();  // random, unique

// Keeps gRPC to its source file: its headers are the slowest of all to compile.
class AdminClient {
 public:
  explicit AdminClient(ControllerAddress controller, Duration timeout = Seconds(10));
  ~AdminClient();
  AdminClient(AdminClient&&) noexcept;
  AdminClient& operator=(AdminClient&&) noexcept;

  // One call of the service each, bounded by the timeout.
  Result<v1::SubmitJobResponse> Call(const v1::SubmitJobRequest& request) const;
  Result<v1::CancelJobResponse> Call(const v1::CancelJobRequest& request) const;
  Result<v1::DrainServerResponse> Call(const v1::DrainServerRequest& request) const;
  Result<v1::UndrainServerResponse> Call(const v1::UndrainServerRequest& request) const;
  Result<v1::ListServersResponse> Call(const v1::ListServersRequest& request) const;
  Result<v1::ListJobsResponse> Call(const v1::ListJobsRequest& request) const;
  Result<v1::GetJobResponse> Call(const v1::GetJobRequest& request) const;
  Result<v1::ListRecoveriesResponse> Call(const v1::ListRecoveriesRequest& request) const;
  Result<v1::GetRecoveryResponse> Call(const v1::GetRecoveryRequest& request) const;
  Result<v1::ListCheckpointsResponse> Call(const v1::ListCheckpointsRequest& request) const;
  Result<v1::ListEventsResponse> Call(const v1::ListEventsRequest& request) const;
  Result<v1::GetLogsResponse> Call(const v1::GetLogsRequest& request) const;
  Result<v1::GetConfigResponse> Call(const v1::GetConfigRequest& request) const;
  Result<v1::GetControllerInfoResponse> Call(const v1::GetControllerInfoRequest& request) const;

  // Calls `on_message` for everything that happens to the job, until the stream ends; then returns
  // why it ended.
  Status Watch(const std::string& job,
               const std::function<void(const v1::WatchJobResponse&)>& on_message) const;
  // True once there is a connection. Waiting here, not in a loop of failing calls: gRPC notices a controller that came
  // back at once only while somebody waits for it, and otherwise looks every five seconds.
  bool WaitForConnection(Duration timeout) const;
  const ControllerAddress& controller() const { return controller_; }

 private:
  struct Service;
  ControllerAddress controller_;
  Duration timeout_;
  std::unique_ptr<Service> service_;
};

}  // namespace everstep::cli
