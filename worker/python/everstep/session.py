"""Session: one training process's part in a job, for any framework. A thin, typed face of the C ABI (es_*).

    session = everstep.Session()
    session.register("weights", "f32", (1000,), address, 4000)
    session.on_apply(apply)
    while True:
        place = session.join()                 # restores memory to the recovery point
        try:
            for step in range(place.state_step + 1, last + 1):
                session.begin_step(step)
                ...                            # compute, reduce over session.world()
                if session.commit(step) is Outcome.SWITCH: break
        except everstep.GenerationOver: continue

One thread, the training thread, calls a session; callbacks run on it, inside join or commit. A process has at most one
session, and a forked child of it has none.
"""

from __future__ import annotations

import ctypes
import enum
import os
from dataclasses import dataclass
from typing import Callable, Optional, Sequence

from everstep import _abi
from everstep.errors import EverstepError, JobEnded, UsageError

__all__ = ["Session", "Membership", "Outcome", "Restore", "Communicator", "current"]


class Outcome(enum.IntEnum):
    """What a vote came to."""

    APPLIED = _abi.APPLIED  #: go on with the next step
    REDO = _abi.REDO  #: a gradient was out of range of exact reduction: compute the step again
    NOT_FINITE = _abi.OUTCOME_NOT_FINITE  #: nothing was applied
    SWITCH = _abi.SWITCH  #: applied, and this generation is over: join again


class Restore(enum.IntEnum):
    """How this rank's memory comes to the state that the generation starts from."""

    INITIALIZE = _abi.INITIALIZE
    KEEP = _abi.KEEP
    ROLL_FORWARD = _abi.ROLL_FORWARD
    FETCH_FROM_RANK = _abi.FETCH_FROM_RANK
    FETCH_FROM_SNAPSHOT = _abi.FETCH_FROM_SNAPSHOT


@dataclass(frozen=True)
class Membership:
    """A rank's place in one generation. Micro-batches are those of the global batch: this rank's are
    ``[micro_batch_first, micro_batch_first + micro_batch_count)``; a total of 0 leaves the sharing to the program.
    ``state_step`` is the step whose state is in memory."""

    generation: int
    rank: int
    world_size: int
    dp: int
    tp: int
    pp: int
    dp_size: int
    tp_size: int
    pp_size: int
    local_rank: int
    micro_batch_first: int
    micro_batch_count: int
    micro_batch_total: int
    state_step: int
    state_generation: int
    restore: Restore
    bytes_restored: int
    restored_from: str

    @classmethod
    def _of(cls, s: _abi.MembershipStruct) -> "Membership":
        values = {name: getattr(s, name) for name in cls.__dataclass_fields__ if name not in ("restore", "restored_from")}
        return cls(restore=Restore(s.restore), restored_from=s.restored_from.decode(errors="replace"), **values)


class Communicator:
    """Collectives of one group, on raw addresses; counts are in elements. Raises GenerationOver when its generation is.

    ``handle`` is the C handle; those of a session's own groups live as long as the session and always mean the
    generation at hand.
    """

    def __init__(self, session: "Session", handle: int, owned: bool = False) -> None:
        self._session, self.handle, self._owned = session, handle, owned
        self._library = _abi.library()

    def size(self) -> int:
        value = ctypes.c_int32()
        _abi.check(self._library.es_size(self.handle, _abi.byref(value)), "size")
        return value.value

    def rank(self) -> int:
        value = ctypes.c_int32()
        _abi.check(self._library.es_rank(self.handle, _abi.byref(value)), "rank")
        return value.value

    def all_reduce(self, data: int, count: int, dtype: int, op: int = _abi.SUM) -> None:
        """In place."""
        self._session._guard()
        _abi.check(self._library.es_all_reduce(self.handle, data, data, count, dtype, op), "all-reduce")

    def broadcast(self, data: int, count: int, dtype: int, root: int) -> None:
        self._session._guard()
        _abi.check(self._library.es_broadcast(self.handle, data, count, dtype, root), "broadcast")

    def all_gather(self, data: int, output: int, count: int, dtype: int) -> None:
        self._session._guard()
        _abi.check(self._library.es_all_gather(self.handle, data, output, count, dtype), "all-gather")

    def barrier(self) -> None:
        self._session._guard()
        _abi.check(self._library.es_barrier(self.handle), "barrier")

    def abort(self, reason: str) -> None:
        """From any thread: frees everyone who waits in a collective of this group."""
        _abi.check(self._library.es_abort(self.handle, reason.encode()), "abort")

    def close(self) -> None:
        if self._owned and self.handle:
            self._library.es_communicator_destroy(self.handle)
            self.handle = 0


