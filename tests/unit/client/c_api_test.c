/* The C ABI from C: three ranks with static addresses train a vector with exact reduction, use every collective once,
 * blocking and not, make groups, and see errors as codes with messages. Each check that fails ends its process. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "worker/client/everstep.h"

enum { kRanks = 3, kElements = 3000, kSteps = 5, kMicroBatches = 8 };

#define CHECK(condition)                                                                                     \
  do {                                                                                                       \
    if (!(condition)) {                                                                                      \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, es_last_error());      \
      _exit(1);                                                                                              \
    }                                                                                                        \
  } while (0)
#define OK(call) CHECK((call) == ES_OK)

struct Program {
  float weights[kElements];
  float gradients[kElements];
  es_exact* exact;
  int layouts, initialized;
  int64_t applied;
};

static es_code Layout(void* user, const es_membership* place) {
  struct Program* p = user;
  CHECK(place->world_size == kRanks && place->restore == ES_INITIALIZE && place->state_step == 0);
  ++p->layouts;
  return ES_OK;
}
static es_code Initialize(void* user) {
  struct Program* p = user;
  for (int i = 0; i < kElements; ++i) p->weights[i] = 1.0f;
  ++p->initialized;
  return ES_OK;
}
static es_code Apply(void* user, int64_t step) {
  struct Program* p = user;
  CHECK(step == p->applied + 1);
  for (int i = 0; i < kElements; ++i) p->weights[i] -= 0.125f * p->gradients[i];
  OK(es_exact_update_exponents(p->exact));
  p->applied = step;
  return ES_OK;
}
static uint64_t Position(void* user) { return (uint64_t)((struct Program*)user)->applied * kMicroBatches; }

static float MicroGradient(int64_t step, int micro_batch, int element) {
  return (float)((step * 31 + micro_batch * 7 + element) % 101) / 256.0f;
}

static void Completed(void* user, es_code code, const char* message) {
  CHECK(code == ES_OK && message != NULL);
  atomic_fetch_add((atomic_int*)user, 1);
}

static void TestCollectives(es_session* session, int rank) {
  es_communicator* world = es_world(session);
  int32_t value = rank + 1, sum = 0, all[kRanks], size = 0, me = -1;
  OK(es_size(world, &size));
  OK(es_rank(world, &me));
  CHECK(size == kRanks && me == rank);
  OK(es_all_reduce(world, &value, &sum, 1, ES_I32, ES_SUM));
  CHECK(sum == 6);
  OK(es_all_gather(world, &value, all, 1, ES_I32));
  for (int i = 0; i < kRanks; ++i) CHECK(all[i] == i + 1);
  int32_t blocks[kRanks] = {1, 2, 3}, mine = 0;
  OK(es_reduce_scatter(world, blocks, &mine, 1, ES_I32, ES_SUM));
  CHECK(mine == 3 * (rank + 1));
  int32_t word = rank == 1 ? 42 : 0;
  OK(es_broadcast(world, &word, 1, ES_I32, 1));
  CHECK(word == 42);
  int32_t most = 0;
  OK(es_reduce_to(world, &value, &most, 1, ES_I32, ES_MAX, 2));
  CHECK(rank != 2 || most == 3);
  OK(es_gather(world, &value, all, 1, ES_I32, 0));
  CHECK(rank != 0 || (all[0] == 1 && all[1] == 2 && all[2] == 3));
  OK(es_scatter(world, blocks, &mine, 1, ES_I32, 0));
  CHECK(mine == rank + 1);
  int32_t out[kRanks], in[kRanks];
  for (int i = 0; i < kRanks; ++i) out[i] = rank * 10 + i;
  OK(es_all_to_all(world, out, in, 1, ES_I32));
  for (int i = 0; i < kRanks; ++i) CHECK(in[i] == i * 10 + rank);
  if (rank == 0) OK(es_send(world, &value, 1, ES_I32, 2));
  if (rank == 2) {
    OK(es_receive(world, &word, 1, ES_I32, 0));
    CHECK(word == 1);
  }
  OK(es_barrier(world));
  OK(es_check_health(world));

  /* uneven sizes and asynchronous work */
  const size_t counts[kRanks] = {1, 2, 3};
  int32_t part[3] = {rank, rank, rank}, joined[6];
  es_operation gather = {.struct_size = sizeof gather, .kind = ES_ALL_GATHER, .type = ES_I32, .input = part,
                         .output = joined, .receive_counts = counts};
  OK(es_run(world, &gather));
  CHECK(joined[0] == 0 && joined[1] == 1 && joined[2] == 1 && joined[3] == 2 && joined[5] == 2);
  atomic_int completed = 0;
  double x[4], total[4];
  es_work* works[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = rank + i;
    es_operation reduce = {.struct_size = sizeof reduce, .kind = ES_ALL_REDUCE, .type = ES_F64, .reduce = ES_SUM,
                           .input = &x[i], .output = &total[i], .count = 1};
    OK(es_submit(world, &reduce, &works[i]));
    OK(es_work_on_complete(works[i], Completed, &completed));
  }
  for (int i = 0; i < 4; ++i) {
    OK(es_work_wait(works[i]));
    CHECK(es_work_done(works[i]) == 1 && total[i] == 3.0 * i + 3);
  }
  OK(es_barrier(world)); /* queues behind the works, so their callbacks have run or are running */
  while (atomic_load(&completed) < 4) sched_yield();
  for (int i = 0; i < 4; ++i) es_work_destroy(works[i]);

  /* groups */
  es_communicator *pair = NULL, *halves = NULL;
  const int32_t members[2] = {2, 0};
  if (rank != 1) {
    OK(es_group_create(session, members, 2, 7, &pair));
    OK(es_rank(pair, &me));
    CHECK(me == (rank == 2 ? 0 : 1));
    OK(es_all_reduce(pair, &value, &sum, 1, ES_I32, ES_SUM));
    CHECK(sum == 4);
    es_communicator_destroy(pair);
  }
  OK(es_split(world, rank == 1 ? -1 : 0, rank, &halves));
  CHECK((halves == NULL) == (rank == 1));
  if (halves != NULL) {
    OK(es_size(halves, &size));
    CHECK(size == 2);
    es_communicator_destroy(halves);
  }

  /* errors are codes and sentences */
  CHECK(es_send(world, &value, 1, ES_I32, 99) == ES_INVALID_ARGUMENT && es_last_error()[0] != '\0');
  es_operation nonsense = {.struct_size = sizeof nonsense, .kind = 77};
  CHECK(es_run(world, &nonsense) == ES_INVALID_ARGUMENT);
  CHECK(es_run(NULL, &gather) == ES_INVALID_ARGUMENT);
}

