"""Job: a training function that is entered again, in the same live process, whenever the membership changes.

    model, optimizer, scheduler = ...                    # as ever, from the same seed on every rank
    job = everstep.torch.Job(model, optimizer, scheduler)

    def train():
        for epoch in job.epochs(10):
            for x, y in job.steps(loader):               # each sample exactly once, whoever is in the job
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                job.commit()                             # sums gradients, votes, then steps optimizer and scheduler

    job.run(train)

A process that dies takes no step with it: the others keep their memory, a standby that has rehearsed the function copies
the state from one of them, and all enter ``train`` again at the step that was interrupted.

Threads: one, the one that calls ``run``. Callbacks of the library run on it, inside ``run`` and ``commit``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from everstep import _abi
from everstep.errors import EverstepError, GenerationOver, NotFiniteError, UsageError
from everstep.session import Membership, Outcome, Restore, Session
from everstep.torch import process_group
from everstep.torch import state as program_state
from everstep.torch.data import Plan, derive, seed_everything, share
from everstep.torch.gradients import ExactSum, FlatSum

_EPOCH, _INDEX = 0, 1
_DISAGREEMENTS_MAX = 3  # in one step; a broken connection is reported otherwise


class _RehearsalOver(GenerationOver):
    """Ends a rehearsal, the way a failure would end a generation."""


def _listed(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{what}.{key}": item for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, nn.Module):
        return {f"{what}.{i}": item for i, item in enumerate(value)}
    return {what: value}


class Job:
    """The registered state of a program, and its part in the job.

    Args:
        model, optimizer, scheduler, scaler: one, or a list or dict of them. All are kept, copied or restored. A model may
            be wrapped in DistributedDataParallel over the ``everstep`` backend.
        state: more of it, by name: tensors, or objects with ``state_dict`` and ``load_state_dict``.
        apply: called instead of ``optimizer.step(); scheduler.step()`` when a step's vote passed. Must talk to nobody, and
            depend on the state and the gradients alone.
        seed: of the order of samples and of all noise. Every micro-batch starts from generators seeded with
            (seed, step, micro-batch), so that it is the same whoever computes it.
        micro_batches: of one global batch, for the job's life. Default: what ``everstep run --micro-batches`` says, else one
            for each rank of the first generation.
        exact: sum gradients as integers, so that their bits depend neither on order nor on who sums them.
        rehearsal: steps that the training function takes on its own before the process joins, so that a standby has
            nothing left to load or build. Their effects on the state are undone. 0: none.
        snapshot_every: copies the state into staging memory every so many steps; ``everstep run --snapshot-every`` needs no
            word here.
        plain_state_bytes: room for the state that is not in tensors.
        keep_initial: keeps a copy of the state before step 1, to which a job goes back that loses every copy of a later one.
        operation_timeout: seconds until a collective that nobody ends is given up; a backstop.

    Raises:
        UsageError: something of it can't be kept. EverstepError: no agent, or no library.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, *,
                 state: Optional[Mapping[str, Any]] = None, apply: Optional[Callable[[], None]] = None, seed: int = 0,
                 micro_batches: int = 0, exact: bool = False, rehearsal: int = 3, snapshot_every: int = 0,
                 plain_state_bytes: int = 1 << 16, keep_initial: bool = True, operation_timeout: float = 0.0) -> None:
        self._models: dict[str, nn.Module] = _listed(model, "model")
        self._optimizers: dict[str, torch.optim.Optimizer] = _listed(optimizer, "optimizer")
        self._schedulers: dict[str, Any] = _listed(scheduler, "scheduler")
        self._scalers: dict[str, Any] = _listed(scaler, "scaler")
        self._extra = dict(state or {})
        for name, item in self._models.items():
            if not isinstance(item, nn.Module):
                raise UsageError(f"{name} is a {type(item).__name__}, not a torch.nn.Module")
        for name, item in self._optimizers.items():
            if not isinstance(item, torch.optim.Optimizer):
                raise UsageError(f"{name} is a {type(item).__name__}, not a torch.optim.Optimizer")
        self._program_apply = apply
        self._keep_initial = keep_initial
        self._initial: Optional[dict[str, torch.Tensor]] = None
        if apply is None and not self._optimizers:
            raise UsageError("Job needs an optimizer, or apply= with what a step does to the state")
        self.seed = seed
        self._micro_wanted = micro_batches
        self._micro_batches = 0
        self._rehearsal_steps = rehearsal
        self._snapshot_every = snapshot_every
        self._snapshot_by_library = int(os.environ.get("EVERSTEP_SNAPSHOT_EVERY") or 0)
        self._plain = program_state.PlainState(plain_state_bytes)
        self._registered = program_state.Registered()
        self._cursors: dict[str, list[int]] = {}
        self._place: Optional[Membership] = None
        self._step = 0
        self._rehearsing = 0
        self._forget_step()

        # Parameters by name; a DDP wrapper's are those of its module.
        self._ddp = [m for m in self._models.values() if isinstance(m, nn.parallel.DistributedDataParallel)]
        self._named: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        for name, item in self._models.items():
            inner = item.module if isinstance(item, nn.parallel.DistributedDataParallel) else item
            for path, p in inner.named_parameters():
                self._named[f"{name}/{path}"] = p
            for path, b in inner.named_buffers():
                self._buffers[f"{name}/{path}"] = b
        self._parameter_names = {id(p): name for name, p in self._named.items()}
        self._mutable: dict[str, torch.Tensor] = dict(self._buffers)
        self._saved_buffers: dict[str, torch.Tensor] = {}
        trained = [p for p in self._named.values() if p.requires_grad]
        known = {id(p) for p in trained}
        for o in self._optimizers.values():
            trained += [p for g in o.param_groups for p in g["params"] if p.requires_grad and id(p) not in known]
        sharded = next((name for name, p in self._named.items() if hasattr(p, "to_local")), None)
        if sharded is not None:
            raise UsageError(f"{sharded} is sharded over ranks (fully_shard, DTensor). Job keeps whole replicas, which a lost rank can be "
                             "copied from; run a sharded program unchanged, with `everstep run`, on its own checkpoints")
        for name, o in self._optimizers.items():
            program_state.materialize(o)

        self.session = Session(micro_batches=micro_batches, operation_timeout=operation_timeout)
        atexit.register(self.session.close)
        try:
            self._exact_wanted = exact
            self._sum: Union[FlatSum, ExactSum]
            if exact:
                if not micro_batches:
                    raise UsageError("exact reduction needs the size of the global batch: Job(micro_batches=N)")
                self._sum = ExactSum(trained, micro_batches)
            else:
                self._sum = FlatSum(trained)
            for ddp in self._ddp:
                self._hook(ddp)
            self.session.on_layout(self._on_layout)
            self.session.on_apply(self._on_apply)
            self.session.on_initialize(self._on_initialize)
            # Asked before a copied state is read: so from the bytes, as they were copied.
            self.session.on_data_position(lambda: derive(sorted(self._plain.read()["cursors"].items())))
        except BaseException:
            self.session.close()
            raise

    # ---- where this process stands

    @property
    def place(self) -> Membership:
        """This process's place in the generation at hand. UsageError before the first one."""
        if self._place is None:
            raise UsageError("there is no generation yet: use this inside the function that run() calls")
        return self._place

    @property
    def rank(self) -> int:
        return 0 if self._rehearsing else self.place.rank

    @property
    def world_size(self) -> int:
        return 1 if self._rehearsing else self.place.world_size

    @property
    def generation(self) -> int:
        return 0 if self._rehearsing else self.place.generation

    @property
    def leader(self) -> bool:
        """True on one rank of a generation, and never in a rehearsal: who prints and writes files."""
        return not self._rehearsing and self.place.rank == 0

    @property
    def rehearsing(self) -> bool:
        """True while the training function runs on its own, before the process joins."""
        return self._rehearsing > 0

    @property
    def step(self) -> int:
        """The step in progress, from 1; outside of one, the last that was applied. All ranks count alike."""
        return self._step

    @property
    def generation_over(self) -> bool:
        """True: what is computed now will be thrown away. Costs one atomic read; ask it inside long steps."""
        return not self._rehearsing and self.session.generation_over

    # ---- the state

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        local = program_state._local
        for name, p in self._named.items():
            yield name, local(p.detach())
        for name, b in self._buffers.items():
            yield name, b
        for name, o in self._optimizers.items():
            yield from program_state.optimizer_tensors(o, name, self._parameter_names)
        for name, item in self._extra.items():
            if isinstance(item, torch.Tensor):
                yield f"state/{name}", item
        if isinstance(self._sum, ExactSum):
            yield "everstep/exponents", self._sum.exponents
        yield "everstep/plain", self._plain.tensor

    def _register(self) -> None:
        """Tells the library where the state lies, if that changed: load_state_dict makes new tensors."""
        if self._registered.changed(self._tensors()):
            self._registered.set(self.session, self._tensors())

    def _write_plain(self) -> None:
        self._plain.write({
            "step": self._step_applied, "cursors": self._cursors, "micro_batches": self._micro_saved,
            "optimizers": {n: program_state.optimizer_plain(o) for n, o in self._optimizers.items()},
            "objects": {n: o.state_dict() for n, o in {**self._schedulers, **self._scalers}.items()},
            "extra": {n: o.state_dict() for n, o in self._extra.items() if not isinstance(o, torch.Tensor)},
        })

    def _read_plain(self) -> None:
        value = self._plain.read()
        self._step_applied = value["step"]
        self._cursors = value["cursors"]
        self._micro_saved = value["micro_batches"]
        for n, o in self._optimizers.items():
            program_state.load_optimizer_plain(o, value["optimizers"][n])
        for n, o in {**self._schedulers, **self._scalers}.items():
            o.load_state_dict(value["objects"][n])
        for n, o in self._extra.items():
            if not isinstance(o, torch.Tensor):
                o.load_state_dict(value["extra"][n])

    _step_applied = 0
    _micro_saved = 0

    # ---- what the library calls

    def _on_layout(self, place: Membership) -> None:
        if place.restore in (Restore.KEEP, Restore.ROLL_FORWARD):
            if place.restore == Restore.KEEP:
                self._discard()
            return
        self._forget_step()

    def _on_initialize(self) -> None:
        if self._initial is None:
            raise UsageError("the job goes back to its first state, which this process has not kept (keep_initial=False)")
        with torch.no_grad():
            for name, t in self._registered.tensors():
                t.copy_(self._initial[name])

    def _on_apply(self, step: int) -> None:
        if self._program_apply is not None:
            self._program_apply()
        else:
            for name, o in self._optimizers.items():
                scaler = next(iter(self._scalers.values()), None)
                scaler.step(o) if scaler is not None else o.step()
            for s in self._scalers.values():
                s.update()
            for s in self._schedulers.values():
                s.step()
        if isinstance(self._sum, ExactSum):
            self._sum.update_exponents()
        if self._advance is not None:
            name, epoch, index = self._advance
            self._cursors[name] = [epoch, index]
        self._step_applied = step
        self._micro_saved = self._micro_batches
        self._saved_buffers = {}
        self._write_plain()
        every = self._snapshot_by_library
        if every and step % every == 0:
            self._register()

    def _discard(self) -> None:
        """Undoes what the undecided step changed before its vote."""
        with torch.no_grad():
            for name, value in self._saved_buffers.items():
                self._buffers[name].copy_(value)
        self._forget_step()

    def _forget_step(self) -> None:
        self._begun = False
        self._committed = False
        self._reduced = False
        self._outcome: Optional[Outcome] = None
        # First of the step, last of it, samples of how many: of the micro-batch at hand.
        self._micro: Optional[tuple[bool, bool, tuple[int, int]]] = None
        self._advance: Optional[tuple[str, int, int]] = None
        self._saved_buffers = {}

    # ---- running

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls ``function`` once for each generation until it returns in one that all ranks finish, and returns its value.

        JobEnded: the job was stopped. What the function raises of its own goes through, and ends the process's part.
        """
        self._step_applied = 0
        self._write_plain()
        self._register()
        saved = {name: t.clone() for name, t in self._registered.tensors()}
        self._rehearse(function, arguments, named, saved)
        self._initial = saved if self._keep_initial else None
        del saved
        disagreed = (0, 0)  # step, how many times in it
        while True:
            self._join()
            try:
                result = function(*arguments, **named)
                self.session.finish()
                return result
            except GenerationOver as e:
                if e.code == "INTERNAL":
                    disagreed = (self._step, disagreed[1] + 1 if disagreed[0] == self._step else 1)
                    if disagreed[1] == _DISAGREEMENTS_MAX:
                        raise UsageError(f"step {self._step} failed {disagreed[1]} times because {e}; all ranks must call the same "
                                         "collectives in the same order, on equal shapes") from None
                self._drop(e)
            except Exception as e:
                if not self._caused_by_the_end(e):
                    raise
                self._drop(e)

    def _drop(self, error: BaseException) -> None:
        # The frames of the abandoned call hold tensors, iterators and files until the traceback goes.
        error.__traceback__ = None
        for ddp in self._ddp:
            ddp.reducer._reset_state()
            ddp.require_backward_grad_sync = True

    def _caused_by_the_end(self, error: BaseException) -> bool:
        """True when what the function raised is the generation's end in disguise: wrapped, or turned into another type."""
        seen: Optional[BaseException] = error
        for _ in range(20):
            if seen is None:
                break
            if isinstance(seen, GenerationOver):
                return True
            seen = seen.__cause__ or seen.__context__
        return "GenerationOver" in str(error)

    def _join(self) -> None:
        self._register()
        self._place = self.session.join()
        self._read_plain()
        self._step = self._place.state_step
        if self._step != self._step_applied:
            raise EverstepError(f"the state in memory is of step {self._step_applied}, the generation's of {self._step}", "INTERNAL")
        self._micro_batches = (self._place.micro_batch_total or self._micro_wanted or self._micro_saved or
                               self._place.dp_size)
        if isinstance(self._sum, ExactSum) and self._sum.micro_batches != self._micro_batches:
            raise UsageError(f"the job has {self._place.micro_batch_total} micro-batches, the program "
                             f"{self._sum.micro_batches}: give both the same number")
        if self._ddp and self._place.dp_size > self._micro_batches:
            raise UsageError(f"{self._place.dp_size} ranks with DistributedDataParallel can't share {self._micro_batches} "
                             "micro-batches: every rank must have one")
        process_group.enter(self.session, self._place)

    def _rehearse(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any],
                  saved: dict[str, torch.Tensor]) -> None:
        if self._rehearsal_steps <= 0:
            return
        streams = torch.get_rng_state()
        self._rehearsing = self._rehearsal_steps
        self._micro_batches = 1
        process_group.leave()
        try:
            function(*arguments, **named)
        except _RehearsalOver as e:
            self._drop(e)
        finally:
            self._rehearsing = 0
            self._micro_batches = 0
        with torch.no_grad():
            if self._registered.changed(self._tensors()):
                raise UsageError("the training function exchanged tensors of the state (load_state_dict?): do that before "
                                 "run(), or inside apply=")
            self._find_mutable_buffers(saved)
            for name, t in self._registered.tensors():
                t.copy_(saved[name])
        for p in self._named.values():
            p.grad = None
        self._forget_step()
        self._read_plain()
        self._step = 0
        torch.set_rng_state(streams)
        gc.collect()
        gc.freeze()  # what is here now stays: later collections are short

    # ---- the step

    def epochs(self, count: int, name: str = "train") -> Iterator[int]:
        """The epochs that are not done yet, from the one at hand up to ``count``."""
        while True:
            before = list(self._cursors.get(name, (0, 0)))
            if before[_EPOCH] >= count:
                return
            yield before[_EPOCH]
            if self._cursors.get(name, [0, 0]) == before:
                raise UsageError(f"the body of epochs() took no step of epoch {before[_EPOCH]}: it must loop over "
                                 f"steps(loader) with name={name!r}")

    def steps(self, loader: DataLoader, steps: Optional[int] = None, name: str = "train") -> Iterator[Any]:
        """The batches of this rank in what is left of the epoch at hand; with ``steps``, on over epochs until the job has
        taken that many steps. The loader's batch size is that of one micro-batch; the order of samples, and which of them
        this rank reads, come from here. ``name`` tells several loaders apart.

        The body must call ``commit`` once for each batch.
        """
        plan = Plan(loader, self._micro_batches, self.seed, name)
        while steps is None or self._step_applied < steps:
            epoch, index = self._cursors.get(name, (0, 0))
            last = plan.steps_per_epoch
            if steps is not None:
                last = min(last, index + steps - self._step_applied)
            yield from self._drive(plan, name, epoch, index, last)
            if steps is None:
                return

    def indices(self, steps: int, name: str = "train") -> Iterator[tuple[int, int]]:
        """(step, micro-batch) pairs of this rank until the job has taken ``steps`` steps, for data that is no DataLoader:
        what is read must be a function of the two numbers. The body must call ``commit`` once for each pair."""
        while self._step_applied < steps:
            step = self._step_applied + 1
            yield from self._take_step(
                (name, 0, step), self._share(), lambda m: (1, self._micro_batches),
                lambda micro, again: iter([(step, m) for m in micro]))

    def _share(self) -> range:
        if self._rehearsing:
            return range(1)
        place = self.place
        if place.micro_batch_total:
            return range(place.micro_batch_first, place.micro_batch_first + place.micro_batch_count)
        return share(self._micro_batches, place.dp_size, place.dp)

    def _drive(self, plan: Plan, name: str, epoch: int, index: int, last: int) -> Iterator[Any]:
        mine = self._share()
        source = plan.batches(
            _Lazy(lambda: (plan.indices(epoch, i, m) for i in range(index, last) for m in mine)), not self._rehearsing)
        with contextlib.closing(source):
            for i in range(index, last):
                after = (name, epoch, i + 1) if i + 1 < plan.steps_per_epoch else (name, epoch + 1, 0)
                yield from self._take_step(
                    after, mine, lambda m, i=i: (len(plan.indices(epoch, i, m)), plan.step_samples(i)),
                    lambda micro, again, i=i: plan.batches([plan.indices(epoch, i, m) for m in micro], False) if again else source)

    def _take_step(self, after: tuple[str, int, int], mine: range, weight: Callable[[int], tuple[int, int]],
                   source: Callable[[range, bool], Iterator[Any]]) -> Iterator[Any]:
        """Yields this rank's micro-batches of one step, again as long as the vote says so."""
        again = False
        while True:
            self._begin(after)
            batches = source(mine, again)
            for k, m in enumerate(mine):
                seed_everything(derive("noise", self.seed, self._step, m))
                batch = next(batches)
                last = k + 1 == len(mine)
                for ddp in self._ddp:
                    ddp.require_backward_grad_sync = last
                self._micro = (k == 0, last, (1, 1) if self._rehearsing else weight(m))
                yield batch
                if self._micro is not None:
                    raise UsageError(f"the body of the loop over steps() ended step {self._step} without job.commit(): call it "
                                     "once for each batch, where optimizer.step() was")
            if not mine:
                self._commit(0)
            if self._outcome == Outcome.SWITCH:
                raise GenerationOver("a planned change of membership")
            if self._outcome != Outcome.REDO:
                return
            again = True

    def begin(self) -> int:
        """Begins a step by hand, without ``steps`` or ``indices``, and returns its number: this rank takes one of
        ``world_size`` equal parts."""
        name = "train"
        if self._outcome == Outcome.SWITCH:
            raise GenerationOver("a planned change of membership")
        self._begin((name, 0, self._step_applied + 1))
        self._micro = (True, True, (1, self.world_size))
        return self._step

    def _begin(self, after: tuple[str, int, int]) -> None:
        if self._place is None and not self._rehearsing:
            raise UsageError("a step outside of run(): pass the training function to job.run()")
        step = self._step_applied + 1
        if not self._rehearsing:
            self.session.begin_step(step)
        self._step = step
        self._forget_step()
        self._begun = True
        self._advance = after
        self._saved_buffers = {name: b.clone() for name, b in self._mutable.items()}
        if isinstance(self._sum, ExactSum):
            self._sum.begin()

    def reduce(self) -> None:
        """Sums this step's gradients over the ranks, weighted by samples, into ``.grad``. ``commit`` does it by itself; call
        it before looking at whole gradients, to clip them for example. Nothing happens before the last micro-batch."""
        if self._micro is None or self._reduced:
            return
        first, last, (samples, total) = self._micro
        if isinstance(self._sum, ExactSum):
            self._sum.add(samples * self._micro_batches / total, first)
        elif not (self._ddp and last):
            self._sum.add(samples / total, first)
        if last and not self._rehearsing and not (self._ddp and isinstance(self._sum, FlatSum)):
            self._sum.reduce(self.session.dp_group())
        self._reduced = True

    def commit(self, loss: Optional[torch.Tensor] = None) -> bool:
        """The end of a micro-batch, in the place of ``optimizer.step()``. After the last one of this rank all ranks vote, and
        if all of them have their gradients, each applies them. ``loss`` (of this micro-batch) is reported to the operator,
        and nobody applies a step with a loss that is not finite.

        True when the step was applied. GenerationOver: it was not decided; let the exception pass. NotFiniteError: no rank
        applied it.
        """
        if not self._begun and self._outcome is not None:
            raise UsageError(f"commit() was called twice in step {self._step}: call it once for each batch")
        if not self._begun:
            raise UsageError("commit() outside of a step: call it in the body of a loop over job.steps(loader), or after job.begin()")
        if self._micro is None:
            raise UsageError(f"commit() was called twice in step {self._step}: call it once for each batch")
        last = self._micro[1]
        self.reduce()
        self._micro = None
        self._reduced = False
        if not last:
            return False
        flags = 0
        if loss is not None:
            value = float(loss.detach())
            if value != value or value in (float("inf"), float("-inf")):
                flags |= _abi.VOTE_NOT_FINITE
        applied = self._commit(flags)
        if applied and loss is not None:
            self.report("loss", value)
        return applied

    def _commit(self, flags: int) -> bool:
        if self._rehearsing:
            return self._commit_rehearsal()
        if not self._share() and isinstance(self._sum, (FlatSum, ExactSum)):
            self._sum.add(0.0, True)
            self._sum.reduce(self.session.dp_group())
        self._sync_buffers()
        if isinstance(self._sum, ExactSum):
            flags |= self._sum.vote_flags()
        for scaler in self._scalers.values():
            for o in self._optimizers.values():
                with contextlib.suppress(RuntimeError):  # the program unscaled already, to clip
                    scaler.unscale_(o)
        self._outcome = self.session.commit(self._step, flags)
        if self._outcome == Outcome.REDO:
            self._discard_for_redo()
            return False
        if self._outcome == Outcome.NOT_FINITE:
            raise NotFiniteError(f"step {self._step}: some rank's loss or gradients are not finite; nothing was applied")
        self._begun = False
        if self._snapshot_every and self._step % self._snapshot_every == 0:
            self.snapshot()
        return True

    def _discard_for_redo(self) -> None:
        with torch.no_grad():
            for name, value in self._saved_buffers.items():
                self._buffers[name].copy_(value)
        if isinstance(self._sum, ExactSum):
            self._sum.raise_exponents(self.session.dp_group())
        self._begun = False

    def _commit_rehearsal(self) -> bool:
        self._outcome = Outcome.APPLIED
        self._on_apply(self._step)
        self._begun = False
        self._rehearsing -= 1
        if self._rehearsing == 0:
            self._rehearsing = 1  # until run() has undone it
            raise _RehearsalOver("the rehearsal is over")
        return True

    def _find_mutable_buffers(self, before: Mapping[str, torch.Tensor]) -> None:
        """Leaves in ``_mutable`` what the rehearsal changed, and running statistics: constants need not travel each step.
        The rehearsal is the same on every rank, so the answer is too. (Version counters won't do: the kernels of batch norm
        do not count.)"""
        running = {id(b) for model in self._models.values() for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)
                   for b in m.buffers(recurse=False)}
        self._mutable = {name: b for name, b in self._buffers.items()
                         if id(b) in running or not torch.equal(b, before.get(name, b))}

    def _sync_buffers(self) -> None:
        """Running statistics and the like are those of rank 0's samples, on every rank."""
        changed = list(self._mutable.values())
        if not changed or self.place.dp_size == 1:
            return
        raw = [b.detach().contiguous().reshape(-1).view(torch.uint8) for b in changed]
        flat = torch.cat(raw)
        self.session.dp_group().broadcast(flat.data_ptr(), flat.numel(), _abi.U8, 0)
        at = 0
        with torch.no_grad():
            for b, r in zip(changed, raw):
                b.copy_(flat[at:at + r.numel()].view(b.dtype).reshape(b.shape))
                at += r.numel()

    def snapshot(self) -> bool:
        """Copies the state into staging memory, between steps. False: there was no room, which is counted."""
        if self._rehearsing:
            return True
        self._register()
        return self.session.snapshot()

    def report(self, name: str, value: Union[float, torch.Tensor]) -> None:
        """A figure of the last step for the operator; rank 0's counts."""
        if self.leader:
            self.session.report(self._step, name, float(value))

    # ---- DistributedDataParallel

    def _hook(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        if not isinstance(ddp.process_group, process_group.ProcessGroupEverstep):
            raise UsageError(f"DistributedDataParallel is over the {ddp.process_group.name()} backend: call everstep.torch.init() "
                             "in the place of torch.distributed.init_process_group()")
        if ddp._comm_hooks:
            raise UsageError("this model has a communication hook already; Job brings its own, which weighs by samples")
        job = self

        def hook(_: object, bucket: Any) -> torch.futures.Future:
            buffer = bucket.buffer()
            done: torch.futures.Future = torch.futures.Future()
            if not job._rehearsing and isinstance(job._sum, FlatSum):
                assert job._micro is not None
                first, _, (samples, total) = job._micro
                if samples != total:
                    buffer.mul_(samples / total)
                if not first:
                    job._sum.add_to(bucket.parameters(), bucket.gradients())
                job.session.dp_group().all_reduce(buffer.data_ptr(), buffer.numel(), process_group.dtype_of(buffer))
            done.set_result(buffer)
            return done

        # torch compares the types themselves, and there are only strings here.
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        ddp.register_comm_hook(None, hook)


class _Lazy:
    """A list that is made when it is read, once per reading."""

    def __init__(self, make: Callable[[], Iterator[Sequence[int]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Sequence[int]]:
        return self._make()
