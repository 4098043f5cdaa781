"""The state of a training program as named memory: tensors as they lie, and everything else as one block of bytes.

The library compares replicas by digest and copies them byte by byte. So what is not a tensor (learning rates, a
scheduler's counters, where the data is) is written in a canonical form: equal values, equal bytes, on every rank.
Only plain values are written, and reading them runs no code. Training thread only.
"""

from __future__ import annotations

import collections
import hashlib
import struct
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch

from everstep.errors import UsageError
from everstep.session import Session

DTYPE_NAMES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}
_NAME_BYTES_MAX = 255
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


# ---- plain values as bytes

def encode(value: Any, where: str = "state") -> bytes:
    """Canonical bytes of None, bool, int, float, str, bytes, lists, tuples, dicts, Counters and CPU tensors.

    UsageError: ``where`` holds something else.
    """
    out = bytearray()
    _encode(value, where, out)
    return bytes(out)


def _counted(out: bytearray, tag: bytes, data: bytes) -> None:
    out += tag + struct.pack("<I", len(data)) + data


def _encode(value: Any, where: str, out: bytearray) -> None:
    if value is None:
        out += b"N"
    elif value is True or value is False:
        out += b"T" if value else b"F"
    elif isinstance(value, int):
        _counted(out, b"i", str(int(value)).encode())
    elif isinstance(value, float):
        out += b"f" + struct.pack("<d", value)
    elif isinstance(value, str):
        _counted(out, b"s", value.encode())
    elif isinstance(value, bytes):
        _counted(out, b"b", value)
    elif isinstance(value, (list, tuple, collections.deque)):
        out += (b"t" if isinstance(value, tuple) else b"l") + struct.pack("<I", len(value))
        for i, item in enumerate(value):
            _encode(item, f"{where}[{i}]", out)
    elif isinstance(value, Mapping):
        out += (b"c" if isinstance(value, collections.Counter) else b"d") + struct.pack("<I", len(value))
        for key in sorted(value, key=lambda k: (type(k).__name__, k)):
            _encode(key, f"a key of {where}", out)
            _encode(value[key], f"{where}[{key!r}]", out)
    elif isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        if data.dtype not in DTYPE_NAMES:
            raise UsageError(f"{where} is a tensor of {data.dtype}, which has no name here")
        out += b"x"
        _encode(DTYPE_NAMES[data.dtype], where, out)
        _encode(list(data.shape), where, out)
        _counted(out, b"b", bytes(data.reshape(-1).view(torch.uint8).numpy()) if data.numel() else b"")
    elif hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        _encode(value.item(), where, out)
    else:
        raise UsageError(
            f"{where} is a {type(value).__name__}, which can't be compared between ranks or copied to one: keep numbers, "
            "strings, lists, dicts and tensors in what state_dict() returns")


def decode(data: bytes) -> Any:
    value, at = _decode(memoryview(data), 0)
    if at != len(data):
        raise ValueError("bytes follow the value")
    return value


def _decode(data: memoryview, at: int) -> tuple[Any, int]:
    tag, at = bytes(data[at:at + 1]), at + 1
    if tag == b"N":
        return None, at
    if tag in (b"T", b"F"):
        return tag == b"T", at
    if tag == b"f":
        return struct.unpack_from("<d", data, at)[0], at + 8
    if tag == b"x":
        dtype, at = _decode(data, at)
        shape, at = _decode(data, at)
        raw, at = _decode(data, at)
        if not raw:
            return torch.empty(shape, dtype=_DTYPES[dtype]), at
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(_DTYPES[dtype]).reshape(shape), at
    size, at = struct.unpack_from("<I", data, at)[0], at + 4
    if tag in (b"i", b"s", b"b"):
        raw, at = bytes(data[at:at + size]), at + size
        return (int(raw) if tag == b"i" else raw.decode() if tag == b"s" else raw), at
    if tag in (b"l", b"t"):
        items = []
        for _ in range(size):
            item, at = _decode(data, at)
            items.append(item)
        return (tuple(items) if tag == b"t" else items), at
    if tag in (b"d", b"c"):
        pairs: dict[Any, Any] = collections.Counter() if tag == b"c" else {}
        for _ in range(size):
            key, at = _decode(data, at)
            pairs[key], at = _decode(data, at)
        return pairs, at
    raise ValueError(f"unknown tag {tag!r}")


class PlainState:
    """One block of registered memory that holds the plain part of the state, in its canonical form."""

    def __init__(self, capacity_bytes: int) -> None:
        self.tensor = torch.zeros(capacity_bytes, dtype=torch.uint8)
        self._used = 0

    def write(self, value: Any) -> None:
        data = encode(value)
        total = len(data) + 8
        if total > self.tensor.numel():
            raise UsageError(
                f"the state besides tensors takes {total} bytes, more than the {self.tensor.numel()} it has: pass "
                f"plain_state_bytes={2 * total} to Job, on every rank")
        view = self.tensor.numpy()
        view[:total] = memoryview(struct.pack("<Q", len(data)) + data)
        view[total:max(total, self._used)] = 0
        self._used = total

    def read(self) -> Any:
        raw = self.tensor.numpy()
        size = struct.unpack("<Q", bytes(raw[:8]))[0]
        self._used = size + 8
        return decode(bytes(raw[8:8 + size]))


