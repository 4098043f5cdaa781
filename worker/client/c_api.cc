#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "worker/client/everstep.h"
#include "worker/client/session.h"
#include "worker/collective/exact/exact_reducer.h"

using everstep::Rank;
using everstep::Result;
using everstep::Status;
using everstep::StatusCode;
using everstep::Step;
namespace collective = everstep::collective;

// The numbers of the ABI are those of the C++ side.
static_assert(ES_DATA_LOSS == static_cast<int>(StatusCode::kDataLoss));
static_assert(ES_F64 == static_cast<int>(collective::DataType::kF64) && collective::kDataTypeCount == 9);
static_assert(ES_AVG == static_cast<int>(collective::ReduceOp::kAvg) && collective::kReduceOpCount == 6);
static_assert(ES_BARRIER == static_cast<int>(collective::OperationKind::kBarrier));
static_assert(ES_FETCH_FROM_SNAPSHOT == static_cast<int>(everstep::RestoreAction::kFetchFromSnapshot));
static_assert(ES_SWITCH == static_cast<int>(everstep::CommitOutcome::kSwitch));

struct es_communicator {
  enum class Kind { kWorld, kDp, kPp, kOwned };
  Kind kind = Kind::kOwned;
  es_session* session = nullptr;
  std::unique_ptr<collective::Communicator> owned;
};

struct es_session {
  std::unique_ptr<everstep::Session> session;
  bool joined = false;
  es_communicator world{es_communicator::Kind::kWorld, this, nullptr};
  es_communicator dp{es_communicator::Kind::kDp, this, nullptr};
  es_communicator pp{es_communicator::Kind::kPp, this, nullptr};
};

struct es_work {
  std::shared_ptr<collective::Work> work;
};

struct es_exact {
  std::unique_ptr<collective::ExactReducer> reducer;
};

namespace {

thread_local std::string t_error;

es_code Report(const Status& status) {
  if (status.ok()) return ES_OK;
  t_error = status.message();
  return static_cast<es_code>(status.code());
}

es_code Invalid(const char* message) { return Report(everstep::InvalidArgument(message)); }

// No exception crosses the ABI: memory can run out anywhere.
template <typename F>
es_code Guarded(F&& f) noexcept {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return Report(everstep::ResourceExhausted("out of memory"));
  } catch (const std::exception& e) {
    return Report(everstep::Internal(e.what()));
  }
}

Status FromCallback(es_code code, const char* what) {
  if (code == ES_OK) return everstep::OkStatus();
  const bool known = code > 0 && code <= ES_DATA_LOSS;
  return Status(known ? static_cast<StatusCode>(code) : StatusCode::kUnknown,
                std::string("the program's ") + what + " callback failed");
}

collective::Communicator* Resolve(es_communicator* c) {
  if (c == nullptr) return nullptr;
  if (c->kind == es_communicator::Kind::kOwned) return c->owned.get();
  if (!c->session->joined) return nullptr;
  switch (c->kind) {
    case es_communicator::Kind::kWorld: return &c->session->session->world();
    case es_communicator::Kind::kDp: return &c->session->session->dp_group();
    default: return &c->session->session->pp_group();
  }
}

template <typename F>
es_code WithCommunicator(es_communicator* c, F&& f) noexcept {
  return Guarded([&]() -> es_code {
    if (c == nullptr) return Invalid("the communicator is null");
    collective::Communicator* communicator = Resolve(c);
    if (communicator == nullptr) return Report(everstep::Aborted("there is no generation; call es_join"));
    return f(*communicator);
  });
}

bool ToOperation(const es_operation& in, int32_t size, collective::Operation& out) {
  if (in.struct_size < sizeof(es_operation) || in.kind < 0 || in.kind > ES_BARRIER || in.type < 0 || in.type > ES_F64 ||
      in.reduce < 0 || in.reduce > ES_AVG) {
    return false;
  }
  out.kind = static_cast<collective::OperationKind>(in.kind);
  out.type = static_cast<collective::DataType>(in.type);
  out.reduce = static_cast<collective::ReduceOp>(in.reduce);
  out.root = Rank(in.root);
  out.input = in.input;
  out.output = in.output;
  out.count = in.count;
  if (in.send_counts != nullptr) out.send_counts = {in.send_counts, static_cast<size_t>(size)};
  if (in.receive_counts != nullptr) out.receive_counts = {in.receive_counts, static_cast<size_t>(size)};
  out.stream = in.stream;
  return true;
}

