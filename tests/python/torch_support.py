"""What the tests of the Python package share: the interpreter with torch, programs as jobs of a local cluster, and what
their logs say. A test file ends with main(), which skips everything with a printed reason where there is no torch."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "worker" / "python")]

import cluster as support  # noqa: E402
from cluster import EndToEndTest, newest_step, wait_until  # noqa: E402

SKIPPED = 77
LIBRARY = os.environ.get("EVERSTEP_LIBRARY", str(support.BIN.parent / "lib" / "libeverstep.so"))
PROGRAMS = Path(__file__).resolve().parent / "programs"
ENVIRONMENT = {
    "EVERSTEP_LIBRARY": LIBRARY, "PYTHONPATH": str(ROOT / "worker" / "python"), "PYTHONDONTWRITEBYTECODE": "1",
    # Many threads on few cores make each step slow, and results depend on their number.
    "OMP_NUM_THREADS": "1",
}


def missing():
    """Why the tests can't run here, or an empty string."""
    try:
        import torch  # noqa: F401
        import numpy  # noqa: F401
    except ImportError as e:
        return f"{sys.executable} has no torch ({e}); see docs/pytorch.md, 'Running the tests'"
    if not Path(LIBRARY).exists():
        return f"there is no library at {LIBRARY}"
    return ""


def main():
    reason = missing()
    if reason:
        print(f"SKIPPED: {reason}")
        sys.exit(SKIPPED)
    os.environ.update(ENVIRONMENT)
    unittest.main(verbosity=2)


def program_arguments(name, *arguments):
    return [str(PROGRAMS / name), *map(str, arguments)]


def run_alone(name, *arguments, environment=None, timeout=120):
    """One process without a cluster."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
    return subprocess.run([sys.executable, *program_arguments(name, *arguments)], capture_output=True, text=True,
                          env={**variables, **ENVIRONMENT, **(environment or {})}, timeout=timeout * support.SCALE)


class TorchTest(EndToEndTest):
    """Starts Python programs on a cluster. Each process of them writes to the folder that --log names."""

    def start(self, *arguments, servers=5, wanted=4, flags=(), name="torch", program="text_trainer.py", cluster=None,
              policy=None, log=True, environment=None):
        cluster = cluster or self.cluster(servers=servers, policy=policy)
        flags = list(flags)
        for key, value in {**ENVIRONMENT, **(environment or {})}.items():
            flags += ["--env", f"{key}={value}"]
        logs = cluster.folder / f"steps-{name}"
        training = cluster.train(name, servers=wanted, flags=flags, program=sys.executable,
                                 arguments=program_arguments(program, *arguments, *(["--log", logs] if log else [])))
        return cluster, training

    def digest(self, training, seconds=240):
        """Of the state at the end of a job that ended well."""
        code = training.wait_end(seconds)
        self.assertEqual(code, 0, training.detail())
        return training.digest()

    def undisturbed(self, *arguments, **options):
        """The digest of the same job when nothing happens to it."""
        cluster, training = self.start(*arguments, name="undisturbed", servers=options.pop("servers", 4), **options)
        digest = self.digest(training)
        cluster.close()
        return digest

    def samples_read(self, training):
        """step -> samples, as read for the generation that applied the step."""
        applied = {}
        for event in training.log_events():
            if event.kind == "applied":
                applied.setdefault(event.step, set()).add(event.generation)
        read = {}
        for path in training.step_logs.glob("samples-*.log"):
            # Exact reduction may do a step again in its generation, with the same samples: lines of one process count once.
            for line in dict.fromkeys(path.read_text().split("\n")[:-1]):
                step, generation, *which = map(int, line.split())
                read.setdefault((step, generation), []).extend(which)
        chosen = {}
        for step, generations in applied.items():
            self.assertEqual(len(generations), 1, f"step {step} was applied in generations {generations}")
            chosen[step] = read[(step, generations.pop())]
        return chosen


def now():
    return time.clock_gettime(time.CLOCK_MONOTONIC)


__all__ = ["ENVIRONMENT", "LIBRARY", "PROGRAMS", "ROOT", "TorchTest", "main", "newest_step", "now", "run_alone",
           "program_arguments", "shutil", "subprocess", "support", "tempfile", "wait_until"]