# ---- tensors

def _short(name: str) -> str:
    if len(name.encode()) <= _NAME_BYTES_MAX:
        return name
    return name.encode()[:200].decode(errors="ignore") + "#" + hashlib.sha256(name.encode()).hexdigest()[:32]


class Registered:
    """The tensors that a session knows, kept alive here, with a way to see that the program exchanged one."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._layout: list[tuple[str, int, int]] = []

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._tensors.items()

    def changed(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> bool:
        return [(name, t.data_ptr(), t.numel()) for name, t in tensors] != self._layout

    def set(self, session: Session, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Makes these the session's state, and no others."""
        session.clear()
        self._tensors, self._layout = {}, []
        for name, tensor in tensors:
            data = tensor.detach()
            self._layout.append((name, tensor.data_ptr(), tensor.numel()))
            if data.numel() == 0:
                continue
            if data.device.type != "cpu":
                raise UsageError(f"{name} is on {data.device}: state in device memory needs the device plugin")
            if data.layout is not torch.strided or not _dense(data):
                raise UsageError(f"{name} is a view with gaps, which can't be copied as one piece: make it contiguous")
            if data.dtype not in DTYPE_NAMES:
                raise UsageError(f"{name} has dtype {data.dtype}, which has no name here")
            short = _short(name)
            if short in self._tensors:
                raise UsageError(f"two tensors of the state are called {name}")
            session.register(short, DTYPE_NAMES[data.dtype], tuple(data.shape) or (1,), data.data_ptr(),
                             data.numel() * data.element_size())
            self._tensors[short] = data


def _dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(((n, s) for n, s in zip(tensor.shape, tensor.stride()) if n > 1), key=lambda x: x[1]):
        if stride != expected:
            return False
        expected *= size
    return True


# ---- optimizers

_STEP_LIKE = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}
# Whose state after one step with zero gradients and no decay is the state before the first, but for the counters.
_KNOWN = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ZeroRedundancyOptimizer")


def materialize(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state tensors that an optimizer else creates in its first step, with the values that give the same first
    step: so that every process has the same named tensors before it joins. UsageError: no such values are known.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(p in optimizer.state and optimizer.state[p] for p in parameters):
        return
    kind = type(optimizer).__name__
    if kind == "SGD" and all(not g.get("momentum") for g in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            raise UsageError(f"{kind} with dampening treats its first step unlike all others, so its state can't be made "
                             "beforehand: set dampening to 0, or take one step before Job")
    if kind not in _KNOWN and any(p not in optimizer.state for p in parameters):
        raise UsageError(f"how {kind} makes its state is not known: take one step with zero gradients before Job, so that "
                         "its state exists on every rank")
    saved = [(p, p.detach().clone(), p.grad) for p in parameters]
    decay = [group.get("weight_decay") for group in optimizer.param_groups]
    hooks = [(d, dict(d)) for d in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)]
    for hook, _ in hooks:
        hook.clear()
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0 * group["weight_decay"]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    finally:
        with torch.no_grad():
            for p, value, gradient in saved:
                p.copy_(value)
                p.grad = gradient
        for group, value in zip(optimizer.param_groups, decay):
            if value is not None:
                group["weight_decay"] = value
        for hook, entries in hooks:
            hook.update(entries)
    for p in parameters:
        state = optimizer.state.get(p, {})
        for key, initial in _STEP_LIKE.items():
            if isinstance(state.get(key), torch.Tensor):
                state[key].fill_(initial)
            elif key in state:
                state[key] = type(state[key])(initial)


def optimizer_tensors(optimizer: torch.optim.Optimizer, name: str,
                      names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state, named after their parameters (``names``: by id)."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            for key in sorted(state, key=str):
                if isinstance(state[key], torch.Tensor):
                    yield f"{name}/{names.get(id(p), f'{g}.{i}')}/{key}", _local(state[key])


def optimizer_plain(optimizer: torch.optim.Optimizer) -> Any:
    """What is not in those tensors: hyperparameters, and state that is no tensor."""
    groups, rest = [], {}
    for g, group in enumerate(optimizer.param_groups):
        groups.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
        for i, p in enumerate(group["params"]):
            plain = {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, torch.Tensor)}
            if plain:
                rest[f"{g}.{i}"] = plain
    return {"groups": groups, "state": rest}


def load_optimizer_plain(optimizer: torch.optim.Optimizer, value: Any) -> None:
    for g, (group, saved) in enumerate(zip(optimizer.param_groups, value["groups"])):
        for key, item in saved.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(item, torch.Tensor):
                group[key].copy_(item)
            else:
                group[key] = item
        for i, p in enumerate(group["params"]):
            plain = value["state"].get(f"{g}.{i}")
            if plain:
                optimizer.state[p].update(plain)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The piece of a sharded tensor that is in this process's memory."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


Parameters = Callable[[], Iterator[tuple[str, torch.nn.Parameter]]]
