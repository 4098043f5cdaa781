#include "controller/cli/admin_client.h"

#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "controller/cli/local_cluster.h"
#include "everstep/v1/admin.grpc.pb.h"

namespace everstep::cli {
namespace {

Result<ControllerAddress> Checked(std::string address, std::string origin) {
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string::npos;
  if (colon == 0 || !digits || std::stoi(port) == 0 || std::stoi(port) > 65535) {
    return InvalidArgument(
        fmt::format("controller address '{}' ({}) is not host:port; for example 127.0.0.1:7070",
                    address, origin));
  }
  return ControllerAddress{std::move(address), std::move(origin)};
}

}  // namespace

std::string HomeDirectory() {
  if (const char* home = std::getenv("EVERSTEP_HOME"); home != nullptr && *home != '\0')
    return home;
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0')
    return std::string(home) + "/.everstep";
  return "/tmp/everstep-" + std::to_string(getuid());
}

std::string NewRequestId() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

Result<ControllerAddress> FindController(const std::string& flag,
                                         const std::string& local_directory) {
  if (!flag.empty()) return Checked(flag, "--controller");
  if (const char* value = std::getenv("EVERSTEP_CONTROLLER"); value != nullptr && *value != '\0') {
    return Checked(value, "EVERSTEP_CONTROLLER");
  }
  const std::string file = HomeDirectory() + "/config.yaml";
  if (std::error_code error; std::filesystem::exists(file, error)) {
    try {
      const YAML::Node root = YAML::LoadFile(file);
      for (const auto& entry : root) {
        const std::string key = entry.first.as<std::string>();
        if (key != "controller") {
          return InvalidArgument(
              fmt::format("{}:{}: unknown field '{}'; the only one is controller: host:port", file,
                          entry.first.Mark().line + 1, key));
        }
      }
      if (root["controller"]) return Checked(root["controller"].as<std::string>(), file);
    } catch (const YAML::Exception& error) {
      return InvalidArgument(fmt::format("{}: {}; correct or remove it", file, error.what()));
    }
  }
  auto cluster = LocalCluster::Load(local_directory);
  if (cluster.ok() && cluster.value().ControllerRuns()) {
    return ControllerAddress{cluster.value().state().address,
                             "local cluster in " + local_directory};
  }
  return NotFound(
      "no controller: start a local one with 'everstep local up', or name one with --controller "
      "HOST:PORT, "
      "EVERSTEP_CONTROLLER or 'controller:' in " +
      file);
}

using Calls = v1::AdminService::Stub;

struct AdminClient::Service {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<Calls> calls;

  template <typename Request, typename Response>
  Result<Response> Call(grpc::Status (Calls::*method)(grpc::ClientContext*, const Request&,
                                                      Response*),
                        const Request& request, Duration timeout,
                        const ControllerAddress& controller) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    Response response;
    const grpc::Status status = (calls.get()->*method)(&context, request, &response);
    if (!status.ok()) return Explain(status, controller);
    return response;
  }

  // A gRPC status as ours, with the controller's address where it is unreachable.
  static Status Explain(const grpc::Status& status, const ControllerAddress& controller) {
    const StatusCode code = static_cast<StatusCode>(status.error_code());
    if (code == StatusCode::kUnavailable || code == StatusCode::kDeadlineExceeded) {
      return Status(
          code,
          fmt::format(
              "the controller at {} ({}) does not answer: {}; is it running? see 'everstep local "
              "status' and 'everstep doctor'",
              controller.address, controller.origin, status.error_message()));
    }
    return Status(code,
                  status.error_message().empty() ? StatusCodeName(code) : status.error_message());
  }
};

AdminClient::AdminClient(ControllerAddress controller, Duration timeout)
    : controller_(std::move(controller)), timeout_(timeout), service_(std::make_unique<Service>()) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // Also the limit of one connection attempt: on a loaded machine or a far network a handshake takes its time.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  service_->channel =
      grpc::CreateCustomChannel(controller_.address, grpc::InsecureChannelCredentials(), arguments);
  service_->calls = v1::AdminService::NewStub(service_->channel);
}
AdminClient::~AdminClient() = default;
AdminClient::AdminClient(AdminClient&&) noexcept = default;
AdminClient& AdminClient::operator=(AdminClient&&) noexcept = default;

Result<v1::SubmitJobResponse> AdminClient::Call(const v1::SubmitJobRequest& request) const {
  return service_->Call(&Calls::SubmitJob, request, timeout_, controller_);
}
Result<v1::CancelJobResponse> AdminClient::Call(const v1::CancelJobRequest& request) const {
  return service_->Call(&Calls::CancelJob, request, timeout_, controller_);
}
Result<v1::DrainServerResponse> AdminClient::Call(const v1::DrainServerRequest& request) const {
  return service_->Call(&Calls::DrainServer, request, timeout_, controller_);
}
Result<v1::UndrainServerResponse> AdminClient::Call(const v1::UndrainServerRequest& request) const {
  return service_->Call(&Calls::UndrainServer, request, timeout_, controller_);
}
Result<v1::ListServersResponse> AdminClient::Call(const v1::ListServersRequest& request) const {
  return service_->Call(&Calls::ListServers, request, timeout_, controller_);
}
Result<v1::ListJobsResponse> AdminClient::Call(const v1::ListJobsRequest& request) const {
  return service_->Call(&Calls::ListJobs, request, timeout_, controller_);
}
Result<v1::GetJobResponse> AdminClient::Call(const v1::GetJobRequest& request) const {
  return service_->Call(&Calls::GetJob, request, timeout_, controller_);
}
Result<v1::ListRecoveriesResponse> AdminClient::Call(
    const v1::ListRecoveriesRequest& request) const {
  return service_->Call(&Calls::ListRecoveries, request, timeout_, controller_);
}
Result<v1::GetRecoveryResponse> AdminClient::Call(const v1::GetRecoveryRequest& request) const {
  return service_->Call(&Calls::GetRecovery, request, timeout_, controller_);
}
Result<v1::ListCheckpointsResponse> AdminClient::Call(
    const v1::ListCheckpointsRequest& request) const {
  return service_->Call(&Calls::ListCheckpoints, request, timeout_, controller_);
}
Result<v1::ListEventsResponse> AdminClient::Call(const v1::ListEventsRequest& request) const {
  return service_->Call(&Calls::ListEvents, request, timeout_, controller_);
}
Result<v1::GetLogsResponse> AdminClient::Call(const v1::GetLogsRequest& request) const {
  return service_->Call(&Calls::GetLogs, request, timeout_, controller_);
}
Result<v1::GetConfigResponse> AdminClient::Call(const v1::GetConfigRequest& request) const {
  return service_->Call(&Calls::GetConfig, request, timeout_, controller_);
}
Result<v1::GetControllerInfoResponse> AdminClient::Call(
    const v1::GetControllerInfoRequest& request) const {
  return service_->Call(&Calls::GetControllerInfo, request, timeout_, controller_);
}

bool AdminClient::WaitForConnection(Duration timeout) const {
  return service_->channel->WaitForConnected(std::chrono::system_clock::now() + timeout);
}

Status AdminClient::Watch(
    const std::string& job,
    const std::function<void(const v1::WatchJobResponse&)>& on_message) const {
  grpc::ClientContext context;
  v1::WatchJobRequest request;
  request.set_job(job);
  const auto reader = service_->calls->WatchJob(&context, request);
  v1::WatchJobResponse message;
  while (reader->Read(&message)) on_message(message);
  const grpc::Status status = reader->Finish();
  return status.ok() ? OkStatus() : Service::Explain(status, controller_);
}

}  // namespace everstep::cli
