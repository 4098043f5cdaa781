#!/usr/bin/env python3
"""A plain training loop made to survive: a network that learns to write like a licence text. Lines marked # everstep are
all that differs from the loop without it.

    everstep run --nnodes 4 --spares 1 worker/python/examples/licence.py
    python3 worker/python/examples/licence.py          # one process, no cluster
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import everstep.torch  # everstep

WINDOW = 32


class Text(Dataset):
    def __init__(self, path="/usr/share/common-licenses/GPL-3"):
        with open(path, "rb") as file:
            self.data = torch.tensor(list(file.read()))

    def __len__(self):
        return len(self.data) - WINDOW - 1

    def __getitem__(self, i):
        return self.data[i:i + WINDOW], self.data[i + WINDOW]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 16)
        self.layers = nn.Sequential(nn.Linear(16 * WINDOW, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 128))

    def forward(self, x):
        return self.layers(self.embed(x).flatten(1))


torch.set_num_threads(1)
torch.manual_seed(1)
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 274)
loader = DataLoader(Text(), batch_size=32, shuffle=True)
job = everstep.torch.Job(model, optimizer, scheduler)  # everstep


def train():  # everstep
    for epoch in job.epochs(3):  # everstep: was range(3)
        for x, y in job.steps(loader):  # everstep: was loader
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if job.commit(loss) and job.leader and job.step % 50 == 0:  # everstep: was optimizer.step(); scheduler.step()
                print(f"epoch {epoch} step {job.step} loss {loss.item():.3f}", flush=True)


job.run(train)  # everstep
