/* libeverstep: the rank library's C ABI. What each call means is said in worker/client/session.h and
 * worker/collective/communicator.h, which this mirrors one to one; here only what C adds.
 *
 * - Every function that can fail returns an es_code; es_last_error() has the message of the calling thread's last
 *   failure. Codes are those of gRPC: ES_ABORTED means "the generation is over, call es_join".
 * - Structs begin with struct_size, set by the caller to sizeof: they may grow at their end, functions never change.
 * - es_world, es_dp_group and es_pp_group are handles that live as long as the session and always mean the current
 *   generation's communicator. Groups that the program creates belong to one generation: after it, every call on them
 *   returns ES_ABORTED; they are destroyed by the program, before the session.
 * - One thread, the training thread, calls a session and its communicators. es_abort and the es_work_* calls are for any.
 * - Callbacks run on the training thread inside es_join or es_commit, except completion callbacks (see es_work_on_complete).
 *   A callback must not unwind through the library.
 */
#ifndef EVERSTEP_EVERSTEP_H_
#define EVERSTEP_EVERSTEP_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ES_API __attribute__((visibility("default")))
#else
#define ES_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define ES_ABI_VERSION 1u

typedef int32_t es_code;
enum {
  ES_OK = 0, ES_CANCELLED = 1, ES_UNKNOWN = 2, ES_INVALID_ARGUMENT = 3, ES_DEADLINE_EXCEEDED = 4, ES_NOT_FOUND = 5,
  ES_ALREADY_EXISTS = 6, ES_PERMISSION_DENIED = 7, ES_RESOURCE_EXHAUSTED = 8, ES_FAILED_PRECONDITION = 9,
  ES_ABORTED = 10, ES_OUT_OF_RANGE = 11, ES_UNIMPLEMENTED = 12, ES_INTERNAL = 13, ES_UNAVAILABLE = 14, ES_DATA_LOSS = 15
};

typedef enum es_dtype { ES_U8, ES_I8, ES_I32, ES_I64, ES_U64, ES_F16, ES_BF16, ES_F32, ES_F64 } es_dtype;
typedef enum es_reduce { ES_SUM, ES_PRODUCT, ES_MIN, ES_MAX, ES_BIT_OR, ES_AVG } es_reduce;

typedef struct es_session es_session;
typedef struct es_communicator es_communicator;
typedef struct es_work es_work;
typedef struct es_exact es_exact;

/* ES_ABI_VERSION of the library that is loaded: equal, or the program must not go on. */
ES_API uint32_t es_abi_version(void);
ES_API const char* es_version(void);
ES_API const char* es_code_name(es_code code);
ES_API const char* es_last_error(void); /* lives until the thread's next call */

/* ---- session */

typedef struct es_session_options {
  uint64_t struct_size;
  int32_t micro_batch_count; /* of the global batch, for a static world only */
  int32_t reserved;
  int64_t connect_timeout_ms; /* 0: the default, as for those below */
  int64_t operation_timeout_ms;
  int64_t abort_confirm_max_ms;
} es_session_options;

/* options may be null. */
ES_API es_code es_session_create(const es_session_options* options, es_session** session);
ES_API void es_session_destroy(es_session* session);
ES_API uint64_t es_process_id(const es_session* session);
ES_API int32_t es_is_static(const es_session* session);

/* ---- state. offsets and shape may be null: the whole tensor. */
ES_API es_code es_register_tensor(es_session* session, const char* name, const char* dtype, int32_t dimensions,
                                  const int64_t* global_shape, const int64_t* offsets, const int64_t* shape, void* data,
                                  uint64_t bytes);
ES_API es_code es_clear_tensors(es_session* session);

typedef enum es_restore { ES_INITIALIZE, ES_KEEP, ES_ROLL_FORWARD, ES_FETCH_FROM_RANK, ES_FETCH_FROM_SNAPSHOT } es_restore;

