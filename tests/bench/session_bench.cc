// What the library itself costs a training step: the calls of a step in a world of one rank, where the vote has nobody
// to talk to. Prints a table and one line of JSON. Beside it, a snapshot of 48 MB (the 4-million-parameter model with
// its optimizer) against a plain copy.
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "worker/client/session.h"
#include "worker/client/staging_writer.h"
#include "worker/client/static_world.h"

namespace everstep {
namespace {

using Clock = std::chrono::steady_clock;

double Microseconds(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

struct Percentiles {
  double p50 = 0, p99 = 0;
};
Percentiles Of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples[samples.size() * 99 / 100]};
}

Result<Percentiles> StepCost(int64_t steps) {
  client::RankEnvironment alone;
  alone.process = ProcessId(1);
  EVERSTEP_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, Session::CreateIn({}, alone));
  session->SetApply([](Step) { return OkStatus(); });
  EVERSTEP_ASSIGN_OR_RETURN(const Membership place, session->Join());
  std::vector<double> samples;
  for (Step step = place.next_step; step.value <= steps; step = step.Next()) {
    const Clock::time_point start = Clock::now();
    EVERSTEP_RETURN_IF_ERROR(session->BeginStep(step));
    EVERSTEP_RETURN_IF_ERROR(session->GradientsComplete(step));
    EVERSTEP_RETURN_IF_ERROR(session->Commit(step).status());
    samples.push_back(Microseconds(Clock::now() - start));
  }
  return Of(std::move(samples));
}

struct SnapshotCost {
  Percentiles snapshot, copy;
};
Result<SnapshotCost> SnapshotCosts(size_t bytes, int rounds) {
  std::vector<std::byte> state(bytes), plain(bytes);
  std::memset(state.data(), 7, bytes);
  std::memset(plain.data(), 1, bytes);
  client::StateRegistry registry;
  TensorInfo info;
  info.name = "state";
  info.dtype = "u8";
  info.global_shape = {static_cast<int64_t>(bytes)};
  info.bytes = bytes;
  EVERSTEP_RETURN_IF_ERROR(registry.Register(info, state.data()));
  client::StagingWriter writer;
  EVERSTEP_RETURN_IF_ERROR(writer.Open(memfd_create("staging", MFD_CLOEXEC), ProcessId(1), uint64_t{1} << 32));
  std::vector<double> snapshots, copies;
  for (int64_t i = 1; i <= rounds + 4; ++i) {  // the first four take new memory
    writer.Keep(Step(i));
    Clock::time_point start = Clock::now();
    EVERSTEP_RETURN_IF_ERROR(writer.Take(registry, {Step(i), Generation(1)}, ShardIndex(0), Generation(1)).status());
    if (i > 4) snapshots.push_back(Microseconds(Clock::now() - start));
    start = Clock::now();
    std::memcpy(plain.data(), state.data(), bytes);
    if (i > 4) copies.push_back(Microseconds(Clock::now() - start));
  }
  return SnapshotCost{Of(std::move(snapshots)), Of(std::move(copies))};
}

int Main() {
  const Result<Percentiles> step = StepCost(20'000);
  const Result<SnapshotCost> snapshot = SnapshotCosts(size_t{48} << 20, 20);
  if (!step.ok() || !snapshot.ok()) {
    fmt::print(stderr, "session_bench: {} {}\n", step.status().ToString(), snapshot.status().ToString());
    return 1;
  }
  fmt::print("{:<28}{:>12}{:>12}\n", "", "p50 us", "p99 us");
  fmt::print("{:<28}{:>12.2f}{:>12.2f}\n", "library, one step", step->p50, step->p99);
  fmt::print("{:<28}{:>12.0f}{:>12.0f}\n", "snapshot of 48 MB, hashed", snapshot->snapshot.p50, snapshot->snapshot.p99);
  fmt::print("{:<28}{:>12.0f}{:>12.0f}\n", "copy of 48 MB", snapshot->copy.p50, snapshot->copy.p99);
  fmt::print("{{\"step_us\":{{\"p50\":{:.3f},\"p99\":{:.3f}}},\"snapshot_us\":{{\"p50\":{:.0f},\"p99\":{:.0f}}},"
             "\"copy_us\":{{\"p50\":{:.0f},\"p99\":{:.0f}}}}}\n",
             step->p50, step->p99, snapshot->snapshot.p50, snapshot->snapshot.p99, snapshot->copy.p50, snapshot->copy.p99);
  return 0;
}

}  // namespace
}  // namespace everstep

int main() { return everstep::Main(); }
