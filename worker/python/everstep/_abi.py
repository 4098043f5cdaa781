"""libeverstep's C ABI for ctypes: structs, prototypes, and turning codes into exceptions. Mirrors worker/client/everstep.h.

The library is looked for in EVERSTEP_LIBRARY, then beside this file (where a wheel puts it). Calls release the
interpreter lock; callbacks take it.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    CFUNCTYPE, POINTER, byref, c_char, c_char_p, c_double, c_int16, c_int32, c_int64, c_size_t, c_uint32, c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import NoReturn, Optional

from everstep.errors import CODES, EverstepError, GenerationOver, JobEnded, UsageError

ABI_VERSION = 1

OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 0, 3, 4, 8
FAILED_PRECONDITION, ABORTED, INTERNAL, UNAVAILABLE = 9, 10, 13, 14

# es_dtype
U8, I8, I32, I64, U64, F16, BF16, F32, F64 = range(9)
DTYPE_BYTES = (1, 1, 4, 8, 8, 2, 2, 4, 8)
# es_reduce
SUM, PRODUCT, MIN, MAX, BIT_OR, AVG = range(6)
# es_restore
INITIALIZE, KEEP, ROLL_FORWARD, FETCH_FROM_RANK, FETCH_FROM_SNAPSHOT = range(5)
# es_outcome
APPLIED, REDO, OUTCOME_NOT_FINITE, SWITCH = range(4)
# es_kind
(ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, SEND, RECEIVE, BARRIER) = range(11)
VOTE_OUT_OF_RANGE, VOTE_NOT_FINITE = 1, 2


class SessionOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64), ("micro_batch_count", c_int32), ("reserved", c_int32),
        ("connect_timeout_ms", c_int64), ("operation_timeout_ms", c_int64), ("abort_confirm_max_ms", c_int64),
    ]


class MembershipStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64), ("generation", c_uint64), ("rank", c_int32), ("world_size", c_int32),
        ("dp", c_int32), ("tp", c_int32), ("pp", c_int32),
        ("dp_size", c_int32), ("tp_size", c_int32), ("pp_size", c_int32), ("local_rank", c_int32),
        ("micro_batch_first", c_int32), ("micro_batch_count", c_int32), ("micro_batch_total", c_int32),
        ("state_step", c_int64), ("state_generation", c_uint64), ("restore", c_int32), ("reserved", c_int32),
        ("bytes_restored", c_uint64), ("restored_from", c_char * 64),
    ]


class Counters(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64), ("snapshots_taken", c_uint64), ("snapshots_skipped", c_uint64),
        ("stale_refused", c_uint64), ("metrics_dropped", c_uint64),
    ]


class Operation(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64), ("kind", c_int32), ("type", c_int32), ("reduce", c_int32), ("root", c_int32),
        ("input", c_void_p), ("output", c_void_p), ("count", c_uint64), ("send_counts", POINTER(c_size_t)),
        ("receive_counts", POINTER(c_size_t)), ("stream", c_void_p),
    ]


LAYOUT_FN = CFUNCTYPE(c_int32, c_void_p, POINTER(MembershipStruct))
INITIALIZE_FN = CFUNCTYPE(c_int32, c_void_p)
APPLY_FN = CFUNCTYPE(c_int32, c_void_p, c_int64)
POSITION_FN = CFUNCTYPE(c_uint64, c_void_p)

_PROTOTYPES = {
    "es_abi_version": (c_uint32, []),
    "es_version": (c_char_p, []),
    "es_last_error": (c_char_p, []),
    "es_session_create": (c_int32, [POINTER(SessionOptions), POINTER(c_void_p)]),
    "es_session_destroy": (None, [c_void_p]),
    "es_process_id": (c_uint64, [c_void_p]),
    "es_is_static": (c_int32, [c_void_p]),
    "es_register_tensor": (c_int32, [c_void_p, c_char_p, c_char_p, c_int32, POINTER(c_int64), POINTER(c_int64),
                                     POINTER(c_int64), c_void_p, c_uint64]),
    "es_clear_tensors": (c_int32, [c_void_p]),
    "es_set_layout": (c_int32, [c_void_p, LAYOUT_FN, c_void_p]),
    "es_set_initialize": (c_int32, [c_void_p, INITIALIZE_FN, c_void_p]),
    "es_set_apply": (c_int32, [c_void_p, APPLY_FN, c_void_p]),
    "es_set_data_position": (c_int32, [c_void_p, POSITION_FN, c_void_p]),
    "es_join": (c_int32, [c_void_p, POINTER(MembershipStruct)]),
    "es_begin_step": (c_int32, [c_void_p, c_int64]),
    "es_gradients_complete": (c_int32, [c_void_p, c_int64]),
    "es_generation_over": (c_int32, [c_void_p]),
    "es_commit": (c_int32, [c_void_p, c_int64, c_uint32, POINTER(c_int32)]),
    "es_snapshot": (c_int32, [c_void_p]),
    "es_report_metric": (c_int32, [c_void_p, c_int64, c_char_p, c_double]),
    "es_finish": (c_int32, [c_void_p]),
    "es_get_counters": (c_int32, [c_void_p, POINTER(Counters)]),
    "es_world": (c_void_p, [c_void_p]),
    "es_dp_group": (c_void_p, [c_void_p]),
    "es_pp_group": (c_void_p, [c_void_p]),
    "es_group_create": (c_int32, [c_void_p, POINTER(c_int32), c_int32, c_uint32, POINTER(c_void_p)]),
    "es_communicator_destroy": (None, [c_void_p]),
    "es_rank": (c_int32, [c_void_p, POINTER(c_int32)]),
    "es_size": (c_int32, [c_void_p, POINTER(c_int32)]),
    "es_abort": (c_int32, [c_void_p, c_char_p]),
    "es_failed_peer": (c_int32, [c_void_p, POINTER(c_int32)]),
    "es_all_reduce": (c_int32, [c_void_p, c_void_p, c_void_p, c_uint64, c_int32, c_int32]),
    "es_all_gather": (c_int32, [c_void_p, c_void_p, c_void_p, c_uint64, c_int32]),
    "es_reduce_scatter": (c_int32, [c_void_p, c_void_p, c_void_p, c_uint64, c_int32, c_int32]),
    "es_broadcast": (c_int32, [c_void_p, c_void_p, c_uint64, c_int32, c_int32]),
    "es_barrier": (c_int32, [c_void_p]),
    "es_run": (c_int32, [c_void_p, POINTER(Operation)]),
    "es_submit": (c_int32, [c_void_p, POINTER(Operation), POINTER(c_void_p)]),
    "es_work_wait": (c_int32, [c_void_p]),
    "es_work_done": (c_int32, [c_void_p]),
    "es_work_destroy": (None, [c_void_p]),
    "es_exact_create": (c_int32, [POINTER(c_size_t), c_int32, c_uint64, c_int32, POINTER(c_void_p)]),
    "es_exact_destroy": (None, [c_void_p]),
    "es_exact_begin_step": (c_int32, [c_void_p]),
    "es_exact_accumulate_tensor": (c_int32, [c_void_p, c_int32, c_void_p]),
    "es_exact_finish": (c_int32, [c_void_p, c_void_p, c_void_p, c_double]),
    "es_exact_vote_flags": (c_uint32, [c_void_p]),
    "es_exact_update_exponents": (c_int32, [c_void_p]),
    "es_exact_raise_exponents": (c_int32, [c_void_p, c_void_p]),
    "es_exact_exponents": (c_int32, [c_void_p, POINTER(POINTER(c_int16)), POINTER(c_uint64)]),
}

_library: Optional[ctypes.CDLL] = None


def _path() -> str:
    named = os.environ.get("EVERSTEP_LIBRARY")
    if named:
        return named
    beside = Path(__file__).with_name("libeverstep.so")
    if beside.exists():
        return str(beside)
    raise EverstepError(
        f"libeverstep.so is neither at {beside} nor named by EVERSTEP_LIBRARY: install the everstep wheel, or set "
        "EVERSTEP_LIBRARY to the library of a build", "NOT_FOUND")


def library() -> ctypes.CDLL:
    """The loaded library. EverstepError when there is none, or it speaks another version of the ABI."""
    global _library
    if _library is None:
        path = _path()
        try:
            loaded = ctypes.CDLL(path)
        except OSError as e:
            raise EverstepError(f"{path} can't be loaded: {e}", "NOT_FOUND") from e
        try:
            for name, (result, arguments) in _PROTOTYPES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as e:
            raise EverstepError(f"{path} is not the library of this package: {e}", "FAILED_PRECONDITION") from e
        version = loaded.es_abi_version()
        if version != ABI_VERSION:
            raise EverstepError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}", "FAILED_PRECONDITION")
        _library = loaded
    return _library


def last_error() -> str:
    return (library().es_last_error() or b"").decode(errors="replace")


def fail(code: int, what: str) -> NoReturn:
    """Raises what a code other than OK means to a program that is inside a generation."""
    name = CODES[code] if 0 <= code < len(CODES) else "UNKNOWN"
    message = f"{what}: {last_error()}"
    if code in (ABORTED, UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL):
        raise GenerationOver(message, name)
    if code == INVALID_ARGUMENT:
        raise UsageError(message, name)
    if code == FAILED_PRECONDITION:
        raise JobEnded(message, name)
    raise EverstepError(message, name)


def check(code: int, what: str) -> None:
    if code != OK:
        fail(code, what)


__all__ = [name for name in dir() if not name.startswith("_")] + ["byref"]
