// A rank process for tests of the agent: speaks the socket's protocol without any library or training. Joins, obeys
// fences, assignments and Resume at once, and shows on its page that the vote of step 7 passed.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "proto/model/progress.h"
#include "worker/wire/rank_codec.h"

namespace everstep {
namespace {

int g_socket = -1;

void Say(const RankToAgent& message) {
  const std::string bytes = EncodeFrame(message);
  if (write(g_socket, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) _exit(3);
}

void ShowVote(Generation generation) {
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(getenv("EVERSTEP_PAGE_FD")), 0);
  if (memory == MAP_FAILED) _exit(4);
  auto* page = static_cast<ProgressPage*>(memory);
  page->version.fetch_add(1);
  page->phase = static_cast<uint8_t>(RankPhase::kComputing);
  page->memory_valid = 1;
  page->applied_step = 7;
  page->applied_generation = generation.value;
  page->generation = generation.value;
  page->vote_passed = 7;
  page->version.fetch_add(1);
}

int Run() {
  const char* path = getenv("EVERSTEP_AGENT_SOCKET");
  if (path == nullptr) return 5;
  g_socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  if (connect(g_socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return 6;
  RankHello hello;
  hello.process = ProcessId(strtoull(getenv("EVERSTEP_PROCESS_ID"), nullptr, 10));
  hello.pid = getpid();
  hello.mesh_address = "127.0.0.1:4000";
  Say(hello);
  FrameReader reader;
  char bytes[65536];
  for (;;) {
    const ssize_t got = read(g_socket, bytes, sizeof(bytes));
    if (got <= 0) return 7;
    reader.Append(std::string_view(bytes, static_cast<size_t>(got)));
    for (;;) {
      auto frame = reader.Next();
      if (!frame.ok()) return 8;
      if (!frame->has_value()) break;
      auto message = DecodeAgentToRank(**frame);
      if (!message.ok()) return 9;
      if (std::holds_alternative<HelloAccepted>(*message)) {
        Say(RankJoin{});
      } else if (const auto* fence = std::get_if<FenceRank>(&*message)) {
        CollectAnswer answer;
        answer.generation = fence->generation;
        answer.report.memory_valid = true;
        answer.report.applied = {Step(6), Generation(1)};
        Say(answer);
      } else if (const auto* assign = std::get_if<AssignRank>(&*message)) {
        Say(RankConnected{assign->assignment.generation});
        RankReady ready;
        ready.generation = assign->assignment.generation;
        ready.restored_from = "kept";
        Say(ready);
      } else if (const auto* resume = std::get_if<ResumeRank>(&*message)) {
        ShowVote(resume->generation);
        Say(MetricReported{Step(7), "loss", 0.5});
      } else if (std::holds_alternative<StopRank>(*message)) {
        Say(RankFinished{});
        return 0;
      }
    }
  }
}

}  // namespace
}  // namespace everstep

int main() { return everstep::Run(); }
