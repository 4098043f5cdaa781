#!/usr/bin/env python3
"""One rank of a static world: every collective of torch.distributed on the everstep backend, against what it should give."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import everstep.torch
from everstep.torch import process_group


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def equal(tensor, values, what):
    expect(torch.equal(tensor, torch.tensor(values, dtype=tensor.dtype).view(tensor.shape)), f"{what}: {tensor} is not {values}")


def check(rank, size):
    everyone = list(range(size))
    expect((dist.get_rank(), dist.get_world_size()) == (rank, size), "place in the world")
    t = torch.tensor([rank + 1.0, 10.0])
    dist.all_reduce(t)
    equal(t, [6, 30], "sum")
    for op, want in ((dist.ReduceOp.AVG, 2), (dist.ReduceOp.MAX, 3), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.PRODUCT, 6)):
        t = torch.tensor([rank + 1.0])
        dist.all_reduce(t, op=op)
        equal(t, [want], f"{op}")
    t = torch.tensor([[1, 2], [3, 4]]).t() * (rank + 1)
    dist.all_reduce(t)
    equal(t.contiguous(), [[6, 18], [12, 24]], "sum of a transposed tensor")
    t = torch.tensor([rank == 1, False])
    dist.all_reduce(t)
    equal(t, [True, False], "sum of bools is or")
    t = torch.complex(torch.tensor([1.0 + rank]), torch.tensor([2.0]))
    dist.all_reduce(t)
    equal(t, [6 + 6j], "complex sum")
    work = dist.all_reduce(t := torch.ones(4), async_op=True)
    work.wait()
    expect(work.is_completed(), "a work that was waited for is completed")
    equal(t, [size] * 4, "asynchronous sum")
    equal(dist.all_reduce(t := torch.ones(1), async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait(), [2 * size], "future")
    t = torch.full((3,), float(rank))
    dist.broadcast(t, src=2)
    equal(t, [2, 2, 2], "broadcast")
    t = torch.tensor([rank + 1])
    dist.reduce(t, dst=1)
    expect(rank != 1 or t.item() == 6, "reduce")
    gathered = [torch.zeros(2) for _ in everyone]
    dist.all_gather(gathered, torch.tensor([rank, -rank]).float())
    for i in everyone:
        equal(gathered[i], [i, -i], "all-gather")
    uneven = [torch.zeros(i + 1) for i in everyone]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    for i in everyone:
        equal(uneven[i], [i] * (i + 1), "uneven all-gather")
    flat = torch.zeros(2 * size)
    dist.all_gather_into_tensor(flat, torch.tensor([rank, rank + 0.5]))
    equal(flat, [0, 0.5, 1, 1.5, 2, 2.5], "all-gather into one tensor")
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size))
    equal(part, [size * 2 * rank, size * (2 * rank + 1)], "reduce-scatter of one tensor")
    dist.reduce_scatter(part, [torch.full((2,), float(i)) for i in everyone])
    equal(part, [size * rank] * 2, "reduce-scatter")
    lists = [torch.zeros(1) for _ in everyone] if rank == 0 else None
    dist.gather(torch.tensor([rank * 2.0]), lists, dst=0)
    expect(rank != 0 or [x.item() for x in lists] == [0, 2, 4], "gather")
    t = torch.zeros(1)
    dist.scatter(t, [torch.tensor([i + 5.0]) for i in everyone] if rank == 1 else None, src=1)
    equal(t, [rank + 5], "scatter")
    out = torch.zeros(size)
    dist.all_to_all_single(out, torch.tensor([rank * 10.0 + i for i in everyone]))
    equal(out, [i * 10 + rank for i in everyone], "all-to-all of one tensor")
    out = torch.zeros(sum(i + 1 for i in everyone))
    dist.all_to_all_single(out, torch.full(((rank + 1) * size,), float(rank)), [i + 1 for i in everyone], [rank + 1] * size)
    equal(out, [i for i in everyone for _ in range(i + 1)], "uneven all-to-all")
    outs = [torch.zeros(1) for _ in everyone]
    dist.all_to_all(outs, [torch.tensor([rank * 10.0 + i]) for i in everyone])
    expect([x.item() for x in outs] == [i * 10 + rank for i in everyone], "all-to-all")
    if rank == 0:
        dist.send(torch.tensor([7.0]), dst=2)
    if rank == 2:
        t = torch.zeros(1)
        dist.recv(t, src=0)
        equal(t, [7], "receive")
        t = torch.zeros(1)
        dist.irecv(t, src=1).wait()
        equal(t, [8], "asynchronous receive")
    if rank == 1:
        dist.isend(torch.tensor([8.0]), dst=2).wait()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    expect(objects == [{"rank": i} for i in everyone], "objects")
    dist.barrier()
    pair = dist.new_group([0, 2])
    if rank != 1:
        expect(dist.get_rank(pair) == (0 if rank == 0 else 1) and dist.get_world_size(pair) == 2, "place in a group")
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=pair)
        equal(t, [2], "sum in a group")
        dist.broadcast(t := torch.tensor([float(rank)]), src=2, group=pair)
        equal(t, [2], "broadcast in a group")
    else:
        expect(dist.get_rank(pair) == -1, "a stranger to a group")
    equal(functional.all_reduce(torch.ones(2), "sum", list(range(size))), [size] * 2, "functional all-reduce")
    equal(functional.all_gather_tensor(torch.tensor([float(rank)]), 0, list(range(size))), everyone, "functional all-gather")
    equal(functional.reduce_scatter_tensor(torch.ones(size), "sum", 0, list(range(size))), [size], "functional reduce-scatter")
    equal(functional.broadcast(torch.tensor([float(rank)]), 1, list(range(size))), [1], "functional broadcast")
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    expect(mesh.get_local_rank() == rank, "device mesh")
    try:
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.BXOR)
        raise AssertionError("an unknown reduction passed")
    except everstep.UsageError as e:
        expect("BOR" in str(e), str(e))


def main():
    everstep.torch.init(seed=3)
    alone = torch.ones(2)
    dist.all_reduce(alone)
    equal(alone, [1, 1], "a process that is alone")
    session = everstep.Session()
    place = session.join()
    process_group.enter(session, place)
    check(place.rank, place.world_size)
    session.finish()
    process_group.leave()
    session.close()
    print("all collectives agree", flush=True)
    os._exit(0) if len(sys.argv) > 1 else None


if __name__ == "__main__":
    main()