static void RunRank(int rank) {
  es_session_options options = {.struct_size = sizeof options, .micro_batch_count = kMicroBatches};
  es_session* session = NULL;
  OK(es_session_create(&options, &session));
  CHECK(es_is_static(session) == 1);
  static struct Program program;
  const size_t elements[2] = {kElements - 1000, 1000};
  OK(es_exact_create(elements, 2, kMicroBatches, ES_F32, &program.exact));
  int16_t* exponents = NULL;
  uint64_t exponent_count = 0;
  OK(es_exact_exponents(program.exact, &exponents, &exponent_count));
  const int64_t shape[1] = {kElements}, exponent_shape[1] = {(int64_t)exponent_count};
  OK(es_register_tensor(session, "weights", "f32", 1, shape, NULL, NULL, program.weights, sizeof program.weights));
  OK(es_register_tensor(session, "exponents", "i16", 1, exponent_shape, NULL, NULL, exponents, exponent_count * 2));
  CHECK(es_register_tensor(session, "", "f32", 1, shape, NULL, NULL, program.weights, 4) == ES_INVALID_ARGUMENT);
  OK(es_set_layout(session, Layout, &program));
  OK(es_set_initialize(session, Initialize, &program));
  OK(es_set_apply(session, Apply, &program));
  OK(es_set_data_position(session, Position, &program));
  CHECK(es_barrier(es_world(session)) == ES_ABORTED); /* no generation yet */
  es_outcome outcome;
  CHECK(es_commit(session, 1, 0, &outcome) == ES_ABORTED);

  es_membership place = {.struct_size = sizeof place};
  OK(es_join(session, &place));
  CHECK(place.rank == rank && place.dp == rank && place.dp_size == kRanks && program.layouts == 1 && program.initialized == 1);
  CHECK(strcmp(place.restored_from, "initialized") == 0);
  TestCollectives(session, rank);

  for (int64_t step = place.state_step + 1; step <= kSteps; ++step) {
    OK(es_begin_step(session, step));
    OK(es_exact_begin_step(program.exact));
    for (int m = 0; m < place.micro_batch_count; ++m) {
      float g[kElements];
      for (int i = 0; i < kElements; ++i) g[i] = MicroGradient(step, place.micro_batch_first + m, i);
      if (m % 2 == 0) {
        OK(es_exact_accumulate(program.exact, g));
      } else {
        OK(es_exact_accumulate_tensor(program.exact, 0, g));
        OK(es_exact_accumulate_tensor(program.exact, 1, g + elements[0]));
      }
    }
    OK(es_exact_finish(program.exact, es_dp_group(session), program.gradients, 0));
    OK(es_gradients_complete(session, step));
    /* one rank's word makes all do the step again, once */
    uint32_t flags = es_exact_vote_flags(program.exact);
    CHECK(flags == 0);
    if (step == 2 && rank == 1) {
      OK(es_commit(session, step, ES_VOTE_OUT_OF_RANGE, &outcome));
    } else {
      OK(es_commit(session, step, flags, &outcome));
    }
    if (step == 2) {
      CHECK(outcome == ES_REDO && program.applied == 1);
      /* the flag was made up: nothing needs more room, and the library says so */
      CHECK(es_exact_raise_exponents(program.exact, es_dp_group(session)) == ES_FAILED_PRECONDITION);
      OK(es_gradients_complete(session, step));
      OK(es_commit(session, step, 0, &outcome));
    }
    CHECK(outcome == ES_APPLIED && program.applied == step);
    OK(es_report_metric(session, step, "weight", program.weights[0]));
  }
  for (int i = 0; i < kElements; ++i) {
    float weight = 1.0f;
    for (int64_t step = 1; step <= kSteps; ++step) {
      double sum = 0;
      for (int m = 0; m < kMicroBatches; ++m) sum += MicroGradient(step, m, i);
      weight -= 0.125f * (float)(sum / kMicroBatches);
    }
    CHECK(program.weights[i] == weight);
  }
  CHECK(es_snapshot(session) == ES_FAILED_PRECONDITION); /* no staging memory without an agent */
  es_counters counters = {.struct_size = sizeof counters};
  OK(es_get_counters(session, &counters));
  CHECK(counters.snapshots_skipped == 1);
  CHECK(es_generation_over(session) == 0);
  OK(es_finish(session));
  es_exact_destroy(program.exact);
  es_session_destroy(session);
}

