#!/usr/bin/env python3
"""What the tests train: a small network that predicts the next character of the GNU licence, with dropout, running
statistics, AdamW and a schedule, so that everything a job must keep is in use. Prints one line a step (rank 0) and, at the
end, a digest of the weights and of everything else.

With --log each process writes what it applied and which samples it read to a file of its own.
"""

import argparse
import hashlib
import os
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import everstep.torch

WINDOW = 16


class Text(Dataset):
    def __init__(self, samples, log):
        with open("/usr/share/common-licenses/GPL-3", "rb") as file:
            self.data = torch.tensor(list(file.read()), dtype=torch.uint8)
        self.samples, self.log = samples, log

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        at = i * 7
        return i, self.data[at:at + WINDOW].long(), self.data[at + WINDOW].long()


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(128, 8)
        self.one = nn.Linear(8 * WINDOW, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.two = nn.Linear(width, 128)

    def forward(self, x):
        return self.two(self.drop(torch.relu(self.norm(self.one(self.embed(x).flatten(1))))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pace", type=float, default=0.0, help="fewest milliseconds of a step")
    parser.add_argument("--micro-batches", type=int, default=0)
    parser.add_argument("--rehearsal", type=int, default=3)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--no-norm", action="store_true", help="without running statistics, which are those of rank 0's samples")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--snapshot-every", type=int, default=0)
    parser.add_argument("--log", default="")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    everstep.torch.init(seed=1)
    model = Network(arguments.width)
    if arguments.no_norm:
        model.norm = nn.Identity()
    if arguments.ddp:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=arguments.steps + 5)
    job = everstep.torch.Job(model, optimizer, scheduler, micro_batches=arguments.micro_batches, exact=arguments.exact,
                             rehearsal=arguments.rehearsal, snapshot_every=arguments.snapshot_every)
    loader = DataLoader(Text(arguments.samples, None), batch_size=arguments.batch, shuffle=True, num_workers=arguments.workers)
    log = open(os.path.join(arguments.log, f"steps-{os.getpid()}.log"), "a", buffering=1) if arguments.log else None
    samples = open(os.path.join(arguments.log, f"samples-{os.getpid()}.log"), "a", buffering=1) if arguments.log else None
    times = open(os.path.join(arguments.log, f"times-{os.getpid()}.log"), "a", buffering=1) if arguments.log else None
    wake, never = [time.monotonic()], threading.Event()  # the pace of a step that takes longer

    def train():
        if not job.rehearsing:
            print(f"generation {job.generation} rank {job.rank} of {job.world_size} step {job.step} "
                  f"{job.place.restored_from} pid {os.getpid()}", file=sys.stderr, flush=True)
        for which, x, y in job.steps(loader, steps=arguments.steps):
            never.wait(max(0.0, wake[0] - time.monotonic()))
            wake[0] = time.monotonic() + arguments.pace / 1000
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if samples and not job.rehearsing:
                samples.write(f"{job.step} {job.generation} {' '.join(map(str, which.tolist()))}\n")
            if job.commit(loss) and not job.rehearsing:
                if log:
                    log.write(f"applied step {job.step} generation {job.generation} pid {os.getpid()} loss {loss.item():.9g}\n")
                    times.write(f"{job.step} {job.world_size} {job.generation} {job.rank} {time.clock_gettime(time.CLOCK_MONOTONIC):.6f}\n")
                if job.leader:
                    print(f"step {job.step} loss {loss.item():.6f}", flush=True)

    job.run(train)
    digest = hashlib.sha256()
    for name, tensor in job._tensors():
        digest.update(name.encode())
        digest.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    if job.leader:
        print(f"final digest {digest.hexdigest()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
