#!/usr/bin/env python3
"""How long a loss interrupts training: from SIGKILL to the first step that every rank completed in the new generation.

    PYTHONPATH=tests/support EVERSTEP_BIN=build/bin tests/bench/recovery_bench.py [--kills 30] [--size base] [--json FILE]

Three losses, with a warm standby ready: a rank, a whole server, and a server that falls silent (stopped). One step is
measured in the same run, undisturbed, because the interrupted one is computed again: p50 <= 100 ms plus one step is the
aim for a rank, half a second more for a server, the lease more for a silent one.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
import cluster as support  # noqa: E402

DONE = ("applied", "rolled-forward")


class Tail:
    """Follows the step logs of a folder from where they are."""

    def __init__(self, folder):
        self.folder, self.offsets, self.rest = Path(folder), {}, {}
        self.poll()

    def poll(self):
        events = []
        for path in self.folder.glob("steps-*.log"):
            with open(path, "rb") as file:
                file.seek(self.offsets.get(path, 0))
                data = self.rest.get(path, b"") + file.read()
                self.offsets[path] = file.tell()
            lines = data.split(b"\n")
            self.rest[path] = lines.pop()
            for line in lines:
                words = line.split()
                if len(words) >= 8 and words[0].decode() in DONE:
                    events.append((path.name, int(words[2]), int(words[4])))
        return events


def first_step_of_all(tail, generation, world, deadline):
    """The instant at which `world` processes have completed a step in a generation above `generation`."""
    seen = set()
    while time.monotonic() < deadline:
        for process, _, g in tail.poll():
            if g > generation:
                seen.add(process)
        if len(seen) >= world:
            return time.monotonic()
        time.sleep(0.0005)  # the resolution of this measurement
    raise SystemExit("recovery_bench: no step of a new generation within the deadline")


def median_step(tail, seconds):
    """Median interval between steps of one process, undisturbed."""
    times, end = {}, time.monotonic() + seconds
    while time.monotonic() < end:
        for process, _, _ in tail.poll():
            times.setdefault(process, []).append(time.monotonic())
        time.sleep(0.0005)
    gaps = [b - a for series in times.values() for a, b in zip(series, series[1:])]
    return statistics.median(gaps) if gaps else float("nan")


def generation_of(training):
    return int(training.status()["generation"])


def strike(c, training, kind, count):
    victim_rank = 1 + count % 3
    place = training.ranks()[victim_rank]
    if kind == "rank":
        at = time.monotonic()
        os.kill(int(place["pid"]), 9)
    elif kind == "server":
        local = c.pid_of(place["server"])
        at = time.monotonic()
        os.kill(int(place["pid"]), 9)
        os.kill(local, 9)
    else:
        at = time.monotonic()
        c.pause(place["server"])
    return at, place["server"]


def percentile(values, p):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(round(p / 100 * (len(ordered) - 1))))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--size", default="base")
    parser.add_argument("--kinds", default="rank,server,silent")
    parser.add_argument("--json", help="write the figures to this file, too")
    options = parser.parse_args()
    rows = []
    with support.Cluster(servers=6) as c:
        training = c.train(steps=1_000_000, servers=4, size=options.size, pace=0)
        training.wait_step(3, 120)
        for kind in options.kinds.split(","):
            gaps, phases = [], {}
            tail = Tail(training.step_logs)
            step = median_step(tail, 8 if options.size == "base" else 3)
            for count in range(options.kills):
                training.wait_standby(120)
                before = generation_of(training)
                tail.poll()
                at, server = strike(c, training, kind, count)
                gaps.append(first_step_of_all(tail, before, 4, at + 60) - at)
                training.wait_state("RUNNING")
                newest = c.recoveries("train")[-1]
                for phase in newest.get("phases", []):
                    phases.setdefault(phase["phase"].removeprefix("RECOVERY_PHASE_").lower(), []).append(
                        float(phase["duration"].rstrip("s")) * 1000)
                if kind == "server":
                    c.kill(server)
                    c.restart(server)
                elif kind == "silent":
                    c.resume(server)
            rows.append({"loss": kind, "kills": len(gaps), "step_ms": 1000 * step,
                         "p50_ms": 1000 * statistics.median(gaps), "p99_ms": 1000 * percentile(gaps, 99),
                         "max_ms": 1000 * max(gaps), "p50_without_step_ms": 1000 * (statistics.median(gaps) - step),
                         "phases_p50_ms": {k: round(statistics.median(v), 1) for k, v in phases.items()}})
            r = rows[-1]
            print(f"{kind:7} kills {r['kills']:3}  step {r['step_ms']:7.1f} ms  to first step of all: p50 {r['p50_ms']:7.1f}"
                  f"  p99 {r['p99_ms']:7.1f}  max {r['max_ms']:7.1f}  (p50 less one step {r['p50_without_step_ms']:7.1f})")
            print("        phases p50, ms: " + "  ".join(f"{k} {v}" for k, v in r["phases_p50_ms"].items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"size": options.size, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