es_code RunOne(es_communicator* c, es_kind kind, const void* input, void* output, uint64_t count, int32_t type,
               int32_t reduce, int32_t root) {
  es_operation operation{};
  operation.struct_size = sizeof operation;
  operation.kind = kind;
  operation.type = type;
  operation.reduce = reduce;
  operation.root = root;
  operation.input = input;
  operation.output = output;
  operation.count = count;
  return es_run(c, &operation);
}

void Fill(const everstep::Membership& m, es_membership& out) {
  const uint64_t size = out.struct_size;
  std::memset(&out, 0, sizeof out);
  out.struct_size = size;
  out.generation = m.generation.value;
  out.rank = m.rank.value;
  out.world_size = m.world_size;
  out.dp = m.dp;
  out.tp = m.tp;
  out.pp = m.pp;
  out.dp_size = m.dp_size;
  out.tp_size = m.tp_size;
  out.pp_size = m.pp_size;
  out.local_rank = m.local_rank;
  out.micro_batch_first = m.micro_batch_first;
  out.micro_batch_count = m.micro_batch_count;
  out.micro_batch_total = m.micro_batch_total;
  out.state_step = m.state.step.value;
  out.state_generation = m.state.generation.value;
  out.restore = static_cast<int32_t>(m.restored);
  out.bytes_restored = m.bytes_restored;
  std::strncpy(out.restored_from, m.restored_from.c_str(), sizeof out.restored_from - 1);
}

everstep::Membership PlaceOf(const everstep::Assignment& a, const everstep::RankAssignment& r) {
  everstep::Membership m;
  m.generation = a.generation;
  m.rank = r.rank;
  m.world_size = static_cast<int32_t>(a.ranks.size());
  m.dp = r.dp;
  m.tp = r.tp;
  m.pp = r.pp;
  m.dp_size = a.dp_size;
  m.tp_size = a.tp_size;
  m.pp_size = a.pp_size;
  m.local_rank = r.local_rank;
  m.micro_batch_first = r.micro_batch_first;
  m.micro_batch_count = r.micro_batch_count;
  m.micro_batch_total = a.micro_batch_count;
  m.state = a.recovery_point;
  m.restored = r.action;
  return m;
}

Result<std::vector<Rank>> ToRanks(const int32_t* ranks, int32_t count) {
  if (ranks == nullptr || count <= 0) return everstep::InvalidArgument("a group needs ranks");
  std::vector<Rank> list;
  for (int32_t i = 0; i < count; ++i) list.emplace_back(ranks[i]);
  return list;
}

es_code Hand(Result<std::unique_ptr<collective::Communicator>> created, es_communicator** group) {
  if (!created.ok()) return Report(created.status());
  if (*created == nullptr) {
    *group = nullptr;
    return ES_OK;
  }
  *group = new es_communicator{es_communicator::Kind::kOwned, nullptr, std::move(created).value()};
  return ES_OK;
}

}  // namespace