/* A rank's place in a generation. */
typedef struct es_membership {
  uint64_t struct_size;
  uint64_t generation;
  int32_t rank, world_size;
  int32_t dp, tp, pp;
  int32_t dp_size, tp_size, pp_size;
  int32_t local_rank;
  int32_t micro_batch_first, micro_batch_count, micro_batch_total;
  int64_t state_step; /* in memory now; in a layout callback: what will be restored */
  uint64_t state_generation;
  int32_t restore; /* es_restore */
  int32_t reserved;
  uint64_t bytes_restored;
  char restored_from[64]; /* for people */
} es_membership;

/* Callbacks return ES_OK, or a code that ends es_join or es_commit. A null function removes the callback. */
typedef es_code (*es_layout_fn)(void* user, const es_membership* place);
typedef es_code (*es_initialize_fn)(void* user);
typedef es_code (*es_apply_fn)(void* user, int64_t step);
typedef uint64_t (*es_position_fn)(void* user);
ES_API es_code es_set_layout(es_session* session, es_layout_fn layout, void* user);
ES_API es_code es_set_initialize(es_session* session, es_initialize_fn initialize, void* user);
ES_API es_code es_set_apply(es_session* session, es_apply_fn apply, void* user);
ES_API es_code es_set_data_position(es_session* session, es_position_fn position, void* user);

/* ---- membership and the step */

ES_API es_code es_join(es_session* session, es_membership* membership);
ES_API es_code es_begin_step(es_session* session, int64_t step);
ES_API es_code es_gradients_complete(es_session* session, int64_t step);
/* 1: this generation is over, and what is computed now will be thrown away. For any thread; one atomic read, so it may be
 * asked between micro-batches or layers. */
ES_API int32_t es_generation_over(const es_session* session);

enum { ES_VOTE_OUT_OF_RANGE = 1, ES_VOTE_NOT_FINITE = 2 };
typedef enum es_outcome { ES_APPLIED, ES_REDO, ES_OUTCOME_NOT_FINITE, ES_SWITCH } es_outcome;
ES_API es_code es_commit(es_session* session, int64_t step, uint32_t vote_flags, es_outcome* outcome);

ES_API es_code es_snapshot(es_session* session);
ES_API es_code es_report_metric(es_session* session, int64_t step, const char* name, double value);
ES_API es_code es_finish(es_session* session);

typedef struct es_counters {
  uint64_t struct_size;
  uint64_t snapshots_taken, snapshots_skipped, stale_refused, metrics_dropped;
} es_counters;
ES_API es_code es_get_counters(const es_session* session, es_counters* counters);

/* ---- communicators */

ES_API es_communicator* es_world(es_session* session);
ES_API es_communicator* es_dp_group(es_session* session);
ES_API es_communicator* es_pp_group(es_session* session);
/* World ranks, called by its members only; an id below 2^32 that no other group of this generation uses. */
ES_API es_code es_group_create(es_session* session, const int32_t* ranks, int32_t count, uint32_t id, es_communicator** group);
/* Ranks of `communicator`; any id that no other group of this generation uses. */
ES_API es_code es_subgroup_create(es_communicator* communicator, const int32_t* ranks, int32_t count, uint64_t id,
                                  es_communicator** group);
/* A negative color takes part and gets null. */
ES_API es_code es_split(es_communicator* communicator, int32_t color, int32_t key, es_communicator** group);
ES_API void es_communicator_destroy(es_communicator* communicator); /* created groups only */

ES_API es_code es_rank(es_communicator* communicator, int32_t* rank);
ES_API es_code es_size(es_communicator* communicator, int32_t* size);
enum { ES_CAN_SHRINK = 1, ES_CAN_GROW = 2, ES_DEVICE_MEMORY = 4, ES_DETERMINISTIC = 8 };
ES_API es_code es_capabilities(es_communicator* communicator, uint32_t* capabilities);
ES_API es_code es_abort(es_communicator* communicator, const char* reason); /* any thread */
ES_API es_code es_check_health(es_communicator* communicator);
/* -1: none. The rank is the communicator's own numbering. */
ES_API es_code es_failed_peer(es_communicator* communicator, int32_t* rank);

