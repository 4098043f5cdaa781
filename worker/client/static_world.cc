#include "worker/client/static_world.h"

#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

namespace everstep::client {
namespace {

constexpr int32_t kStaticRanksMax = 4096;

template <typename T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Status Wrong(const char* name, std::string_view value, const std::string& remedy) {
  return InvalidArgument(std::string(name) + " is '" + std::string(value) + "': " + remedy);
}

}  // namespace

Result<RankEnvironment> ReadEnvironment(const char* (*get)(const char* name)) {
  RankEnvironment environment;
  const auto number = [&](const char* name, auto& into, auto lowest, const char* remedy) -> Status {
    const char* text = get(name);
    if (text == nullptr || *text == '\0') return OkStatus();
    const auto value = ParseNumber<std::remove_reference_t<decltype(into)>>(text);
    if (!value || *value < lowest) return Wrong(name, text, remedy);
    into = *value;
    return OkStatus();
  };
  if (const char* socket = get("EVERSTEP_AGENT_SOCKET"); socket != nullptr) environment.agent_socket = socket;
  if (const char* host = get("EVERSTEP_HOST"); host != nullptr && *host != '\0') environment.host = host;
  EVERSTEP_RETURN_IF_ERROR(number("EVERSTEP_PROCESS_ID", environment.process.value, uint64_t{1}, "set a number from 1 on"));
  EVERSTEP_RETURN_IF_ERROR(number("EVERSTEP_PAGE_FD", environment.page_fd, 0, "set an inherited descriptor, or nothing"));
  EVERSTEP_RETURN_IF_ERROR(
      number("EVERSTEP_STAGING_FD", environment.staging_fd, 0, "set an inherited descriptor, or nothing"));
  EVERSTEP_RETURN_IF_ERROR(
      number("EVERSTEP_SNAPSHOT_EVERY", environment.snapshot_every, int64_t{0}, "set a number of steps, 0 for none"));
  if (!environment.agent_socket.empty()) {
    if (environment.process == ProcessId(0)) return Wrong("EVERSTEP_PROCESS_ID", "", "an agent's rank needs its number");
    return environment;
  }

  const char* world = get("EVERSTEP_STATIC_WORLD");
  if (world != nullptr && *world != '\0') {
    environment.static_world.clear();
    std::string_view rest = world;
    while (true) {
      const size_t comma = rest.find(',');
      const std::string_view address = rest.substr(0, comma);
      const size_t colon = address.rfind(':');
      const auto port = colon == std::string_view::npos ? std::nullopt : ParseNumber<uint16_t>(address.substr(colon + 1));
      if (colon == 0 || !port || *port == 0) {
        return Wrong("EVERSTEP_STATIC_WORLD", world, "list host:port of each rank, separated by commas");
      }
      environment.static_world.emplace_back(address);
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
  }
  const auto size = static_cast<int32_t>(environment.static_world.size());
  if (size > kStaticRanksMax) return Wrong("EVERSTEP_STATIC_WORLD", "…", "at most 4096 ranks");
  EVERSTEP_RETURN_IF_ERROR(number("EVERSTEP_STATIC_RANK", environment.static_rank, 0, "set a rank of the world"));
  EVERSTEP_RETURN_IF_ERROR(number("EVERSTEP_STATIC_PP", environment.static_stages, 1, "set a number from 1 on"));
  if (environment.static_rank >= size) {
    return Wrong("EVERSTEP_STATIC_RANK", std::to_string(environment.static_rank),
                 "EVERSTEP_STATIC_WORLD names " + std::to_string(size) + " ranks");
  }
  if (size % environment.static_stages != 0) {
    return Wrong("EVERSTEP_STATIC_PP", std::to_string(environment.static_stages),
                 "it must divide the world of " + std::to_string(size) + " ranks");
  }
  environment.process = ProcessId(static_cast<uint64_t>(environment.static_rank) + 1);
  return environment;
}

Assignment StaticAssignment(const RankEnvironment& environment, int32_t micro_batch_count) {
  Assignment a;
  a.job = JobUid("static");
  a.job_name = "static";
  a.generation = Generation(1);
  constexpr char kToken[] = "everstep static";
  static_assert(sizeof kToken == sizeof(Token));
  std::memcpy(a.token.data(), kToken, sizeof kToken);
  const auto size = static_cast<int32_t>(environment.static_world.size());
  a.pp_size = environment.static_stages;
  a.dp_size = size / a.pp_size;
  a.micro_batch_count = micro_batch_count;
  for (int32_t i = 0; i < size; ++i) {
    RankAssignment r;
    r.rank = Rank(i);
    r.process = ProcessId(static_cast<uint64_t>(i) + 1);
    r.dp = i / a.pp_size;
    r.pp = i % a.pp_size;
    r.local_rank = i;
    const int32_t each = micro_batch_count / a.dp_size;
    const int32_t more = micro_batch_count % a.dp_size;
    r.micro_batch_first = r.dp * each + std::min(r.dp, more);
    r.micro_batch_count = each + (r.dp < more ? 1 : 0);
    r.mesh_address = environment.static_world[static_cast<size_t>(i)];
    r.action = RestoreAction::kInitialize;
    a.ranks.push_back(std::move(r));
  }
  return a;
}

}  // namespace everstep::client