extern "C" {

uint32_t es_abi_version(void) { return ES_ABI_VERSION; }
const char* es_version(void) { return EVERSTEP_VERSION; }
const char* es_code_name(es_code code) {
  return code < 0 || code > ES_DATA_LOSS ? "UNKNOWN" : everstep::StatusCodeName(static_cast<StatusCode>(code));
}
const char* es_last_error(void) { return t_error.c_str(); }

// ---- session

es_code es_session_create(const es_session_options* options, es_session** session) {
  return Guarded([&]() -> es_code {
    if (session == nullptr) return Invalid("session is null");
    everstep::SessionOptions o;
    if (options != nullptr) {
      if (options->struct_size < sizeof(es_session_options)) return Invalid("es_session_options.struct_size is not set");
      o.micro_batch_count = options->micro_batch_count;
      if (options->connect_timeout_ms > 0) o.connect_timeout = everstep::Milliseconds(options->connect_timeout_ms);
      if (options->operation_timeout_ms > 0) o.operation_timeout = everstep::Milliseconds(options->operation_timeout_ms);
      if (options->abort_confirm_max_ms > 0) o.abort_confirm_max = everstep::Milliseconds(options->abort_confirm_max_ms);
    }
    auto created = everstep::Session::Create(o);
    if (!created.ok()) return Report(created.status());
    auto handle = std::make_unique<es_session>();
    handle->session = std::move(created).value();
    *session = handle.release();
    return ES_OK;
  });
}

void es_session_destroy(es_session* session) { delete session; }
uint64_t es_process_id(const es_session* session) { return session->session->process().value; }
int32_t es_is_static(const es_session* session) { return session->session->is_static() ? 1 : 0; }

es_code es_register_tensor(es_session* session, const char* name, const char* dtype, int32_t dimensions,
                           const int64_t* global_shape, const int64_t* offsets, const int64_t* shape, void* data,
                           uint64_t bytes) {
  return Guarded([&]() -> es_code {
    if (session == nullptr || name == nullptr || dtype == nullptr || dimensions < 0 ||
        (dimensions > 0 && global_shape == nullptr)) {
      return Invalid("a tensor needs a session, a name, a dtype and a shape");
    }
    const auto span = [dimensions](const int64_t* values) {
      return values == nullptr ? std::span<const int64_t>() : std::span(values, static_cast<size_t>(dimensions));
    };
    return Report(session->session->RegisterTensor(name, dtype, span(global_shape), span(offsets), span(shape), data, bytes));
  });
}

es_code es_clear_tensors(es_session* session) {
  if (session == nullptr) return Invalid("session is null");
  session->session->ClearTensors();
  return ES_OK;
}

es_code es_set_layout(es_session* session, es_layout_fn layout, void* user) {
  return Guarded([&]() -> es_code {
    if (session == nullptr) return Invalid("session is null");
    if (layout == nullptr) {
      session->session->SetLayout({});
      return ES_OK;
    }
    session->session->SetLayout([layout, user](const everstep::Assignment& a, const everstep::RankAssignment& r) {
      es_membership place{};
      place.struct_size = sizeof place;
      Fill(PlaceOf(a, r), place);
      return FromCallback(layout(user, &place), "layout");
    });
    return ES_OK;
  });
}

es_code es_set_initialize(es_session* session, es_initialize_fn initialize, void* user) {
  return Guarded([&]() -> es_code {
    if (session == nullptr) return Invalid("session is null");
    std::function<Status()> function;
    if (initialize != nullptr) function = [initialize, user] { return FromCallback(initialize(user), "initialize"); };
    session->session->SetInitialize(std::move(function));
    return ES_OK;
  });
}

es_code es_set_apply(es_session* session, es_apply_fn apply, void* user) {
  return Guarded([&]() -> es_code {
    if (session == nullptr) return Invalid("session is null");
    std::function<Status(Step)> function;
    if (apply != nullptr) function = [apply, user](Step step) { return FromCallback(apply(user, step.value), "apply"); };
    session->session->SetApply(std::move(function));
    return ES_OK;
  });
}

es_code es_set_data_position(es_session* session, es_position_fn position, void* user) {
  return Guarded([&]() -> es_code {
    if (session == nullptr) return Invalid("session is null");
    std::function<uint64_t()> function;
    if (position != nullptr) function = [position, user] { return position(user); };
    session->session->SetDataPosition(std::move(function));
    return ES_OK;
  });
}

es_code es_join(es_session* session, es_membership* membership) {
  return Guarded([&]() -> es_code {
    if (session == nullptr || membership == nullptr || membership->struct_size < sizeof(es_membership)) {
      return Invalid("es_join needs a session and a membership with its struct_size");
    }
    session->joined = false;
    const Result<everstep::Membership> joined = session->session->Join();
    if (!joined.ok()) return Report(joined.status());
    session->joined = true;
    Fill(*joined, *membership);
    return ES_OK;
  });
}

es_code es_begin_step(es_session* session, int64_t step) {
  return Guarded([&] { return session == nullptr ? Invalid("session is null") : Report(session->session->BeginStep(Step(step))); });
}

es_code es_gradients_complete(es_session* session, int64_t step) {
  return Guarded(
      [&] { return session == nullptr ? Invalid("session is null") : Report(session->session->GradientsComplete(Step(step))); });
}

es_code es_commit(es_session* session, int64_t step, uint32_t vote_flags, es_outcome* outcome) {
  return Guarded([&]() -> es_code {
    if (session == nullptr || outcome == nullptr) return Invalid("es_commit needs a session and an outcome");
    if ((vote_flags & ~(ES_VOTE_OUT_OF_RANGE | ES_VOTE_NOT_FINITE)) != 0) return Invalid("unknown vote flags");
    everstep::VoteExtras extras;
    extras.out_of_range = (vote_flags & ES_VOTE_OUT_OF_RANGE) != 0;
    extras.not_finite = (vote_flags & ES_VOTE_NOT_FINITE) != 0;
    const Result<everstep::CommitOutcome> result = session->session->Commit(Step(step), extras);
    if (!result.ok()) return Report(result.status());
    *outcome = static_cast<es_outcome>(*result);
    return ES_OK;
  });
}

es_code es_snapshot(es_session* session) {
  return Guarded([&] { return session == nullptr ? Invalid("session is null") : Report(session->session->Snapshot()); });
}

es_code es_report_metric(es_session* session, int64_t step, const char* name, double value) {
  return Guarded([&]() -> es_code {
    if (session == nullptr || name == nullptr) return Invalid("a metric needs a session and a name");
    session->session->ReportMetric(Step(step), name, value);
    return ES_OK;
  });
}

es_code es_finish(es_session* session) {
  return Guarded([&] { return session == nullptr ? Invalid("session is null") : Report(session->session->Finish()); });
}

int32_t es_generation_over(const es_session* session) {
  return session != nullptr && session->session->generation_over() ? 1 : 0;
}

es_code es_get_counters(const es_session* session, es_counters* counters) {
  if (session == nullptr || counters == nullptr || counters->struct_size < sizeof(es_counters)) {
    return Invalid("es_get_counters needs a session and counters with their struct_size");
  }
  const everstep::SessionCounters c = session->session->counters();
  counters->snapshots_taken = c.snapshots_taken;
  counters->snapshots_skipped = c.snapshots_skipped;
  counters->stale_refused = c.stale_refused;
  counters->metrics_dropped = c.metrics_dropped;
  return ES_OK;
}

// ---- communicators

es_communicator* es_world(es_session* session) { return session == nullptr ? nullptr : &session->world; }
es_communicator* es_dp_group(es_session* session) { return session == nullptr ? nullptr : &session->dp; }
es_communicator* es_pp_group(es_session* session) { return session == nullptr ? nullptr : &session->pp; }

es_code es_group_create(es_session* session, const int32_t* ranks, int32_t count, uint32_t id, es_communicator** group) {
  return Guarded([&]() -> es_code {
    if (session == nullptr || group == nullptr) return Invalid("es_group_create needs a session and a group");
    const auto list = ToRanks(ranks, count);
    if (!list.ok()) return Report(list.status());
    return Hand(session->session->CreateGroup(*list, id), group);
  });
}

es_code es_subgroup_create(es_communicator* communicator, const int32_t* ranks, int32_t count, uint64_t id,
                           es_communicator** group) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    const auto list = ToRanks(ranks, count);
    if (!list.ok()) return Report(list.status());
    if (group == nullptr) return Invalid("group is null");
    return Hand(c.CreateGroup(*list, collective::GroupId(id)), group);
  });
}

