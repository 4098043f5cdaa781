#!/usr/bin/env python3
"""The parts of the package on their own: state as bytes, who reads which sample, and the process group."""

import collections
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

from torch_support import ENVIRONMENT, ROOT, main, program_arguments, support


class State(unittest.TestCase):
    VALUE = {"b": [1, -2**70, 0.1, float("inf")], "a": ("x", None, True, b"\0\1"), 3: {"deep": {}}, "c": collections.Counter([1, 1])}

    def test_values_survive_encoding(self):
        import torch
        from everstep.torch.state import decode, encode
        value = decode(encode(self.VALUE))
        self.assertEqual(value, self.VALUE)
        self.assertIsInstance(value["c"], collections.Counter)
        self.assertIsInstance(value["a"], tuple)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = torch.arange(6).view(2, 3).to(dtype)
            back = decode(encode({"t": tensor}))["t"]
            self.assertTrue(torch.equal(back, tensor) and back.dtype == dtype)
        self.assertEqual(tuple(decode(encode(torch.zeros(0, 2))).shape), (0, 2))

    def test_equal_values_have_equal_bytes(self):
        from everstep.torch.state import encode
        other = dict(reversed(list(self.VALUE.items())))
        self.assertEqual(encode(self.VALUE), encode(other))
        self.assertNotEqual(encode({"x": 1}), encode({"x": 1.0}))

    def test_what_cannot_be_kept_is_named(self):
        import everstep
        from everstep.torch.state import encode
        with self.assertRaisesRegex(everstep.UsageError, r"state\['f'\]\[1\] is a function"):
            encode({"f": [1, lambda: 0]})

    def test_too_much_plain_state_says_how_much_room_it_needs(self):
        import everstep
        from everstep.torch.state import PlainState
        plain = PlainState(64)
        plain.write({"x": 1})
        self.assertEqual(plain.read(), {"x": 1})
        with self.assertRaisesRegex(everstep.UsageError, "plain_state_bytes="):
            plain.write({"x": "y" * 100})

    def test_tensors_with_gaps_are_refused(self):
        import everstep
        import torch
        from everstep.torch.state import Registered
        with everstep.Session() as session:
            registered = Registered()
            registered.set(session, iter([("t", torch.zeros(2, 3).t()), ("scalar", torch.tensor(1.0))]))
            with self.assertRaisesRegex(everstep.UsageError, "view with gaps"):
                registered.set(session, iter([("t", torch.zeros(4, 4)[:, :2])]))
            with self.assertRaisesRegex(everstep.UsageError, "two tensors"):
                registered.set(session, iter([("t", torch.zeros(1)), ("t", torch.zeros(1))]))

    def test_exchanged_tensors_are_noticed(self):
        import everstep
        import torch
        from everstep.torch.state import Registered
        first, second = torch.zeros(3), torch.zeros(3)
        with everstep.Session() as session:
            registered = Registered()
            registered.set(session, iter([("t", first)]))
            self.assertFalse(registered.changed(iter([("t", first)])))
            self.assertTrue(registered.changed(iter([("t", second)])))

    def test_materialized_optimizers_take_the_same_first_step(self):
        import torch
        from everstep.torch.state import materialize
        makers = {
            "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
            "SGD plain": lambda p: torch.optim.SGD(p, 0.1), "Nesterov": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
            "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True), "AdamW": lambda p: torch.optim.AdamW(p),
            "NAdam": lambda p: torch.optim.NAdam(p, weight_decay=0.1), "RAdam": torch.optim.RAdam,
            "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), "Adagrad": torch.optim.Adagrad,
            "Adamax": torch.optim.Adamax, "Adadelta": torch.optim.Adadelta,
        }
        for name, make in makers.items():
            results = []
            for prepared in (False, True):
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
                optimizer = make(model.parameters())
                before = [p.detach().clone() for p in model.parameters()]
                if prepared:
                    materialize(optimizer)
                    for p, b in zip(model.parameters(), before):
                        self.assertTrue(torch.equal(p, b), f"{name}: materializing moved the weights")
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.ones(2, 5)).sum().backward()
                    optimizer.step()
                results.append([p.detach().clone() for p in model.parameters()])
            for a, b in zip(*results):
                self.assertTrue(torch.equal(a, b), f"{name}: another first step after materializing")

    def test_dampening_is_refused(self):
        import everstep
        import torch
        from everstep.torch.state import materialize
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1, momentum=0.9, dampening=0.5)
        with self.assertRaisesRegex(everstep.UsageError, "dampening"):
            materialize(optimizer)