int main(void) {
  CHECK(es_abi_version() == ES_ABI_VERSION);
  CHECK(strcmp(es_code_name(ES_ABORTED), "ABORTED") == 0);
  int sockets[kRanks];
  char world[200] = "";
  for (int i = 0; i < kRanks; ++i) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    sockets[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(sockets[i], (struct sockaddr*)&address, size) == 0);
    CHECK(getsockname(sockets[i], (struct sockaddr*)&address, &size) == 0);
    snprintf(world + strlen(world), sizeof world - strlen(world), "%s127.0.0.1:%d", i > 0 ? "," : "", ntohs(address.sin_port));
  }
  for (int i = 0; i < kRanks; ++i) close(sockets[i]);
  setenv("EVERSTEP_STATIC_WORLD", world, 1);
  setenv("EVERSTEP_STATIC_RANK", "3", 1);
  es_session* none = NULL;
  CHECK(es_session_create(NULL, &none) == ES_INVALID_ARGUMENT && strstr(es_last_error(), "EVERSTEP_STATIC_RANK") != NULL);

  pid_t pids[kRanks];
  for (int i = 0; i < kRanks; ++i) {
    pids[i] = fork();
    if (pids[i] != 0) continue;
    char rank[4];
    snprintf(rank, sizeof rank, "%d", i);
    setenv("EVERSTEP_STATIC_RANK", rank, 1);
    RunRank(i);
    exit(0);
  }
  int failed = 0;
  for (int i = 0; i < kRanks; ++i) {
    int status = 0;
    waitpid(pids[i], &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fprintf(stderr, "rank %d ended with status %d\n", i, status);
      failed = 1;
    }
  }
  return failed;
}
