// How fast the host collectives are, beside Gloo in the same processes and the same run (where Gloo
// is installed): all-reduce from 8 bytes to 64 MB, the commit vote, aborts, and the time to connect
// a mesh of 16 ranks. Ranks are forked processes on this machine over loopback. Prints a table, or
// JSON with --json. Not part of ctest.
//
//   collective_bench [--ranks N] [--max-bytes N] [--rounds N] [--json]
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "worker/collective/exact/exact_reducer.h"
#include "worker/collective/host/host_communicator.h"
#include "worker/collective/vote.h"

#ifdef EVERSTEP_BENCH_GLOO
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#endif

namespace everstep::collective {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanksMax = 64;
constexpr int kRowsMax = 32;

struct Row {
  uint64_t bytes;
  double ours_median_us, ours_p99_us;
  double gloo_median_us, gloo_p99_us;
};

// Shared by the processes; anonymous shared memory, so all zero at first.
struct Board {
  char address[kRanksMax][64];
  std::atomic<int> published;
  std::atomic<int> phase_arrived[64];
  std::atomic<int64_t> go_ns;
  std::atomic<int64_t> done_ns[kRanksMax];
  Row rows[kRowsMax];
  int row_count;
  double vote_median_us, vote_p99_us;
  double abort_own_ms[256], abort_peer_ms[256];
  double exact_ms, native_ms;
};

Board* NewBoard() {
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) Board();
}

int64_t NowNs() { return Clock::now().time_since_epoch().count(); }

void Meet(std::atomic<int>& arrived, int count) {
  arrived.fetch_add(1);
  while (arrived.load() < count) ::sched_yield();
}

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "collective_bench: %s\n", status.ToString().c_str());
  ::_exit(1);
}

double Percentile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(fraction * static_cast<double>(values.size())))];
}

// Forks `ranks` processes that run `body` and waits for them; true if all succeeded.
bool Fork(int ranks, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      body(rank);
      ::_exit(0);
    }
    children.push_back(pid);
  }
  bool good = true;
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  return good;
}

MeshOptions Publish(Board& board, int rank, int ranks) {
  MeshOptions options;
  auto listener = MeshListener::Create({});
  Require(listener.status());
  std::snprintf(board.address[rank], sizeof(board.address[rank]), "%s",
                (*listener)->address().c_str());
  Meet(board.published, ranks);
  options.job_uid = JobUid("bench");
  options.generation = Generation(1);
  options.rank = Rank(rank);
  options.listener = *listener;
  for (int i = 0; i < ranks; ++i) options.addresses.push_back(board.address[i]);
  return options;
}

#ifdef EVERSTEP_BENCH_GLOO
std::shared_ptr<gloo::rendezvous::Context> ConnectGloo(const std::string& folder, int rank,
                                                       int ranks) {
  gloo::transport::tcp::attr attributes("127.0.0.1");
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  // Gloo's interface changed between distributions, without a version to ask for.
  const auto connect = [&device](auto& c, const auto& store) {
    if constexpr (requires { c.connectFullMesh(store, device); }) {
      c.connectFullMesh(store, device);
    } else {
      c.connectFullMesh(*store, device);
    }
  };
  connect(*context, std::make_shared<gloo::rendezvous::FileStore>(folder));
  return context;
}

void GlooAllReduce(const std::shared_ptr<gloo::Context>& context, float* data, size_t count,
                   bool ring) {
  gloo::AllreduceOptions options(context);
  options.setOutput(data, count);
  options.setAlgorithm(ring ? gloo::AllreduceOptions::Algorithm::RING
                            : gloo::AllreduceOptions::Algorithm::BCUBE);
  options.setReduceFunction(
      static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::max<float>));
  gloo::allreduce(options);
}
#endif

// Microseconds of each of `count` calls.
std::vector<double> Time(int count, const std::function<void()>& call) {
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  return times;
}

