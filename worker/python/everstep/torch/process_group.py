"""The c10d backend ``everstep``: process groups that outlive their generations.

A group object is made once and lives as long as the process: DistributedDataParallel, its bucket layout, its hooks and
every cache keyed by the group live with it. What it runs on is that of the generation at hand. Before the first
generation, and in a rehearsal, a process is alone: every group it may use then has one member, itself, and collectives
are copies.

    everstep.torch.init()                     # instead of torch.distributed.init_process_group()
    model = DistributedDataParallel(model)    # as ever; what it sends around here goes nowhere yet

CPU tensors; sums are the same bits in each run of equal width. A collective of a generation that is over raises
GenerationOver, within milliseconds of the fence, whatever the peers do. Groups are used by the training thread, and by
autograd's while the training thread waits for it.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from everstep import _abi
from everstep.errors import GenerationOver, UsageError
from everstep.session import Communicator, Membership, Session

BACKEND = "everstep"
_TIMEOUT = timedelta(days=1)  # of torch's own bookkeeping; ours are the session's

_DTYPES = {
    torch.float32: _abi.F32, torch.float64: _abi.F64, torch.float16: _abi.F16, torch.bfloat16: _abi.BF16,
    torch.int64: _abi.I64, torch.int32: _abi.I32, torch.int8: _abi.I8, torch.uint8: _abi.U8, torch.bool: _abi.U8,
}
_OPS = {
    "SUM": _abi.SUM, "PRODUCT": _abi.PRODUCT, "MIN": _abi.MIN, "MAX": _abi.MAX, "BOR": _abi.BIT_OR, "AVG": _abi.AVG,
}
_REDUCE = [(getattr(dist.ReduceOp, name), value) for name, value in _OPS.items()]


def dtype_of(tensor: torch.Tensor) -> int:
    """The library's number for a dtype it can reduce."""
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise UsageError(f"tensors of {tensor.dtype} can't be reduced by the everstep backend") from None


def _op_of(opts: Any, tensor: torch.Tensor) -> int:
    op = opts.reduceOp
    for known, value in _REDUCE:
        if op == known:
            return _abi.MAX if tensor.dtype == torch.bool and value in (_abi.SUM, _abi.BIT_OR) else value
    raise UsageError(f"{op} is not supported by the everstep backend: use SUM, AVG, PRODUCT, MIN, MAX or BOR")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise UsageError(f"a tensor on {tensor.device} was given to the everstep backend, which moves CPU tensors")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