/* ---- collectives, blocking. Counts are in elements. */

ES_API es_code es_all_reduce(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, es_reduce op);
ES_API es_code es_all_gather(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type);
ES_API es_code es_reduce_scatter(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, es_reduce op);
ES_API es_code es_broadcast(es_communicator* c, void* buffer, uint64_t count, es_dtype type, int32_t root);
ES_API es_code es_reduce_to(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, es_reduce op,
                            int32_t root);
ES_API es_code es_gather(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, int32_t root);
ES_API es_code es_scatter(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type, int32_t root);
ES_API es_code es_all_to_all(es_communicator* c, const void* input, void* output, uint64_t count, es_dtype type);
ES_API es_code es_send(es_communicator* c, const void* input, uint64_t count, es_dtype type, int32_t to);
ES_API es_code es_receive(es_communicator* c, void* output, uint64_t count, es_dtype type, int32_t from);
ES_API es_code es_barrier(es_communicator* c);

/* ---- any operation, blocking or not, uneven sizes included */

typedef enum es_kind {
  ES_ALL_REDUCE, ES_ALL_GATHER, ES_REDUCE_SCATTER, ES_BROADCAST, ES_REDUCE, ES_GATHER, ES_SCATTER, ES_ALL_TO_ALL, ES_SEND,
  ES_RECEIVE, ES_BARRIER
} es_kind;

typedef struct es_operation {
  uint64_t struct_size;
  int32_t kind;   /* es_kind */
  int32_t type;   /* es_dtype */
  int32_t reduce; /* es_reduce */
  int32_t root;   /* of a rooted collective, or the peer of send and receive */
  const void* input;
  void* output;
  uint64_t count;                 /* ignored where counts are given */
  const size_t* send_counts;      /* elements per rank; null: even sizes */
  const size_t* receive_counts;
  void* stream; /* of a device backend */
} es_operation;

ES_API es_code es_run(es_communicator* c, const es_operation* operation);
/* Buffers must live until the work is done. */
ES_API es_code es_submit(es_communicator* c, const es_operation* operation, es_work** work);
ES_API es_code es_work_wait(es_work* work); /* the operation's own code */
ES_API int32_t es_work_done(const es_work* work);
/* Called once: on a thread of the backend, or at once on the caller's when the work is done already. It must not block
 * and may submit nothing; `message` lives during the call. One callback per work. */
typedef void (*es_complete_fn)(void* user, es_code code, const char* message);
ES_API es_code es_work_on_complete(es_work* work, es_complete_fn complete, void* user);
ES_API void es_work_destroy(es_work* work); /* the operation goes on */

/* ---- exact reduction (worker/collective/exact/exact_reducer.h) */

ES_API es_code es_exact_create(const size_t* tensor_elements, int32_t tensors, uint64_t micro_batches, es_dtype type,
                               es_exact** exact);
ES_API void es_exact_destroy(es_exact* exact);
ES_API es_code es_exact_begin_step(es_exact* exact);
ES_API es_code es_exact_accumulate(es_exact* exact, const void* gradients);
ES_API es_code es_exact_accumulate_tensor(es_exact* exact, int32_t tensor, const void* gradients);
/* divisor 0: the number of micro-batches */
ES_API es_code es_exact_finish(es_exact* exact, es_communicator* c, void* out, double divisor);
ES_API uint32_t es_exact_vote_flags(const es_exact* exact); /* for es_commit */
ES_API es_code es_exact_update_exponents(es_exact* exact);
ES_API es_code es_exact_raise_exponents(es_exact* exact, es_communicator* c);
/* Replicated state, to be registered as "i16". */
ES_API es_code es_exact_exponents(es_exact* exact, int16_t** exponents, uint64_t* count);

#ifdef __cplusplus
}
#endif
#endif /* EVERSTEP_EVERSTEP_H_ */