es_code es_split(es_communicator* communicator, int32_t color, int32_t key, es_communicator** group) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    if (group == nullptr) return Invalid("group is null");
    return Hand(c.Split(color, key), group);
  });
}

void es_communicator_destroy(es_communicator* communicator) {
  if (communicator != nullptr && communicator->kind == es_communicator::Kind::kOwned) delete communicator;
}

es_code es_rank(es_communicator* communicator, int32_t* rank) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    *rank = c.rank().value;
    return ES_OK;
  });
}

es_code es_size(es_communicator* communicator, int32_t* size) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    *size = c.world_size();
    return ES_OK;
  });
}

es_code es_capabilities(es_communicator* communicator, uint32_t* capabilities) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    const collective::Capabilities has = c.capabilities();
    *capabilities = (has.shrink ? uint32_t{ES_CAN_SHRINK} : 0u) | (has.grow ? uint32_t{ES_CAN_GROW} : 0u) |
                    (has.device_memory ? uint32_t{ES_DEVICE_MEMORY} : 0u) | (has.deterministic ? uint32_t{ES_DETERMINISTIC} : 0u);
    return ES_OK;
  });
}

es_code es_abort(es_communicator* communicator, const char* reason) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    c.Abort(everstep::Aborted(reason == nullptr ? "aborted by the program" : reason));
    return ES_OK;
  });
}

