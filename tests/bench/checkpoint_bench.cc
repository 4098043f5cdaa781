// What snapshots cost: the copy into staging beside plain memcpy, the hash, both write paths of the local store, and
// a transfer between agents beside a raw socket.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "checkpoint/io/memory_region.h"
#include "checkpoint/io/transfer_client.h"
#include "checkpoint/io/transfer_server.h"
#include "checkpoint/store/digest.h"
#include "checkpoint/store/rocksdb_store.h"
#include "proto/base/prng.h"

namespace everstep::checkpoint {
namespace {

std::vector<std::byte> RandomBytes(size_t size, uint64_t seed) {
  Prng random(seed);
  std::vector<std::byte> bytes(size / 8 * 8);
  for (size_t at = 0; at < bytes.size(); at += 8) {
    const uint64_t word = random.Next();
    std::memcpy(bytes.data() + at, &word, 8);
  }
  return bytes;
}

void SetBytes(benchmark::State& state, size_t bytes) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

// The yardstick: memory to ordinary memory, pages present.
void BM_Memcpy(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> source = RandomBytes(size, 1);
  std::vector<std::byte> target(size);
  for (auto _ : state) {
    std::memcpy(target.data(), source.data(), size);
    benchmark::ClobberMemory();
  }
  SetBytes(state, size);
}
BENCHMARK(BM_Memcpy)->Arg(16 << 20)->Arg(64 << 20)->Unit(benchmark::kMillisecond);

// What a rank does: copy into a slot of its memory file that it used before.
void BM_StagingCopy(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> source = RandomBytes(size, 1);
  const auto region = MemoryRegion::Create(size);
  if (!region.ok()) return state.SkipWithError(region.status().message().c_str());
  std::byte* target = (*region)->writable().data();
  std::memset(target, 0, size);
  for (auto _ : state) {
    std::memcpy(target, source.data(), size);
    benchmark::ClobberMemory();
  }
  SetBytes(state, size);
}
BENCHMARK(BM_StagingCopy)->Arg(16 << 20)->Arg(64 << 20)->Unit(benchmark::kMillisecond);

// The first use of memory pays for its pages; populating them in one call was measured and gains nothing.
void BM_FreshCopy(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> source = RandomBytes(size, 1);
  for (auto _ : state) {
    const auto region = MemoryRegion::Create(size);
    if (!region.ok()) return state.SkipWithError(region.status().message().c_str());
    std::memcpy((*region)->writable().data(), source.data(), size);
  }
  SetBytes(state, size);
}
BENCHMARK(BM_FreshCopy)->Arg(16 << 20)->Unit(benchmark::kMillisecond);

void BM_Digest(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> source = RandomBytes(size, 1);
  for (auto _ : state) benchmark::DoNotOptimize(DigestOf(source));
  SetBytes(state, size);
}
BENCHMARK(BM_Digest)->Arg(1 << 20)->Arg(64 << 20)->Unit(benchmark::kMillisecond);

// A durable put of one shard: range(0) bytes, range(1): 1 for ingestion, 0 for the put path.
void BM_StorePut(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("everstep-bench-{}", getpid())).string();
  std::filesystem::remove_all(path);
  RocksDbStore::Options options;
  options.ingest_bytes_min = state.range(1) != 0 ? 1 : UINT64_MAX;
  auto store = RocksDbStore::Open(path, options);
  if (!store.ok()) return state.SkipWithError(store.status().message().c_str());
  const JobUid job("bench");
  std::vector<std::byte> bytes = RandomBytes(size, 1);
  int64_t step = 0;
  for (auto _ : state) {
    state.PauseTiming();
    ++step;
    for (size_t at = 0; at < bytes.size(); at += kChunkBytes) std::memcpy(bytes.data() + at, &step, sizeof(step));
    SnapshotInfo info;
    info.state.step = Step(step);
    info.bytes = bytes.size();
    info.digest = DigestOf(bytes);
    state.ResumeTiming();
    const Status put = (*store)->Put(job, info, {}, bytes);
    if (!put.ok()) return state.SkipWithError(put.message().c_str());
    state.PauseTiming();  // keeps the two newest, as retention does
    if (step > 2) (void)(*store)->Delete(job, {Step(step - 2), Generation(0)}, ShardIndex(0));
    state.ResumeTiming();
  }
  SetBytes(state, size);
  store->reset();
  std::filesystem::remove_all(path);
}
BENCHMARK(BM_StorePut)
    ->ArgNames({"bytes", "ingest"})
    ->ArgsProduct({{1 << 20, 4 << 20, 16 << 20, 64 << 20}, {0, 1}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(0.3);

class OneSource final : public TransferSource {
 public:
  class Pin final : public PinnedBytes {
   public:
    explicit Pin(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
    std::span<const std::byte> bytes() const override { return bytes_; }
    Status Check() const override { return OkStatus(); }

   private:
    std::vector<std::byte> bytes_;
  };
  explicit OneSource(std::vector<std::byte> bytes) {
    info.bytes = bytes.size();
    info.digest = DigestOf(bytes);
    pin = std::make_shared<Pin>(std::move(bytes));
  }
  void OpenTransfer(const TransferRequest&, std::function<void(OpenedTransfer)> done) override {
    OpenedTransfer opened;
    opened.response.info = info;
    opened.pin = pin;
    done(std::move(opened));
  }
  SnapshotInfo info;
  std::shared_ptr<Pin> pin;
};

// Connection, request, bytes into sealed memory, whole digest: what a restore from another server pays.
void BM_TransferLoopback(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  OneSource source(RandomBytes(size, 1));
  const auto server = TransferServer::Start({}, source);
  if (!server.ok()) return state.SkipWithError(server.status().message().c_str());
  const std::string address = fmt::format("127.0.0.1:{}", (*server)->port());
  TransferRequest request;
  request.job = JobUid("bench");
  request.generation = Generation(1);
  for (auto _ : state) {
    const auto fetched = FetchSnapshot(address, request, {});
    if (!fetched.ok()) return state.SkipWithError(fetched.status().message().c_str());
  }
  SetBytes(state, size);
}
BENCHMARK(BM_TransferLoopback)->Arg(64 << 10)->Arg(16 << 20)->Arg(64 << 20)->Unit(benchmark::kMillisecond)->UseRealTime();

bool ConnectedPair(int ends[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = bind(listener, generic, size) == 0 && listen(listener, 1) == 0 &&
                         getsockname(listener, generic, &size) == 0 && connect(ends[0], generic, size) == 0;
  ends[1] = connected ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
  close(listener);
  return ends[1] >= 0;
}

// The yardstick: a thread that writes, a loop that reads into the same buffer, no checks.
void BM_RawSocketCopy(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  const std::vector<std::byte> source = RandomBytes(size, 1);
  std::vector<std::byte> target(size);
  for (auto _ : state) {
    int ends[2];
    if (!ConnectedPair(ends)) return state.SkipWithError("no sockets");
    std::thread writer([&] {
      for (size_t at = 0; at < size;) {
        const ssize_t sent = write(ends[0], source.data() + at, std::min<size_t>(size - at, 1u << 20));
        if (sent <= 0) break;
        at += static_cast<size_t>(sent);
      }
    });
    for (size_t at = 0; at < size;) {
      const ssize_t got = read(ends[1], target.data() + at, std::min<size_t>(size - at, 1u << 20));
      if (got <= 0) break;
      at += static_cast<size_t>(got);
    }
    writer.join();
    close(ends[0]);
    close(ends[1]);
  }
  SetBytes(state, size);
}
BENCHMARK(BM_RawSocketCopy)->Arg(16 << 20)->Arg(64 << 20)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace everstep::checkpoint

BENCHMARK_MAIN();