class Data(unittest.TestCase):
    def plan(self, samples, batch, micro_batches, seed=1, shuffle=True):
        from everstep.torch.data import Plan
        from torch.utils.data import DataLoader
        return Plan(DataLoader(range(samples), batch_size=batch, shuffle=shuffle), micro_batches, seed, "train")

    def test_every_sample_once_whatever_the_width(self):
        from everstep.torch.data import share
        for samples, batch, micro_batches in itertools.product((24, 25, 47, 48, 61), (1, 3, 4), (1, 2, 5, 6)):
            plan = self.plan(samples, batch, micro_batches)
            seen = [i for index in range(plan.steps_per_epoch) for m in range(micro_batches) for i in plan.indices(4, index, m)]
            self.assertEqual(sorted(seen), list(range(samples)), (samples, batch, micro_batches))
            for index in range(plan.steps_per_epoch):
                pieces = [list(plan.indices(4, index, m)) for m in range(micro_batches)]
                self.assertTrue(all(pieces), "an empty micro-batch")
                self.assertEqual(sum(map(len, pieces)), plan.step_samples(index))
        for total, size in itertools.product(range(9), range(1, 6)):
            shares = [list(share(total, size, i)) for i in range(size)]
            self.assertEqual(sum(shares, []), list(range(total)))
            self.assertLessEqual(max(map(len, shares)) - min(map(len, shares)), 1)

    def test_order_differs_between_epochs_and_seeds_only(self):
        def order(epoch, **options):
            plan = self.plan(50, 5, 2, **options)
            return [i for index in range(5) for m in range(2) for i in plan.indices(epoch, index, m)]
        self.assertEqual(order(0), order(0))
        self.assertNotEqual(order(0), order(1))
        self.assertNotEqual(order(0), order(0, seed=2))
        self.assertEqual(order(3, shuffle=False), list(range(50)))

    def test_loaders_that_cannot_be_shared_are_refused(self):
        import everstep
        import torch
        from everstep.torch.data import Plan
        from torch.utils.data import DataLoader, IterableDataset

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(range(3))
        batches = torch.utils.data.BatchSampler(range(9), 2, True)
        for loader, message in ((Stream(), "DataLoader"), (DataLoader(Stream()), "IterableDataset"),
                                (DataLoader(range(9), batch_size=None), "batch_size"),
                                (DataLoader(range(9), batch_sampler=batches), "no batch_sampler"),
                                (DataLoader(range(3), batch_size=1), "3 samples can't fill 4")):
            with self.assertRaisesRegex(everstep.UsageError, message):
                Plan(loader, 4, 0, "train")


class Groups(unittest.TestCase):
    def test_every_collective_among_three_ranks(self):
        sockets = [socket.socket() for _ in range(3)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        world = ",".join(f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
        for s in sockets:
            s.close()
        ranks = [subprocess.Popen([sys.executable, *program_arguments("collectives.py")], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True,
                                  env={**os.environ, **ENVIRONMENT, "EVERSTEP_STATIC_WORLD": world, "EVERSTEP_STATIC_RANK": str(i)})
                 for i in range(3)]
        outputs = [rank.communicate(timeout=60 * support.SCALE)[0] for rank in ranks]
        for i, output in enumerate(outputs):
            self.assertEqual((ranks[i].returncode, output.strip().splitlines()[-1:]), (0, ["all collectives agree"]), output)

    def test_a_group_of_one_copies(self):
        import torch
        import torch.distributed as dist
        import everstep.torch
        everstep.torch.init()
        self.addCleanup(dist.destroy_process_group)
        t = torch.arange(3.0)
        dist.all_reduce(t)
        out = [torch.zeros(3)]
        dist.all_gather(out, t)
        part = torch.zeros(3)
        dist.reduce_scatter_tensor(part, t)
        for tensor in (t, out[0], part):
            self.assertEqual(tensor.tolist(), [0, 1, 2])
        self.assertEqual((dist.get_rank(), dist.get_world_size(), dist.get_backend()), (0, 1, "everstep"))


class Wheel(unittest.TestCase):
    def test_wheel_carries_the_library_and_works_elsewhere(self):
        with tempfile.TemporaryDirectory() as folder:
            source, wheels, target = (os.path.join(folder, name) for name in ("source", "wheels", "target"))
            shutil.copytree(ROOT / "worker" / "python", source, ignore=shutil.ignore_patterns("__pycache__", "build"))
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
            subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source], check=True,
                           capture_output=True)
            (wheel,) = os.listdir(wheels)
            self.assertRegex(wheel, r"^everstep-\d+\.\d+\.\d+-py3-none-linux_\w+\.whl$")
            subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, os.path.join(wheels, wheel)], check=True,
                           capture_output=True)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
            code = "import everstep; s = everstep.Session(); print(everstep.__file__, s.join().world_size); s.finish(); s.close()"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder,
                                  env={**environment, "PYTHONPATH": target})
            self.assertEqual(done.stdout.split(), [os.path.join(target, "everstep", "__init__.py"), "1"], done.stderr)


if __name__ == "__main__":
    main()
