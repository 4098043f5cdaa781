"""Which samples a rank reads: a function of (seed, epoch, step, micro-batch) alone, never of who is in the job.

An epoch is a permutation of the data set, cut into steps of one global batch, each of them cut into micro-batches. So
each sample is in exactly one micro-batch of an epoch, and whoever computes it after a change of membership computes the
same. The last step of an epoch takes what does not fill another one.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any, Iterator, Sequence

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from everstep.errors import UsageError


def derive(*parts: object) -> int:
    """A 63-bit number that depends on all parts, the same everywhere."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(value: int) -> None:
    """torch, random, and numpy if the program uses it. CUDA generators too, where there are any."""
    torch.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value % 2**32)


def share(total: int, size: int, index: int) -> range:
    """The part of ``range(total)`` for one of ``size``, as even as it goes, earlier ones taking the remainder."""
    each, more = divmod(total, size)
    first = index * each + min(index, more)
    return range(first, first + each + (1 if index < more else 0))


class Plan:
    """Of one DataLoader. ``micro_batches``: of one global batch; each has the loader's batch size."""

    def __init__(self, loader: DataLoader, micro_batches: int, seed: int, name: str) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(f"steps() needs a torch DataLoader, not a {type(loader).__name__}; for data of another kind "
                             "use indices()")
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError("an IterableDataset has no samples that can be named, so none can be read exactly once after a "
                             "change of membership: use a map-style Dataset, or indices()")
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise UsageError("steps() makes its own batches: give the DataLoader a batch_size and no batch_sampler")
        self._loader, self._name = loader, name
        self.micro_batches = micro_batches
        self.samples = len(loader.dataset)  # type: ignore[arg-type]
        if self.samples < micro_batches:
            raise UsageError(f"{self.samples} samples can't fill {micro_batches} micro-batches")
        self._batch = loader.batch_size
        self.global_batch = loader.batch_size * micro_batches
        self.steps_per_epoch = max(1, self.samples // self.global_batch)
        self._seed = seed
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def _permutation(self, epoch: int) -> Sequence[int]:
        if self._order[0] == epoch:
            return self._order[1]
        sampler = self._loader.sampler
        order: Sequence[int]
        if isinstance(sampler, SequentialSampler):
            order = range(self.samples)
        elif isinstance(sampler, (RandomSampler, DistributedSampler)):
            if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != self.samples):
                raise UsageError("a RandomSampler with replacement or num_samples does not read each sample once")
            if isinstance(sampler, DistributedSampler) and not sampler.shuffle:
                order = range(self.samples)
            else:
                generator = torch.Generator()
                generator.manual_seed(derive("order", self._seed, self._name, epoch))
                order = torch.randperm(self.samples, generator=generator).tolist()
        else:
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            with torch.random.fork_rng(devices=[]):
                seed_everything(derive("order", self._seed, self._name, epoch))
                order = list(sampler)
            if len(order) != self.samples:
                raise UsageError(f"the sampler names {len(order)} of {self.samples} samples in one process: it must name all, "
                                 "since ranks are given their share here")
        self._order = (epoch, order)
        return order

    def indices(self, epoch: int, index: int, micro_batch: int) -> Sequence[int]:
        """The samples of one micro-batch of step ``index`` of an epoch."""
        order = self._permutation(epoch)
        first = index * self.global_batch
        if index < self.steps_per_epoch - 1 or self.samples == self.steps_per_epoch * self.global_batch:
            first += micro_batch * self._batch
            return order[first:first + self._batch]
        mine = share(self.samples - first, self.micro_batches, micro_batch)
        return order[first + mine.start:first + mine.stop]

    def step_samples(self, index: int) -> int:
        """How many samples all ranks together read in one step."""
        return self.global_batch if index < self.steps_per_epoch - 1 else self.samples - index * self.global_batch

    def batches(self, wanted: list[Sequence[int]], workers: bool) -> Iterator[Any]:
        """Loads these micro-batches with the loader's own settings."""
        loader = self._loader
        if loader.num_workers == 0 or not workers:
            dataset = loader.dataset
            for indices in wanted:
                fetch = getattr(dataset, "__getitems__", None)
                samples = fetch(list(indices)) if fetch is not None else [dataset[i] for i in indices]
                yield loader.collate_fn(samples)
            return
        parallel = DataLoader(
            loader.dataset, batch_sampler=[list(indices) for indices in wanted], num_workers=loader.num_workers,  # type: ignore[arg-type]
            collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor)
        try:
            yield from parallel
        except (ConnectionError, EOFError) as e:  # how torch says it when the worker's last batch was half sent
            raise RuntimeError(f"a DataLoader worker exited unexpectedly: {e}") from e