void Append(std::vector<double>& to, const std::vector<double>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

void AllReduceRank(Board& board, int rank, int ranks, size_t bytes_max, int rounds,
                   const std::string& gloo_folder) {
  auto made = ConnectMesh(Publish(board, rank, ranks));
  Require(made.status());
  Communicator& ours = **made;
#ifdef EVERSTEP_BENCH_GLOO
  auto gloo = ConnectGloo(gloo_folder, rank, ranks);
#else
  static_cast<void>(gloo_folder);
#endif
  int row = 0;
  for (size_t bytes : {size_t{8}, size_t{64}, size_t{512}, size_t{4} << 10, size_t{16} << 10,
                       size_t{32} << 10, size_t{64} << 10, size_t{256} << 10, size_t{1} << 20,
                       size_t{4} << 20, size_t{16} << 20, size_t{64} << 20}) {
    if (bytes > bytes_max) break;
    const size_t count = bytes / sizeof(float);
    const int calls = bytes <= (64 << 10)
                          ? 500
                          : static_cast<int>(std::max<size_t>(3, (size_t{48} << 20) / bytes));
    std::vector<float> data(count, 1.0f);
    std::vector<double> ours_us;
    std::vector<double> ring_us;
    std::vector<double> cube_us;
    // Turn and turn about, so that whatever else the machine does hits both.
    for (int round = 0; round < rounds; ++round) {
      Require(ours.Barrier());
      Append(ours_us, Time(calls, [&] {
               Require(
                   ours.AllReduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kMax));
             }));
      Require(ours.Barrier());
#ifdef EVERSTEP_BENCH_GLOO
      // Fewer of these: on a busy machine one takes milliseconds.
      const int gloo_calls = std::min(calls, 100);
      Append(ring_us, Time(gloo_calls, [&] { GlooAllReduce(gloo, data.data(), count, true); }));
      Require(ours.Barrier());
      Append(cube_us, Time(gloo_calls, [&] { GlooAllReduce(gloo, data.data(), count, false); }));
#endif
    }
    if (rank == 0) {
      const std::vector<double>& best =
          Percentile(ring_us, 0.5) <= Percentile(cube_us, 0.5) ? ring_us : cube_us;
      board.rows[row++] = {bytes, Percentile(ours_us, 0.5), Percentile(ours_us, 0.99),
                           Percentile(best, 0.5), Percentile(best, 0.99)};
      board.row_count = row;
    }
  }
  std::vector<double> vote_us;
  std::mutex mutex;
  for (int64_t step = 1; step <= 2000; ++step) {
    Append(vote_us, Time(1, [&] {
             Require(Vote(ours, {.generation = Generation(1), .step = Step(step)},
                          {&mutex, [] { return false; }, {}})
                         .status());
           }));
  }
  if (rank == 0) {
    board.vote_median_us = Percentile(vote_us, 0.5);
    board.vote_p99_us = Percentile(vote_us, 0.99);
  }
  // Exact against native mean of 16 MB of gradients: the same number of elements, one micro-batch
  // per rank.
  const std::vector<size_t> tensors = {size_t{4} << 20};
  ExactReducer reducer(tensors, static_cast<size_t>(ranks), DataType::kF32);
  std::vector<float> gradient(tensors[0], 0.5f);
  std::vector<float> mean(tensors[0]);
  Require(ours.Barrier());
  const std::vector<double> exact_us = Time(5, [&] {
    reducer.BeginStep();
    reducer.Accumulate(gradient.data());
    Require(reducer.Finish(ours, mean.data()));
    reducer.UpdateExponents();
  });
  Require(ours.Barrier());
  const std::vector<double> native_us = Time(5, [&] {
    Require(
        ours.AllReduce(gradient.data(), mean.data(), tensors[0], DataType::kF32, ReduceOp::kAvg));
  });
  if (rank == 0) {
    board.exact_ms = Percentile(exact_us, 0.5) / 1000;
    board.native_ms = Percentile(native_us, 0.5) / 1000;
  }
  Require(ours.Barrier());
}