es_code es_check_health(es_communicator* communicator) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) { return Report(c.CheckHealth()); });
}

es_code es_failed_peer(es_communicator* communicator, int32_t* rank) {
  return WithCommunicator(communicator, [&](collective::Communicator& c) -> es_code {
    *rank = c.failed_peer().value_or(Rank(-1)).value;
    return ES_OK;
  });
}

// ---- operations

es_code es_all_reduce(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, es_reduce op) {
  return RunOne(c, ES_ALL_REDUCE, input, output, count, type, op, 0);
}
es_code es_all_gather(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type) {
  return RunOne(c, ES_ALL_GATHER, input, output, count, type, ES_SUM, 0);
}
es_code es_reduce_scatter(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, es_reduce op) {
  return RunOne(c, ES_REDUCE_SCATTER, input, output, count, type, op, 0);
}
es_code es_broadcast(es_communicator* c, void* buffer, uint64_t count, es_dtype type, int32_t root) {
  return RunOne(c, ES_BROADCAST, buffer, buffer, count, type, ES_SUM, root);
}
es_code es_reduce_to(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, es_reduce op,
                     int32_t root) {
  return RunOne(c, ES_REDUCE, input, output, count, type, op, root);
}
es_code es_gather(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, int32_t root) {
  return RunOne(c, ES_GATHER, input, output, count, type, ES_SUM, root);
}
es_code es_scatter(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, int32_t root) {
  return RunOne(c, ES_SCATTER, input, output, count, type, ES_SUM, root);
}
es_code es_all_to_all(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type) {
  return RunOne(c, ES_ALL_TO_ALL, input, output, count, type, ES_SUM, 0);
}
es_code es_send(es_communicator* c, const void* input, uint64_t count, es_dtype type, int32_t to) {
  return RunOne(c, ES_SEND, input, nullptr, count, type, ES_SUM, to);
}
es_code es_receive(es_communicator* c, void* output, uint64_t count, es_dtype type, int32_t from) {
  return RunOne(c, ES_RECEIVE, nullptr, output, count, type, ES_SUM, from);
}
es_code es_barrier(es_communicator* c) { return RunOne(c, ES_BARRIER, nullptr, nullptr, 0, ES_U8, ES_SUM, 0); }

es_code es_run(es_communicator* c, const es_operation* operation) {
  return WithCommunicator(c, [&](collective::Communicator& communicator) -> es_code {
    collective::Operation o;
    if (operation == nullptr || !ToOperation(*operation, communicator.world_size(), o)) return Invalid("malformed es_operation");
    return Report(communicator.Run(o));
  });
}

es_code es_submit(es_communicator* c, const es_operation* operation, es_work** work) {
  return WithCommunicator(c, [&](collective::Communicator& communicator) -> es_code {
    collective::Operation o;
    if (operation == nullptr || work == nullptr || !ToOperation(*operation, communicator.world_size(), o)) {
      return Invalid("malformed es_operation");
    }
    auto handle = std::make_unique<es_work>();
    handle->work = communicator.Submit(o);
    *work = handle.release();
    return ES_OK;
  });
}