class _Work(dist.Work):
    """An operation in flight. What it moves is kept alive until it is waited for."""

    def __init__(self, group: "ProcessGroupEverstep", handle: int, tensors: Any) -> None:
        super().__init__()
        self._group, self._handle, self._tensors = group, handle, tensors

    def is_completed(self) -> bool:
        return not self._handle or bool(_abi.library().es_work_done(self._handle))

    def wait(self, timeout: timedelta = _TIMEOUT) -> bool:
        if self._handle:
            handle, self._handle = self._handle, 0
            code = _abi.library().es_work_wait(handle)
            _abi.library().es_work_destroy(handle)
            _abi.check(code, "a send or receive")
            copies, self._tensors = self._tensors, None
            for target, dense in copies:
                if target is not dense:
                    target.copy_(dense)
        return True

    def __del__(self) -> None:
        if self._handle:  # nobody waited: buffers must not go before the library is done with them
            _abi.library().es_work_wait(self._handle)
            _abi.library().es_work_destroy(self._handle)


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class ProcessGroupEverstep(dist.ProcessGroup):
    """See the module. ``ranks``: of the world, or None for all of it."""

    def __init__(self, ranks: Optional[Sequence[int]]) -> None:
        super().__init__(0 if ranks is None else max(0, _rank_in(ranks)), 1 if ranks is None else len(ranks))
        self._ranks = None if ranks is None else list(ranks)
        self._owned: Optional[Communicator] = None
        self._group_name = ""
        self._description = ""
        self._id = len(_groups)
        _groups.append(self)

    # -- who is in it

    def getRank(self) -> int:
        if _place is None:
            return 0
        return _place.rank if self._ranks is None else _rank_in(self._ranks)

    def getSize(self) -> int:
        if self._ranks is not None:
            return len(self._ranks)
        return 1 if _place is None else _place.world_size

    rank = getRank
    size = getSize

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def _get_backend_name(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._group_name

    def getGroupName(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc

    def _communicator(self) -> Optional[Communicator]:
        """None: alone."""
        if self.getSize() == 1:
            return None
        if _session is None or _place is None:
            raise UsageError("a group of several ranks was used before there are any: use it inside the function that run() calls")
        if self._ranks is None:
            return _session.world()
        if self._owned is None:  # its members all come here, in their first collective of the generation
            self._owned = _session.group(self._ranks, self._id)
        return self._owned

    def _leave_generation(self) -> None:
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    # -- one operation

    def _run(self, kind: int, what: str, *, input: Optional[torch.Tensor] = None, output: Optional[torch.Tensor] = None,
             count: int = 0, dtype: int = _abi.U8, reduce: int = _abi.SUM, root: int = 0,
             send_counts: Optional[Sequence[int]] = None, receive_counts: Optional[Sequence[int]] = None) -> None:
        c = self._communicator()
        assert c is not None
        c._session._guard()
        operation = self._operation(kind, input, output, count, dtype, reduce, root, send_counts, receive_counts)
        code = _abi.library().es_run(c.handle, ctypes.byref(operation))
        if code != _abi.OK:
            _abi.fail(code, what)

    def _operation(self, kind: int, input: Optional[torch.Tensor], output: Optional[torch.Tensor], count: int, dtype: int,
                   reduce: int, root: int, send_counts: Optional[Sequence[int]],
                   receive_counts: Optional[Sequence[int]]) -> _abi.Operation:
        counts = ctypes.c_size_t * self.getSize()
        return _abi.Operation(
            struct_size=ctypes.sizeof(_abi.Operation), kind=kind, type=dtype, reduce=reduce, root=root,
            input=None if input is None else input.data_ptr(), output=None if output is None else output.data_ptr(), count=count,
            send_counts=None if send_counts is None else counts(*send_counts),
            receive_counts=None if receive_counts is None else counts(*receive_counts))

    def _reduce_in_place(self, tensor: torch.Tensor, opts: Any) -> None:
        op = _op_of(opts, tensor)
        if self.getSize() == 1:
            return
        if tensor.is_complex():
            return self._reduce_in_place(torch.view_as_real(tensor), opts)
        data = _dense(tensor)
        self._run(_abi.ALL_REDUCE, "all-reduce", input=data, output=data, count=data.numel(), dtype=dtype_of(data), reduce=op)
        if data is not tensor:
            tensor.copy_(data)

    # -- what torch calls

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if opts is None or not hasattr(opts, "reduceOp"):
            options = dist.AllreduceOptions()
            if opts is not None:
                options.reduceOp = opts
            opts = options
        with torch.no_grad():
            for tensor in tensors:
                self._reduce_in_place(tensor, opts)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        with torch.no_grad():
            for tensor in tensors:
                op = _op_of(opts, tensor)
                if self.getSize() == 1:
                    continue
                data = _dense(tensor)
                self._run(_abi.REDUCE, "reduce", input=data, output=data, count=data.numel(), dtype=dtype_of(data), reduce=op,
                          root=opts.rootRank)
                if data is not tensor and self.getRank() == opts.rootRank:
                    tensor.copy_(data)
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = 0 if opts is None else opts if isinstance(opts, int) else opts.rootRank
        if self.getSize() > 1:
            with torch.no_grad():
                for tensor in tensors:
                    data = _dense(tensor)
                    self._run(_abi.BROADCAST, "broadcast", input=data, output=data, count=_bytes(data), root=root)
                    if data is not tensor:
                        tensor.copy_(data)
        return _done(tensors)

    def _gather_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        with torch.no_grad():
            if self.getSize() == 1:
                output.view(-1).copy_(input.reshape(-1))
                return
            data, flat = _dense(input), _dense(output)
            self._run(_abi.ALL_GATHER, "all-gather", input=data, output=flat, count=_bytes(data))
            if flat is not output:
                output.copy_(flat)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        with torch.no_grad():
            for targets, tensor in zip(outputs, inputs):
                flat = torch.empty((self.getSize(), *tensor.shape), dtype=tensor.dtype)
                if any(t.numel() != tensor.numel() for t in targets):
                    self._gather_uneven(targets, tensor)
                    continue
                self._gather_all(flat, tensor)
                for target, piece in zip(targets, flat):
                    target.copy_(piece.view(target.shape))
        return _done(outputs)

    def _gather_uneven(self, targets: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        counts = [_bytes(t) for t in targets]
        flat = torch.empty(sum(counts), dtype=torch.uint8)
        data = _dense(tensor)
        self._run(_abi.ALL_GATHER, "all-gather", input=data, output=flat, receive_counts=counts)
        for target, piece in zip(targets, flat.split(counts)):
            target.copy_(piece.view(target.dtype).view(target.shape))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        self._gather_all(output, input)
        return _done(output)

    _allgather_base = all_gather_single
    allgather_into_tensor = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, input in zip(outputs, inputs):
            self._gather_all(output, input)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for j, input in enumerate(inputs):
            self.allgather([[outputs[i][j] for i in range(self.getSize())]], [input])
        return _done(outputs)

    def _scatter_reduced(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:
        with torch.no_grad():
            op = _op_of(opts, input)
            if self.getSize() == 1:
                output.view(-1).copy_(input.reshape(-1))
                return
            data, part = _dense(input), _dense(output)
            self._run(_abi.REDUCE_SCATTER, "reduce-scatter", input=data, output=part, count=part.numel(), dtype=dtype_of(data),
                      reduce=op)
            if part is not output:
                output.copy_(part)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        self._scatter_reduced(output, input, opts or dist.ReduceScatterOptions())
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, input in zip(outputs, inputs):
            self._scatter_reduced(output, input, opts or dist.ReduceScatterOptions())
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for output, pieces in zip(outputs, inputs):
            self._scatter_reduced(output, torch.cat([p.reshape(-1) for p in pieces]), opts or dist.ReduceScatterOptions())
        return _done(outputs)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
                          input_split_sizes: Sequence[int], opts: Any = None) -> dist.Work:
        with torch.no_grad():
            if self.getSize() == 1:
                output.view(-1).copy_(input.reshape(-1))
                return _done(output)
            data, flat = _dense(input), _dense(output)

            def in_bytes(sizes: Sequence[int], tensor: torch.Tensor) -> list[int]:
                row = _bytes(tensor) // max(1, tensor.shape[0])
                return [n * row for n in sizes] if sizes else [_bytes(tensor) // self.getSize()] * self.getSize()

            self._run(_abi.ALL_TO_ALL, "all-to-all", input=data, output=flat, send_counts=in_bytes(input_split_sizes, data),
                      receive_counts=in_bytes(output_split_sizes, flat))
            if flat is not output:
                output.copy_(flat)
        return _done(output)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        with torch.no_grad():
            data = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in inputs])
            receive = [_bytes(t) for t in outputs]
            flat = torch.empty(sum(receive), dtype=torch.uint8)
            if self.getSize() == 1:
                flat.copy_(data)
            else:
                self._run(_abi.ALL_TO_ALL, "all-to-all", input=data, output=flat, send_counts=[_bytes(t) for t in inputs],
                          receive_counts=receive)
            for output, piece in zip(outputs, flat.split(receive)):
                output.copy_(piece.view(output.dtype).view(output.shape))
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        with torch.no_grad():
            for i, tensor in enumerate(inputs):
                root = self.getRank() == opts.rootRank
                flat = torch.empty((self.getSize(), *tensor.shape), dtype=tensor.dtype) if root else None
                if self.getSize() == 1:
                    outputs[i][0].copy_(tensor)
                    continue
                self._run(_abi.GATHER, "gather", input=_dense(tensor), output=flat, count=_bytes(tensor), root=opts.rootRank)
                if flat is not None:
                    for target, piece in zip(outputs[i], flat):
                        target.copy_(piece)
        return _done(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        with torch.no_grad():
            for i, tensor in enumerate(outputs):
                if self.getSize() == 1:
                    tensor.copy_(inputs[i][0])
                    continue
                flat = torch.stack(list(inputs[i])).contiguous() if self.getRank() == opts.rootRank else None
                part = _dense(tensor)
                self._run(_abi.SCATTER, "scatter", input=flat, output=part, count=_bytes(part), root=opts.rootRank)
                if part is not tensor:
                    tensor.copy_(part)
        return _done(outputs)

    def _submit(self, kind: int, tensors: Sequence[torch.Tensor], peer: int) -> dist.Work:
        c = self._communicator()
        if c is None:
            raise UsageError("a rank that is alone has nobody to send to")
        c._session._guard()
        (tensor,) = tensors
        data = _dense(tensor)
        operation = self._operation(kind, data, data, _bytes(data), _abi.U8, _abi.SUM, peer, None, None)
        handle = ctypes.c_void_p()
        _abi.check(_abi.library().es_submit(c.handle, ctypes.byref(operation), ctypes.byref(handle)), "send or receive")
        return _Work(self, handle.value or 0, [(tensor, data)])

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        return self._submit(_abi.SEND, tensors, dst)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._submit(_abi.RECEIVE, tensors, src)

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        if self.getSize() > 1:
            self._run(_abi.BARRIER, "barrier")
        return _done([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier()

    def abort(self) -> None:
        c = self._communicator() if _place is not None else None
        if c is not None:
            c.abort("the program called abort()")

    def shutdown(self) -> None:
        """Nothing: the group ends with its session."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing: time limits are the session's (``Job(operation_timeout=...)``)."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_groups: list[ProcessGroupEverstep] = []
_session: Optional[Session] = None
_place: Optional[Membership] = None


def _rank_in(ranks: Sequence[int]) -> int:
    mine = 0 if _place is None else _place.rank
    return list(ranks).index(mine) if mine in ranks else -1


def _create(options: Any, _: Any = None) -> ProcessGroupEverstep:
    ranks = list(options.global_ranks_in_group or [])
    if not dist.is_initialized():
        return ProcessGroupEverstep(None)
    return ProcessGroupEverstep(ranks or None)


def register() -> None:
    """Makes the name ``everstep`` known to torch.distributed. Idempotent."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def init(seed: Optional[int] = None) -> None:
    """In the place of ``torch.distributed.init_process_group()``: the world is this process until ``Job.run`` calls the
    training function, and there it is the generation's. ``seed``: of all generators, so that every rank builds the same
    model."""
    from everstep.torch.data import seed_everything
    register()
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    if seed is not None:
        seed_everything(seed)


def _world() -> Optional[ProcessGroupEverstep]:
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        if isinstance(group, ProcessGroupEverstep):
            return group
    return None


def _bind(session: Optional[Session], place: Optional[Membership]) -> None:
    global _session, _place
    for group in _groups:
        group._leave_generation()
    _session, _place = session, place
    world = _world()
    if world is not None:
        size = 1 if place is None else place.world_size
        dist.distributed_c10d._world.pg_group_ranks[world] = {i: i for i in range(size)}


def enter(session: Session, place: Membership) -> None:
    """All groups are those of this generation from here on."""
    _bind(session, place)


def leave() -> None:
    """This process is alone again."""
    _bind(None, None)


__all__ = ["ProcessGroupEverstep", "init", "register", "GenerationOver"]
