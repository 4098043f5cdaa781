"""Sums of gradients over micro-batches and ranks: in floating point (FlatSum), or exactly (ExactSum).

Each micro-batch counts with its share of the samples of the global batch, so a sum means the same whoever holds how many.
Training thread only; the tensors stay where they are for the program's life.
"""

from __future__ import annotations

import ctypes
from typing import Sequence

import torch

from everstep import _abi
from everstep.errors import UsageError
from everstep.session import Communicator
from everstep.torch.process_group import dtype_of


class _Bucket:
    """All parameters of one dtype in one piece, and behind them one number for each: whether it has a gradient."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes) + len(parameters), dtype=parameters[0].dtype)
        pieces = self.flat.split([*sizes, len(parameters)])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters)]
        self.present = pieces[-1]


class FlatSum:
    """In the gradients' own dtype: one all-reduce for each dtype, bitwise the same at equal width."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for p in parameters:
            by_dtype.setdefault(p.dtype, []).append(p)
        self._buckets = [_Bucket(group) for _, group in sorted(by_dtype.items(), key=lambda item: str(item[0]))]
        self._views = {id(p): v for b in self._buckets for p, v in zip(b.parameters, b.views)}

    @torch.no_grad()
    def add(self, weight: float, first: bool) -> None:
        """Adds ``weight`` times every gradient; ``first`` starts anew."""
        for b in self._buckets:
            if first:
                b.flat.zero_()
            present = [(v, p.grad) for v, p in zip(b.views, b.parameters) if p.grad is not None]
            if present and weight != 0.0:
                torch._foreach_add_([v for v, _ in present], [g for _, g in present], alpha=weight)
            if len(present) == len(b.parameters):
                b.present.fill_(1)
            elif weight != 0.0:
                for i, p in enumerate(b.parameters):
                    if p.grad is not None:
                        b.present[i] = 1

    @torch.no_grad()
    def add_to(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Adds what was summed so far to these gradients."""
        torch._foreach_add_(list(gradients), [self._views[id(p)] for p in parameters])

    @torch.no_grad()
    def reduce(self, group: Communicator) -> None:
        """Sums over the group and leaves the result in ``.grad``."""
        for b in self._buckets:
            group.all_reduce(b.flat.data_ptr(), b.flat.numel(), dtype_of(b.flat))
            if all(p.grad is not None for p in b.parameters):
                torch._foreach_copy_([p.grad for p in b.parameters], b.views)  # type: ignore[arg-type]
                continue
            for p, v, there in zip(b.parameters, b.views, b.present.tolist()):
                if there > 0:
                    p.grad = v.clone() if p.grad is None else p.grad.copy_(v)


class ExactSum:
    """As integers (docs/protocol.md, exact reduction): the bits of the sum do not depend on its order, on how micro-batches
    are shared out, or on how many ranks there are."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], micro_batches: int) -> None:
        self._library = _abi.library()
        self._parameters = list(parameters)
        self.micro_batches = micro_batches
        if any(p.dtype != torch.float32 for p in parameters):
            raise UsageError("exact reduction works on fp32 gradients")
        n = len(self._parameters)
        sizes = (ctypes.c_size_t * n)(*[p.numel() for p in self._parameters])
        handle = ctypes.c_void_p()
        _abi.check(self._library.es_exact_create(sizes, n, micro_batches, _abi.F32, _abi.byref(handle)), "exact reduction")
        self._handle = handle.value
        pointer, count = ctypes.POINTER(ctypes.c_int16)(), ctypes.c_uint64()
        _abi.check(self._library.es_exact_exponents(self._handle, _abi.byref(pointer), _abi.byref(count)), "exponents")
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        raw = (ctypes.c_int16 * count.value).from_address(address or 0)
        #: One per block: part of the state.
        self.exponents = torch.frombuffer(raw, dtype=torch.int16)
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters))
        self._views = [v.view(p.shape) for v, p in zip(self._flat.split([p.numel() for p in self._parameters]), self._parameters)]
        self._present = torch.zeros(n, dtype=torch.uint8)

    def begin(self) -> None:
        _abi.check(self._library.es_exact_begin_step(self._handle), "exact reduction")
        self._present.zero_()

    @torch.no_grad()
    def add(self, weight: float, first: bool) -> None:
        """Adds every gradient, times ``weight`` relative to an equal share."""
        for i, p in enumerate(self._parameters):
            if p.grad is None or weight == 0.0:
                continue
            gradient = p.grad if weight == 1.0 else p.grad * weight
            if not gradient.is_contiguous():
                gradient = gradient.contiguous()
            self._present[i] = 1
            _abi.check(self._library.es_exact_accumulate_tensor(self._handle, i, gradient.data_ptr()), "exact reduction")

    @torch.no_grad()
    def reduce(self, group: Communicator) -> None:
        group.all_reduce(self._present.data_ptr(), self._present.numel(), _abi.U8, _abi.MAX)
        group._session._guard()
        _abi.check(self._library.es_exact_finish(self._handle, group.handle, self._flat.data_ptr(), 0.0), "exact reduction")
        for p, v, there in zip(self._parameters, self._views, self._present.tolist()):
            if there:
                p.grad = v.clone() if p.grad is None else p.grad.copy_(v)

    def vote_flags(self) -> int:
        return self._library.es_exact_vote_flags(self._handle)

    def update_exponents(self) -> None:
        _abi.check(self._library.es_exact_update_exponents(self._handle), "exponents")

    def raise_exponents(self, group: Communicator) -> None:
        code = self._library.es_exact_raise_exponents(self._handle, group.handle)
        _abi.check(code, "exponents")
