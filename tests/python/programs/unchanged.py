#!/usr/bin/env python3
"""A torchrun program that knows nothing of Everstep: DDP on gloo, resumes from its own checkpoint."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    pace = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start, path = 0, os.path.join(folder, "checkpoint.pt")
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    times = open(os.path.join(folder, f"times-{rank}.log"), "a", buffering=1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT",
             "TORCHELASTIC_RUN_ID", "ROLE_RANK", "MASTER_ADDR")
    with open(os.path.join(folder, f"environment-{rank}"), "w") as file:
        file.write("\n".join(f"{name}={os.environ[name]}" for name in names) + "\n")
    never = threading.Event()  # the pace of a step that takes longer
    for step in range(start + 1, steps + 1):
        never.wait(pace)
        generator = torch.Generator().manual_seed(step * 100 + rank)
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        times.write(f"{step} {size} {os.getpid()} {time.clock_gettime(time.CLOCK_MONOTONIC):.6f}\n")
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, path + ".new")
            os.replace(path + ".new", path)
        if len(sys.argv) > 4 and step == int(sys.argv[4]) and rank == 1:
            raise ValueError(f"step {step} has bad data")
    if rank == 0:
        print("finished", step, sum(p.double().sum().item() for p in model.parameters()), flush=True)
    # Not through destructors: torch 2.13's Reducer joins gloo's thread with the interpreter lock held, while that thread may
    # want the lock to drop the last operation. Seen to hang here.
    os._exit(0)


if __name__ == "__main__":
    main()
