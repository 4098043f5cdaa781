// What the controller costs under many agents. Emulates them through the real control plane: one gRPC stream each on
// shared channels, authenticated datagrams at the heartbeat interval. Prints a table and one line of JSON.
//   controller_bench [agents] [seconds]
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "everstep/v1/admin.grpc.pb.h"
#include "everstep/v1/agent.grpc.pb.h"
#include "proto/convert/agent_convert.h"
#include "proto/model/heartbeat_codec.h"

namespace everstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr int kThreads = 16;       // that register agents; appends of one moment share a write
constexpr int kBeatsPerSecond = 4;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

pid_t g_controller = 0;

[[noreturn]] void Give(const std::string& why) {
  fmt::print(stderr, "controller_bench: {}\n", why);
  if (g_controller > 0) kill(g_controller, SIGKILL);
  std::_Exit(1);  // other threads are at work
}

// The controller as a process of its own, so that its CPU time is its own.
class Controller {
 public:
  Controller(const std::string& program, const std::string& directory) : directory_(directory) {
    std::vector<std::string> arguments = {program, "--data-dir", directory, "--listen", "127.0.0.1:0",
                                          "--ops-listen", "127.0.0.1:0", "--log-level", "error"};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    if (posix_spawn(&pid_, program.c_str(), nullptr, nullptr, argv.data(), environ) != 0) Give("cannot start " + program);
    g_controller = pid_;
    const auto start = Clock::now();
    while (!fs::exists(directory + "/endpoint")) {
      if (SecondsSince(start) > 30 || waitpid(pid_, nullptr, WNOHANG) != 0) Give("the controller did not start");
      std::this_thread::yield();
    }
    std::ifstream file(directory + "/endpoint");
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("listen: ", 0) == 0) address_ = line.substr(9, line.size() - 10);
    }
  }
  ~Controller() {
    kill(pid_, SIGTERM);
    int status = 0;
    waitpid(pid_, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) Give("the controller did not stop cleanly");
  }
  const std::string& address() const { return address_; }
  // User and system time so far.
  double CpuSeconds() const {
    std::ifstream file(fmt::format("/proc/{}/stat", pid_));
    std::stringstream text;
    text << file.rdbuf();
    std::istringstream fields(text.str().substr(text.str().rfind(')') + 2));
    std::string skipped;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    double user = 0, system = 0;
    fields >> user >> system;
    return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  double ResidentMegabytes() const {
    std::ifstream file(fmt::format("/proc/{}/statm", pid_));
    double size = 0, resident = 0;
    file >> size >> resident;
    return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
  }

 private:
  const std::string directory_;
  std::string address_;
  pid_t pid_ = 0;
};

struct EmulatedAgent {
  std::string name;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AgentMessage, v1::ControllerMessage>> stream;
  Welcome welcome;
  uint64_t sequence = 0;
  std::atomic<bool> registered{false};
};

void Register(v1::AgentService::Stub& stub, EmulatedAgent& agent, uint64_t nonce) {
  AgentHello hello;
  hello.inventory.server = ServerId(agent.name);
  hello.inventory.host = "127.0.0.1";
  hello.inventory.failure_domain = agent.name;
  hello.inventory.version = "bench";
  hello.inventory.devices.push_back({DeviceIndex(0), DeviceKind::kCpuSlot, "cpu", 0, 1.0});
  hello.start_nonce = nonce;
  agent.stream = stub.Session(&agent.context);
  if (!agent.stream->Write(ToMessage(hello))) Give("a hello was not taken");
  v1::ControllerMessage message;
  while (agent.stream->Read(&message)) {
    const auto command = FromMessage(message);
    if (!command.ok() || !std::holds_alternative<Welcome>(command->command)) continue;
    agent.welcome = std::get<Welcome>(command->command);
    agent.registered.store(true, std::memory_order_release);
    return;
  }
  Give("an agent was not welcomed");
}

void Beat(int socket, EmulatedAgent& agent) {
  Heartbeat heartbeat;
  heartbeat.server = ServerId(agent.name);
  heartbeat.incarnation = agent.welcome.incarnation;
  heartbeat.sequence = ++agent.sequence;
  heartbeat.loop_counter = agent.sequence;
  const std::string bytes = EncodeHeartbeat(heartbeat, agent.welcome.heartbeat_key_id, agent.welcome.heartbeat_key);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  const std::string& address = agent.welcome.heartbeat_address;
  const size_t colon = address.rfind(':');
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  if (sendto(socket, bytes.data(), bytes.size(), 0, reinterpret_cast<sockaddr*>(&to), sizeof(to)) < 0) {
    Give("a datagram could not be sent");
  }
}