es_code es_work_wait(es_work* work) {
  return Guarded([&] { return work == nullptr ? Invalid("work is null") : Report(work->work->Wait()); });
}
int32_t es_work_done(const es_work* work) { return work != nullptr && work->work->Done() ? 1 : 0; }
es_code es_work_on_complete(es_work* work, es_complete_fn complete, void* user) {
  return Guarded([&]() -> es_code {
    if (work == nullptr || complete == nullptr) return Invalid("es_work_on_complete needs a work and a callback");
    work->work->OnComplete([complete, user](const Status& status) {
      complete(user, static_cast<es_code>(status.code()), status.message().c_str());
    });
    return ES_OK;
  });
}
void es_work_destroy(es_work* work) { delete work; }

// ---- exact reduction

es_code es_exact_create(const size_t* tensor_elements, int32_t tensors, uint64_t micro_batches, es_dtype type,
                        es_exact** exact) {
  return Guarded([&]() -> es_code {
    if (tensor_elements == nullptr || tensors <= 0 || exact == nullptr) return Invalid("es_exact_create needs tensors");
    if (micro_batches < 1 || micro_batches > collective::ExactReducer::kMicroBatchesMax) {
      return Invalid("micro_batches is out of range");
    }
    if (type < ES_U8 || type > ES_F64 || !collective::IsFloatingPoint(static_cast<collective::DataType>(type))) {
      return Invalid("exact reduction is for floating point types");
    }
    auto handle = std::make_unique<es_exact>();
    handle->reducer = std::make_unique<collective::ExactReducer>(
        std::span(tensor_elements, static_cast<size_t>(tensors)), micro_batches, static_cast<collective::DataType>(type));
    *exact = handle.release();
    return ES_OK;
  });
}
void es_exact_destroy(es_exact* exact) { delete exact; }
es_code es_exact_begin_step(es_exact* exact) {
  if (exact == nullptr) return Invalid("exact is null");
  exact->reducer->BeginStep();
  return ES_OK;
}
es_code es_exact_accumulate(es_exact* exact, const void* gradients) {
  if (exact == nullptr || gradients == nullptr) return Invalid("es_exact_accumulate needs gradients");
  exact->reducer->Accumulate(gradients);
  return ES_OK;
}
es_code es_exact_accumulate_tensor(es_exact* exact, int32_t tensor, const void* gradients) {
  if (exact == nullptr || gradients == nullptr || tensor < 0 ||
      static_cast<size_t>(tensor) >= exact->reducer->tensor_count()) {
    return Invalid("es_exact_accumulate_tensor needs a tensor of the table and its gradients");
  }
  exact->reducer->AccumulateTensor(static_cast<size_t>(tensor), gradients);
  return ES_OK;
}
es_code es_exact_finish(es_exact* exact, es_communicator* c, void* out, double divisor) {
  if (exact == nullptr || out == nullptr) return Invalid("es_exact_finish needs an output");
  return WithCommunicator(
      c, [&](collective::Communicator& communicator) { return Report(exact->reducer->Finish(communicator, out, divisor)); });
}
uint32_t es_exact_vote_flags(const es_exact* exact) {
  if (exact == nullptr) return 0;
  return (exact->reducer->out_of_range() ? uint32_t{ES_VOTE_OUT_OF_RANGE} : 0u) |
         (exact->reducer->not_finite() ? uint32_t{ES_VOTE_NOT_FINITE} : 0u);
}
es_code es_exact_update_exponents(es_exact* exact) {
  if (exact == nullptr) return Invalid("exact is null");
  exact->reducer->UpdateExponents();
  return ES_OK;
}
es_code es_exact_raise_exponents(es_exact* exact, es_communicator* c) {
  if (exact == nullptr) return Invalid("exact is null");
  return WithCommunicator(
      c, [&](collective::Communicator& communicator) { return Report(exact->reducer->RaiseExponents(communicator)); });
}
es_code es_exact_exponents(es_exact* exact, int16_t** exponents, uint64_t* count) {
  if (exact == nullptr || exponents == nullptr || count == nullptr) return Invalid("es_exact_exponents needs both outputs");
  *exponents = exact->reducer->exponents().data();
  *count = exact->reducer->exponents().size();
  return ES_OK;
}

}  // extern "C"