// Rank 0 aborts while the others wait for it (as for a stopped peer): how long until it is
// confirmed, and until they know.
void AbortRank(Board& board, int rank, int ranks, int repeats) {
  MeshOptions options = Publish(board, rank, ranks);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    options.generation = Generation(static_cast<uint64_t>(repeat) + 1);
    auto made = ConnectMesh(options);
    Require(made.status());
    Communicator& communicator = **made;
    Require(communicator.Barrier());
    std::vector<float> data(1 << 20);
    if (rank != 0) {
      std::atomic<bool> entered{false};
      std::thread waiting([&] {
        entered = true;
        const Status status = communicator.AllReduce(data.data(), data.data(), data.size(),
                                                     DataType::kF32, ReduceOp::kSum);
        if (status.code() != StatusCode::kAborted) Require(Internal("not aborted"));
        board.done_ns[rank] = NowNs();
      });
      while (!entered) ::sched_yield();
      Meet(board.phase_arrived[repeat % 32], ranks * (repeat / 32 + 1));
      if (rank == 1) {  // aborts by order, as the controller's fence would make all of them
        const int64_t start = NowNs();
        Require(communicator.AbortAndWait(Aborted("bench"), Seconds(5)));
        board.abort_own_ms[repeat] = static_cast<double>(NowNs() - start) / 1e6;
        board.go_ns = start;
      }
      waiting.join();
    } else {
      Meet(board.phase_arrived[repeat % 32], ranks * (repeat / 32 + 1));
    }
    Meet(board.phase_arrived[32 + repeat % 32], ranks * (repeat / 32 + 1));
    if (rank == 0) {
      int64_t last = 0;
      for (int i = 1; i < ranks; ++i) last = std::max(last, board.done_ns[i].load());
      board.abort_peer_ms[repeat] = static_cast<double>(last - board.go_ns.load()) / 1e6;
    }
    Meet(board.published, ranks * (repeat + 2));
  }
}

void MeshRank(Board& board, int rank, int ranks, LinkSet links) {
  MeshOptions options = Publish(board, rank, ranks);
  options.links = links;
  int64_t nobody = 0;
  Meet(board.phase_arrived[0], ranks);
  board.go_ns.compare_exchange_strong(nobody, NowNs());
  auto made = ConnectMesh(options);
  Require(made.status());
  board.done_ns[rank] = NowNs();
  Require((*made)->Barrier());
}

double MeshMilliseconds(int ranks, LinkSet links) {
  std::vector<double> times;
  for (int repeat = 0; repeat < 5; ++repeat) {
    Board* board = NewBoard();
    if (!Fork(ranks, [&](int rank) { MeshRank(*board, rank, ranks, links); })) std::exit(1);
    int64_t last = 0;
    for (int i = 0; i < ranks; ++i) last = std::max(last, board->done_ns[i].load());
    times.push_back(static_cast<double>(last - board->go_ns.load()) / 1e6);
    ::munmap(board, sizeof(Board));
  }
  return Percentile(times, 0.5);
}

double GlooMeshMilliseconds(int ranks) {
#ifdef EVERSTEP_BENCH_GLOO
  Board* board = NewBoard();
  char folder[] = "/tmp/collective_bench_XXXXXX";
  if (::mkdtemp(folder) == nullptr) return 0;
  const bool good = Fork(ranks, [&](int rank) {
    int64_t nobody = 0;
    Meet(board->phase_arrived[0], ranks);
    board->go_ns.compare_exchange_strong(nobody, NowNs());
    auto context = ConnectGloo(folder, rank, ranks);
    board->done_ns[rank] = NowNs();
    Meet(board->phase_arrived[1], ranks);
  });
  int64_t last = 0;
  for (int i = 0; i < ranks; ++i) last = std::max(last, board->done_ns[i].load());
  const double took = static_cast<double>(last - board->go_ns.load()) / 1e6;
  ::munmap(board, sizeof(Board));
  if (std::system(fmt::format("rm -rf '{}'", folder).c_str()) != 0) return 0;
  return good ? took : 0;
#else
  static_cast<void>(ranks);
  return 0;
#endif
}