// Beats for all registered agents, spread evenly over the interval, until told to stop.
void BeatAll(std::vector<std::unique_ptr<EmulatedAgent>>& agents, std::atomic<bool>& stop, std::atomic<uint64_t>& sent) {
  const int socket = ::socket(AF_INET, SOCK_DGRAM, 0);
  auto next = Clock::now();
  while (!stop) {
    for (size_t i = 0; i < agents.size() && !stop; ++i) {
      if (agents[i]->registered.load(std::memory_order_acquire)) {
        Beat(socket, *agents[i]);
        ++sent;
      }
      next += std::chrono::nanoseconds(1'000'000'000 / kBeatsPerSecond / static_cast<int64_t>(agents.size()));
      if (i % 16 == 0) std::this_thread::sleep_until(next);
    }
  }
  close(socket);
}

int Main(int agent_count, int seconds) {
  std::string pattern = "/tmp/everstep-bench-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) Give("no temporary folder");
  const std::string program = fs::read_symlink("/proc/self/exe").parent_path().string() + "/everstep-controller";
  int exit_code = 0;
  {
    Controller controller(program, pattern + "/data");
    std::vector<std::shared_ptr<grpc::Channel>> channels;
    std::vector<std::unique_ptr<v1::AgentService::Stub>> stubs;
    for (int i = 0; i < kThreads; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt("bench.channel", i);  // channels with equal arguments share one connection
      channels.push_back(grpc::CreateCustomChannel(controller.address(), grpc::InsecureChannelCredentials(), arguments));
      stubs.push_back(v1::AgentService::NewStub(channels.back()));
    }
    std::vector<std::unique_ptr<EmulatedAgent>> agents;
    for (int i = 0; i < agent_count; ++i) {
      agents.push_back(std::make_unique<EmulatedAgent>());
      agents.back()->name = fmt::format("s{:05}", i);
    }
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> sent{0};
    std::thread beater([&] { BeatAll(agents, stop, sent); });

    const auto start = Clock::now();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = t; i < agent_count; i += kThreads) Register(*stubs[t], *agents[i], 1000 + i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const double registering = SecondsSince(start);

    const double cpu_before = controller.CpuSeconds();
    const uint64_t sent_before = sent;
    const auto measured_from = Clock::now();
    std::this_thread::sleep_until(measured_from + std::chrono::seconds(seconds));
    const double cpu = controller.CpuSeconds() - cpu_before;
    const auto beats = static_cast<double>(sent - sent_before);
    const double wall = SecondsSince(measured_from);

    auto admin = v1::AdminService::NewStub(channels[0]);
    std::vector<double> list_milliseconds;
    int suspects = 0;
    for (int i = 0; i < 20; ++i) {
      grpc::ClientContext context;
      v1::ListServersResponse servers;
      const auto asked = Clock::now();
      if (!admin->ListServers(&context, {}, &servers).ok()) Give("the servers can't be listed");
      list_milliseconds.push_back(SecondsSince(asked) * 1e3);
      suspects = 0;
      for (const v1::Server& server : servers.servers()) suspects += server.status().state() != v1::SERVER_STATE_SPARE;
      if (servers.servers_size() != agent_count) Give("not all agents are listed");
    }
    std::sort(list_milliseconds.begin(), list_milliseconds.end());
    stop = true;
    beater.join();
    fmt::print("{:<44} {}\n", "agents", agent_count);
    fmt::print("{:<44} {:.0f}\n", "registrations per second", agent_count / registering);
    fmt::print("{:<44} {:.0f}\n", "heartbeats per second", beats / wall);
    fmt::print("{:<44} {:.1f}\n", "controller CPU per heartbeat, microseconds", cpu / beats * 1e6);
    fmt::print("{:<44} {:.3f}\n", "controller CPU, cores", cpu / wall);
    fmt::print("{:<44} {:.0f}\n", "controller memory, MB", controller.ResidentMegabytes());
    fmt::print("{:<44} {:.1f}\n", "list all servers, milliseconds p50", list_milliseconds[10]);
    fmt::print("{:<44} {}\n", "servers not healthy (false alarms)", suspects);
    fmt::print("{{\"agents\":{},\"heartbeats_per_second\":{:.0f},\"cpu_us_per_heartbeat\":{:.2f},\"cpu_cores\":{:.4f},"
               "\"registrations_per_second\":{:.0f},\"list_servers_ms_p50\":{:.2f},\"not_healthy\":{}}}\n",
               agent_count, beats / wall, cpu / beats * 1e6, cpu / wall, agent_count / registering,
               list_milliseconds[10], suspects);
    exit_code = suspects == 0 ? 0 : 1;
    for (auto& agent : agents) agent->context.TryCancel();
    for (auto& agent : agents) agent->stream->Finish();
  }
  fs::remove_all(pattern);
  return exit_code;
}

}  // namespace
}  // namespace everstep

int main(int argc, char** argv) {
  const int agents = argc > 1 ? std::atoi(argv[1]) : 2000;
  const int seconds = argc > 2 ? std::atoi(argv[2]) : 10;
  if (agents < 1 || agents > 20000 || seconds < 1) {
    fmt::print(stderr, "usage: controller_bench [agents 1-20000] [seconds]\n");
    return 2;
  }
  return everstep::Main(agents, seconds);
}
