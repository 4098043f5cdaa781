#!/usr/bin/env python3
"""A training program with one mistake, named by its argument."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import everstep
import everstep.torch


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if mistake == "worker-exit" and i == 40 and torch.utils.data.get_worker_info() is not None:
            os._exit(3)
        return torch.tensor([float(i), 1.0])


mistake = sys.argv[1]
everstep.torch.init(seed=int(os.environ.get("EVERSTEP_PROCESS_ID", "1")) if mistake == "unequal-values" else 1)
# Which process is wrong can only be told by its number before it joins.
odd = int(os.environ.get("EVERSTEP_PROCESS_ID", "1")) % 2 == 1
model = nn.Linear(2, 3 if mistake == "unequal-shapes" and odd else 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
job = everstep.torch.Job(model, optimizer, rehearsal=0 if mistake == "no-rehearsal-forgot-commit" else 2)
loader = DataLoader(Numbers(), batch_size=4, num_workers=1 if mistake == "worker-exit" else 0)
if mistake == "two-sessions":
    everstep.Session()
if mistake == "outside":
    job.commit()


def train():
    for x in job.steps(loader, steps=40):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if not job.rehearsing and job.step == 7:
            if mistake == "raises" and job.rank == 0:
                raise ValueError("the data of this step is bad")
            if mistake == "different-code" and job.rank == 1:
                torch.distributed.all_reduce(torch.zeros(17))
            if mistake == "interrupt" and job.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            if mistake == "not-finite" and job.rank == 0:
                loss = loss * float("nan")
            if mistake == "fork":
                child = os.fork()
                if child == 0:
                    try:
                        job.commit()
                    except everstep.UsageError as e:
                        print(f"child: {e}", flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
        if mistake in ("forgot-commit", "no-rehearsal-forgot-commit"):
            continue
        job.commit(loss)
        if mistake == "twice":
            job.commit(loss)


job.run(train)
print("done", flush=True)