_current: Optional["Session"] = None


def current() -> Optional["Session"]:
    """This process's session, or None."""
    return _current


class Session:
    """See the module. ``micro_batches`` is the size of the global batch where no controller says it.

    Raises UsageError when the process has a session already or the environment makes no sense; EverstepError with code
    UNAVAILABLE when there is no agent, FAILED_PRECONDITION when the agent refuses this process.
    """

    def __init__(self, micro_batches: int = 0, operation_timeout: float = 0.0, connect_timeout: float = 0.0) -> None:
        global _current
        self._library = _abi.library()
        if _current is not None and _current._pid == os.getpid():
            raise UsageError("this process has a session already: create one, and close() it before another")
        options = _abi.SessionOptions(
            struct_size=ctypes.sizeof(_abi.SessionOptions), micro_batch_count=micro_batches,
            operation_timeout_ms=int(operation_timeout * 1000), connect_timeout_ms=int(connect_timeout * 1000))
        handle = ctypes.c_void_p()
        code = self._library.es_session_create(_abi.byref(options), _abi.byref(handle))
        if code != _abi.OK:
            from everstep.errors import CODES
            raise EverstepError(f"no session: {_abi.last_error()}", CODES[code])
        self._handle: Optional[int] = handle.value
        self._pid = os.getpid()
        self._callbacks: dict[str, object] = {}
        self._error: Optional[BaseException] = None
        self._world = Communicator(self, self._library.es_world(self._handle))
        self._dp = Communicator(self, self._library.es_dp_group(self._handle))
        self._pp = Communicator(self, self._library.es_pp_group(self._handle))
        _current = self

    # -- life

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"process {os.getpid()} was forked from rank process {self._pid} after it had joined, and has no part in "
                "the job: start helpers before the session, or with the spawn method of multiprocessing")
        if self._handle is None:
            raise UsageError("the session is closed")

    def close(self) -> None:
        """Leaves the job without a word, as a process that ends does. Idempotent."""
        global _current
        if self._handle is not None and os.getpid() == self._pid:
            self._library.es_session_destroy(self._handle)
        self._handle = None
        if _current is self:
            _current = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """The number that the agent gave this process."""
        self._guard()
        return self._library.es_process_id(self._handle)

    @property
    def is_static(self) -> bool:
        """True without a controller: the world is fixed, and losing a rank ends it."""
        self._guard()
        return bool(self._library.es_is_static(self._handle))

    # -- state

    def register(self, name: str, dtype: str, shape: Sequence[int], address: int, size_bytes: int,
                 global_shape: Optional[Sequence[int]] = None, offsets: Optional[Sequence[int]] = None) -> None:
        """Names ``size_bytes`` at ``address`` as state. They must stay there until cleared or registered again."""
        self._guard()
        n = len(shape)
        array = ctypes.c_int64 * n
        whole = array(*(global_shape if global_shape is not None else shape))
        at = array(*offsets) if offsets is not None else None
        own = array(*shape) if global_shape is not None else None
        _abi.check(self._library.es_register_tensor(self._handle, name.encode(), dtype.encode(), n, whole, at, own,
                                                    address, size_bytes), f"tensor {name}")

    def clear(self) -> None:
        """Forgets all registered state."""
        self._guard()
        _abi.check(self._library.es_clear_tensors(self._handle), "clear")

    def _callback(self, call: Callable[[], object]) -> int:
        try:
            call()
            return _abi.OK
        except BaseException as e:  # must not unwind through the library; raised again by join or commit
            self._error = e
            return _abi.INTERNAL

    def on_layout(self, callback: Callable[[Membership], None]) -> None:
        """Called in join with the place and how its memory will be restored, before it is."""
        self._guard()
        function = _abi.LAYOUT_FN(
            lambda _, place: self._callback(lambda: callback(Membership._of(place.contents))))
        _abi.check(self._library.es_set_layout(self._handle, function, None), "layout")
        self._callbacks["layout"] = function

    def on_initialize(self, callback: Callable[[], None]) -> None:
        """Called in join when there is no state yet: computes that before step 1."""
        self._guard()
        function = _abi.INITIALIZE_FN(lambda _: self._callback(callback))
        _abi.check(self._library.es_set_initialize(self._handle, function, None), "initialize")
        self._callbacks["initialize"] = function

    def on_apply(self, callback: Callable[[int], None]) -> None:
        """Called in commit, or in join for a step that others applied: updates the state with the step's gradients,
        talking to nobody."""
        self._guard()
        function = _abi.APPLY_FN(lambda _, step: self._callback(lambda: callback(step)))
        _abi.check(self._library.es_set_apply(self._handle, function, None), "apply")
        self._callbacks["apply"] = function

    def on_data_position(self, callback: Callable[[], int]) -> None:
        """A number that must agree over all ranks besides the step."""
        self._guard()
        function = _abi.POSITION_FN(lambda _: callback() & (2**64 - 1))
        _abi.check(self._library.es_set_data_position(self._handle, function, None), "data position")
        self._callbacks["position"] = function

    def _raise_callback_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- membership and the step

    def join(self) -> Membership:
        """Blocks until this rank has a place and its memory is at the recovery point. JobEnded: there is none to come."""
        self._guard()
        place = _abi.MembershipStruct(struct_size=ctypes.sizeof(_abi.MembershipStruct))
        code = self._library.es_join(self._handle, _abi.byref(place))
        self._raise_callback_error()
        if code != _abi.OK:
            from everstep.errors import CODES
            raise JobEnded(f"join: {_abi.last_error()}", CODES[code])
        return Membership._of(place)

    def begin_step(self, step: int) -> None:
        self._guard()
        _abi.check(self._library.es_begin_step(self._handle, step), f"step {step}")

    def gradients_complete(self, step: int) -> None:
        self._guard()
        _abi.check(self._library.es_gradients_complete(self._handle, step), f"step {step}")

    def commit(self, step: int, flags: int = 0) -> Outcome:
        """The job's vote; if it passes, the apply callback runs."""
        self._guard()
        outcome = ctypes.c_int32()
        code = self._library.es_commit(self._handle, step, flags, _abi.byref(outcome))
        self._raise_callback_error()
        _abi.check(code, f"commit of step {step}")
        return Outcome(outcome.value)

    @property
    def generation_over(self) -> bool:
        """One atomic read: what is computed now will be thrown away."""
        return bool(self._handle is not None and self._library.es_generation_over(self._handle))

    def snapshot(self) -> bool:
        """Copies the registered state into staging memory. False: no free slot, or nowhere to put it (both counted)."""
        self._guard()
        code = self._library.es_snapshot(self._handle)
        if code in (_abi.RESOURCE_EXHAUSTED, _abi.FAILED_PRECONDITION):
            return False
        _abi.check(code, "snapshot")
        return True

    def report(self, step: int, name: str, value: float) -> None:
        """A figure for the operator, such as the loss. Never blocks; dropped (and counted) when nobody reads."""
        self._guard()
        _abi.check(self._library.es_report_metric(self._handle, step, name.encode(), value), "metric")

    def finish(self) -> None:
        """All ranks come to their end together. GenerationOver: not yet; join and go on."""
        self._guard()
        _abi.check(self._library.es_finish(self._handle), "finish")

    def counters(self) -> dict[str, int]:
        self._guard()
        c = _abi.Counters(struct_size=ctypes.sizeof(_abi.Counters))
        _abi.check(self._library.es_get_counters(self._handle, _abi.byref(c)), "counters")
        return {name: getattr(c, name) for name, _ in c._fields_[1:]}

    # -- groups

    def world(self) -> Communicator:
        return self._world

    def dp_group(self) -> Communicator:
        """The ranks that hold this rank's shard."""
        return self._dp

    def pp_group(self) -> Communicator:
        """The pipeline that this rank is a stage of."""
        return self._pp

    def group(self, ranks: Sequence[int], group_id: int) -> Communicator:
        """A group of world ranks in the given order, for this generation; called by its members only, with an id below
        2**32 that no other group of the generation uses."""
        self._guard()
        handle = ctypes.c_void_p()
        array = (ctypes.c_int32 * len(ranks))(*ranks)
        _abi.check(self._library.es_group_create(self._handle, array, len(ranks), group_id, _abi.byref(handle)), "group")
        return Communicator(self, handle.value or 0, owned=True)
