#include "controller/io/store/threaded_store.h"

#include <iterator>
#include <utility>

namespace everstep {

ThreadedLedgerStore::ThreadedLedgerStore(std::unique_ptr<LedgerBackend> backend)
    : backend_(std::move(backend)), thread_([this] { Run(); }) {}

ThreadedLedgerStore::~ThreadedLedgerStore() { Close(); }

Result<StoredLedger> ThreadedLedgerStore::Load() { return backend_->Load(); }

void ThreadedLedgerStore::Append(std::vector<StoredRecord> records, Completion done) {
  EVERSTEP_CHECK(!records.empty());
  Push(Task{std::move(records), {}, {}, std::move(done)});
}

void ThreadedLedgerStore::Compact(std::string snapshot, LedgerSequence upto, Completion done) {
  Push(Task{{}, std::move(snapshot), upto, std::move(done)});
}

void ThreadedLedgerStore::Push(Task task) {
  {
    std::lock_guard lock(mutex_);
    EVERSTEP_CHECK(!closing_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void ThreadedLedgerStore::Close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void ThreadedLedgerStore::Run() {
  while (true) {
    std::deque<Task> taken;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      taken.swap(tasks_);
    }
    std::vector<Task> appends;
    for (Task& task : taken) {
      if (!task.records.empty()) {
        appends.push_back(std::move(task));
        continue;
      }
      WriteAppends(appends);
      if (failure_.ok()) failure_ = backend_->WriteSnapshot(task.snapshot, task.upto);
      task.done(failure_);
    }
    WriteAppends(appends);
  }
}

void ThreadedLedgerStore::WriteAppends(std::vector<Task>& tasks) {
  if (tasks.empty()) return;
  if (failure_.ok()) {
    std::vector<StoredRecord> all = std::move(tasks[0].records);
    for (size_t i = 1; i < tasks.size(); ++i) {
      all.insert(all.end(), std::make_move_iterator(tasks[i].records.begin()),
                 std::make_move_iterator(tasks[i].records.end()));
    }
    failure_ = backend_->Write(all);
  }
  for (Task& task : tasks) task.done(failure_);
  tasks.clear();
}

}  // namespace everstep