int Main(int argc, char** argv) {
  int ranks = 4;
  size_t bytes_max = size_t{64} << 20;
  int rounds = 3;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json") {
      json = true;
    } else if (argument == "--ranks" && i + 1 < argc) {
      ranks = std::clamp(std::atoi(argv[++i]), 1, kRanksMax);
    } else if (argument == "--max-bytes" && i + 1 < argc) {
      bytes_max = static_cast<size_t>(std::atoll(argv[++i]));
    } else if (argument == "--rounds" && i + 1 < argc) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: %s [--ranks N] [--max-bytes N] [--rounds N] [--json]\n",
                   argv[0]);
      return 2;
    }
  }
  char folder[] = "/tmp/collective_bench_XXXXXX";
  if (::mkdtemp(folder) == nullptr) return 1;
  Board* board = NewBoard();
  if (!Fork(ranks,
            [&](int rank) { AllReduceRank(*board, rank, ranks, bytes_max, rounds, folder); }))
    return 1;
  if (std::system(fmt::format("rm -rf '{}'", folder).c_str()) != 0) return 1;

  constexpr int kRepeats = 64;
  Board* aborts = NewBoard();
  if (ranks >= 2 && !Fork(ranks, [&](int rank) { AbortRank(*aborts, rank, ranks, kRepeats); }))
    return 1;
  const std::vector<double> own(aborts->abort_own_ms, aborts->abort_own_ms + kRepeats);
  const std::vector<double> peer(aborts->abort_peer_ms, aborts->abort_peer_ms + kRepeats);
  const double mesh_chord = MeshMilliseconds(16, LinkSet::kChord);
  const double mesh_full = MeshMilliseconds(16, LinkSet::kFullMesh);
  const double mesh_gloo = GlooMeshMilliseconds(16);

  if (json) {
    std::string rows;
    for (int i = 0; i < board->row_count; ++i) {
      const Row& row = board->rows[i];
      rows += fmt::format(
          "{}{{\"bytes\":{},\"median_us\":{:.2f},\"p99_us\":{:.2f},\"gloo_median_us\":{:.2f},"
          "\"gloo_p99_us\":{:.2f}}}",
          i == 0 ? "" : ",", row.bytes, row.ours_median_us, row.ours_p99_us, row.gloo_median_us,
          row.gloo_p99_us);
    }
    std::printf("%s\n",
                fmt::format("{{\"ranks\":{},\"cpus\":{},\"allreduce\":[{}],\"vote_us\":{{"
                            "\"median\":{:.2f},\"p99\":{:.2f}}},"
                            "\"abort_confirmed_ms\":{{\"median\":{:.3f},\"p99\":{:.3f}}},\"abort_"
                            "all_ranks_ms\":{{\"median\":{:.3f},\"p99\":{:.3f}}},"
                            "\"mesh16_ms\":{{\"chord\":{:.2f},\"full\":{:.2f},\"gloo\":{:.2f}}},"
                            "\"exact_16mb_ms\":{:.2f},\"native_16mb_ms\":{:.2f}}}",
                            ranks, std::thread::hardware_concurrency(), rows, board->vote_median_us,
                            board->vote_p99_us, Percentile(own, 0.5), Percentile(own, 0.99),
                            Percentile(peer, 0.5), Percentile(peer, 0.99), mesh_chord, mesh_full,
                            mesh_gloo, board->exact_ms, board->native_ms)
                    .c_str());
    return 0;
  }
  std::printf(
      "%d ranks, %u CPUs; all-reduce of f32, microseconds on rank 0; Gloo: the faster of ring and "
      "bcube\n",
      ranks, std::thread::hardware_concurrency());
  std::printf("%10s %12s %12s %12s %12s %8s\n", "bytes", "median", "p99", "gloo median", "gloo p99",
              "ratio");
  for (int i = 0; i < board->row_count; ++i) {
    const Row& row = board->rows[i];
    std::printf("%10lu %12.1f %12.1f %12.1f %12.1f %8.2f\n", static_cast<unsigned long>(row.bytes),
                row.ours_median_us, row.ours_p99_us, row.gloo_median_us, row.gloo_p99_us,
                row.gloo_median_us / row.ours_median_us);
  }
  std::printf("vote                       median %.1f us, p99 %.1f us\n", board->vote_median_us,
              board->vote_p99_us);
  std::printf("abort confirmed            median %.3f ms, p99 %.3f ms\n", Percentile(own, 0.5),
              Percentile(own, 0.99));
  std::printf("abort of one, all know     median %.3f ms, p99 %.3f ms\n", Percentile(peer, 0.5),
              Percentile(peer, 0.99));
  std::printf("16-rank mesh               chord links %.1f ms, full %.1f ms, gloo %.1f ms\n",
              mesh_chord, mesh_full, mesh_gloo);
  std::printf("mean of 16 MB gradients    exact %.1f ms, native %.1f ms\n", board->exact_ms,
              board->native_ms);
  return 0;
}

}  // namespace
}  // namespace everstep::collective

int main(int argc, char** argv) { return everstep::collective::Main(argc, argv); }
