#!/usr/bin/env python3
"""From SIGKILL of one of four ranks until training goes on: Everstep in process, Everstep with an unchanged script, torchrun.

    PYTHON tests/bench/pytorch/kill_bench.py [--systems in-process,unchanged,torchrun] [--kills 20] [--json FILE]

PYTHON has torch; EVERSTEP_BIN and EVERSTEP_LIBRARY name a build. (a) is the first step that any survivor completed after
the kill (with torchrun and unchanged scripts nobody survives), (b) the first moment at which all four ranks completed one
at full width. Both hold one whole step, which is stated. Each system runs alone; torchrun has its best settings
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it hangs after the restart, and a monitor interval of 0.1 s).
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from torch_support import ENVIRONMENT, PROGRAMS, now, program_arguments, support, wait_until  # noqa: E402

RANKS = 4


def lines_of(folder):
    """file -> [(step, world size, [pid,] time)]"""
    result = {}
    for path in Path(folder).glob("times-*.log"):
        result[path.stem] = [list(map(float, line.split())) for line in path.read_text().split("\n")[:-1]]
    return result


class InProcess:
    """The text trainer with DDP on the everstep backend."""

    def __init__(self, pace, steps):
        self.cluster = support.Cluster(servers=RANKS + 1)
        flags = [f for k, v in ENVIRONMENT.items() for f in ("--env", f"{k}={v}")]
        self.folder = self.cluster.folder / "steps-torch"
        self.generation = 0
        arguments = program_arguments("text_trainer.py", "--ddp", "--no-norm", "--steps", steps, "--pace", pace, "--log", self.folder)
        self.training = self.cluster.train("torch", servers=RANKS, flags=flags, program=sys.executable, arguments=arguments)

    def ready(self):
        self.training.wait_standby(120)

    def pids(self):
        return self.training.pids()

    def completed(self, pids, after):
        """rank -> (when it first completed a step of a newer generation after ``after``, whether by the same process)"""
        result = {}
        for name, lines in lines_of(self.folder).items():
            for _, size, generation, rank, t in lines:
                if t > after and size == RANKS and generation > self.generation and (rank not in result or t < result[rank][0]):
                    result[int(rank)] = (t, pids.get(rank) == int(name[6:]))
        return result

    def before_kill(self):
        self.generation = max((line[2] for lines in lines_of(self.folder).values() for line in lines), default=0)

    def close(self):
        self.cluster.close()


class Script:
    """The unchanged script; what starts it differs."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))

    def ready(self):
        start = now()
        wait_until(lambda: len(self.completed({}, start)) == RANKS, 120, "all ranks step")

    def before_kill(self):
        """Processes tell generations apart."""

    def pids(self):
        return {int(name[6:]): int(lines[-1][2]) for name, lines in lines_of(self.folder).items() if lines}

    def completed(self, pids, after):
        result = {}
        for name, lines in lines_of(self.folder).items():
            rank = int(name[6:])
            # The old generation may complete one more step before it ends: only new processes count.
            later = [t for _, _, pid, t in lines if t > after and int(pid) != pids.get(rank)]
            if later:
                result[rank] = (min(later), False)
        return result


class Unchanged(Script):
    def __init__(self, pace, steps):
        super().__init__()
        self.cluster = support.Cluster(servers=RANKS)
        environment = {**self.cluster.environment, **ENVIRONMENT, "EVERSTEP_COMMAND": str(support.BIN / "everstep")}
        self.run = subprocess.Popen([sys.executable, "-m", "everstep.run", "--nnodes", str(RANKS), "--max-restarts", "1000", "--dir",
                                     self.cluster.directory, PROGRAMS / "unchanged.py", self.folder, str(steps), str(pace / 1000)],
                                    env=environment, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self):
        self.run.kill()
        self.run.wait()
        self.cluster.close()


class Torchrun(Script):
    def __init__(self, pace, steps):
        super().__init__()
        environment = {**os.environ, **ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.run = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                                     "--max-restarts", "1000", "--monitor-interval", "0.1", PROGRAMS / "unchanged.py", self.folder,
                                     str(steps), str(pace / 1000)], env=environment, cwd=self.folder, stdout=subprocess.DEVNULL,
                                    stderr=open(self.folder / "err", "wb"), start_new_session=True)

    def close(self):
        os.killpg(self.run.pid, signal.SIGTERM)
        try:
            self.run.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.run.pid, signal.SIGKILL)
            self.run.wait()
        for pid in self.pids().values():
            if support.alive(pid):
                os.kill(pid, signal.SIGKILL)


SYSTEMS = {"in-process": InProcess, "unchanged": Unchanged, "torchrun": Torchrun}


def percentile(values, p):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))]


def measure(name, kills, pace):
    system = SYSTEMS[name](pace, 10**6)
    survivors, width, hangs = [], [], 0
    rng = random.Random(1)
    try:
        system.ready()
        start = now()
        wait_until(lambda: len(system.completed({}, start)) == RANKS, 60, "steps")
        for k in range(kills):
            system.ready()
            pids = system.pids()
            system.before_kill()
            os.kill(pids[rng.randrange(RANKS)], signal.SIGKILL)
            killed = now()
            try:
                wait_until(lambda: len(system.completed(pids, killed)) == RANKS, 60, "full width")
            except support.Timeout:
                hangs += 1
                break
            done = system.completed(pids, killed)
            kept = [t for t, same in done.values() if same]
            survivors.append((min(kept) if kept else min(t for t, _ in done.values())) - killed)
            width.append(max(t for t, _ in done.values()) - killed)
            print(f"{name} kill {k + 1}: survivor {survivors[-1]:.3f} s, all {width[-1]:.3f} s", file=sys.stderr, flush=True)
    finally:
        system.close()
    return {"system": name, "kills": len(width), "hangs": hangs, "pace_ms": pace,
            "next_step_s": {"p50": statistics.median(survivors), "p99": percentile(survivors, 99), "max": max(survivors)},
            "full_width_s": {"p50": statistics.median(width), "p99": percentile(width, 99), "max": max(width)}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--systems", default="in-process,unchanged,torchrun")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pace", type=float, default=20, help="fewest milliseconds of a step")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    results = [measure(name, arguments.kills, arguments.pace) for name in arguments.systems.split(",")]
    print(f"{'system':<12}{'kills':>6}{'hangs':>6}{'next p50':>10}{'next p99':>10}{'all p50':>10}{'all p99':>10}{'all max':>10}  (seconds)")
    for r in results:
        print(f"{r['system']:<12}{r['kills']:>6}{r['hangs']:>6}{r['next_step_s']['p50']:>10.3f}{r['next_step_s']['p99']:>10.3f}"
              f"{r['full_width_s']['p50']:>10.3f}{r['full_width_s']['p99']:>10.3f}{r['full_width_s']['max']:>10.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
