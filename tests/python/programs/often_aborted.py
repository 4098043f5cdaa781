#!/usr/bin/env python3
"""Trains while its generations end again and again: one rank aborts the world at a chosen collective of a step, the
next time at the next one. Says what that costs the process, and the digest of the weights."""

import argparse
import hashlib
import os
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep.torch
from everstep import _abi


def resources():
    """Resident memory that is this process's own (KiB), descriptors, threads."""
    with open("/proc/self/smaps_rollup") as file:
        values = dict(line.split(":") for line in file if line.startswith(("Private_Dirty", "Private_Clean")))
    memory = sum(int(v.split()[0]) for v in values.values())
    return memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--baseline", type=int, default=20, help="generation after which resources must not grow")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--log", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    everstep.torch.init(seed=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    if arguments.ddp:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = everstep.torch.Job(model, optimizer, exact=arguments.exact, micro_batches=3)
    x = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(x, x[:, :4].abs().argmax(1)), batch_size=4, shuffle=True)

    # Every collective passes one of these on its way into the library.
    calls = [0, -1]  # in this step; the one before which the world is aborted
    library = _abi.library()
    for name in ("es_all_reduce", "es_broadcast", "es_run", "es_exact_finish", "es_commit"):
        inner = getattr(library, name)

        def counted(*a, inner=inner):
            calls[0] += 1
            if calls[0] == calls[1]:
                job.session.world().abort(f"the test ends the generation at collective {calls[0]}")
            return inner(*a)

        setattr(library, name, counted)
    steps = arguments.aborts + 20
    calm = bool(os.environ.get("EVERSTEP_TEST_CALM"))
    seen, baseline = [0], []

    def train():
        if not job.rehearsing:
            seen[0] += 1
            if seen[0] == arguments.baseline:
                baseline.append(resources())
        first = True
        for x, y in job.steps(loader, steps=steps):
            calls[0], calls[1] = 0, -1
            # In the second step of a generation, so that each one gets somewhere.
            if not job.rehearsing and not first and job.generation <= arguments.aborts and not calm and job.rank == job.generation % job.world_size:
                calls[1] = 1 + (job.generation // job.world_size) % 7
            first = False
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            job.commit()
            if calls[1] > calls[0]:  # there is no such collective: at the end of the step then
                job.session.world().abort("the test ends the generation after the step")

    job.run(train)
    digest = hashlib.sha256()
    for _, tensor in job._tensors():
        digest.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    end = resources()
    print(f"resources rank {job.place.rank} generations {seen[0]} baseline {baseline[0] if baseline else end} end {end} "
          f"python threads {threading.active_count()}", file=sys.stderr, flush=True)
    if arguments.log:
        with open(os.path.join(arguments.log, f"resources-{os.getpid()}"), "w") as file:
            file.write(f"{seen[0]} {' '.join(map(str, baseline[0] if baseline else end))} {' '.join(map(str, end))}\n")
    if job.place.rank == 0:
        print(f"final digest {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
