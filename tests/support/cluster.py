"""Drives a local cluster of real processes for end-to-end tests, and checks what the protocol promises.

A Cluster is a controller and agents started by `everstep local up` in a directory of its own. A Training is one job on
it, run by `everstep run` in the background, with the step logs of all its ranks in a folder that no server owns, so that
they outlive every server. Waiting is always for a condition, with a deadline. Only the standard library is used.

Environment: EVERSTEP_BIN is the folder of the binaries; EVERSTEP_E2E_CACHE keeps digests of uninterrupted runs.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest
from collections import defaultdict
from pathlib import Path

BIN = Path(os.environ.get("EVERSTEP_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
CACHE = Path(os.environ.get("EVERSTEP_E2E_CACHE", BIN.parent / "e2e-cache"))
# Sanitizers slow everything down; deadlines scale with them.
SCALE = float(os.environ.get("EVERSTEP_E2E_SCALE", "1"))
POLL_SECONDS = 0.02
TRAIN = str(BIN / "everstep-train")

_never = threading.Event()


class Timeout(AssertionError):
    """A condition did not come true before its deadline."""


def wait_until(condition, seconds, what, detail=None):
    """Looks at condition() until it is true and returns what it returned; raises Timeout with `what` otherwise."""
    deadline = time.monotonic() + seconds * SCALE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            extra = f"; {detail()}" if detail else ""
            raise Timeout(f"not within {seconds * SCALE:.0f} s: {what}{extra}")
        _never.wait(POLL_SECONDS)


def alive(pid):
    """True while the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


# ---- step logs

class StepEvent:
    __slots__ = ("kind", "step", "generation", "pid", "loss", "process")

    def __init__(self, kind, step, generation, pid, loss, process):
        self.kind, self.step, self.generation = kind, step, generation
        self.pid, self.loss, self.process = pid, loss, process

    def __repr__(self):
        return f"{self.process}: {self.kind} step {self.step} generation {self.generation} pid {self.pid}"


LINE = re.compile(r"^(\S+) step (\d+) generation (\d+) pid (\d+) loss (\S+)$")
DONE = ("applied", "rolled-forward")


def read_step_logs(folder):
    """Every event of every process, in each process's own order."""
    events = []
    for path in sorted(Path(folder).glob("steps-*.log")):
        for line in path.read_text().split("\n")[:-1]:  # a line without its end was cut off by a kill
            match = LINE.match(line)
            if match is None:
                raise AssertionError(f"{path.name}: not a step log line: {line!r}")
            kind, step, generation, pid, loss = match.groups()
            events.append(StepEvent(kind, int(step), int(generation), int(pid), loss, path.stem))
    return events


def newest_step(folder):
    return max((event.step for event in read_step_logs(folder) if event.kind in DONE), default=0)


class Cluster:
    """A controller and servers as processes of their own, in a directory that is removed at the end."""

    def __init__(self, servers=5, devices=1, policy=None, agent_arguments=(), fail_disk=None):
        self.folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="everstep-e2e-")))
        self.directory = self.folder / "cluster"
        self.environment = dict(os.environ, HOME=str(self.folder), EVERSTEP_HOME=str(self.folder / "home"))
        self.environment.pop("EVERSTEP_CONTROLLER", None)
        self._switch = self.folder / "disk-fails"
        if fail_disk is not None:  # a folder below the cluster's whose disk can be made to fail
            self.environment.update(LD_PRELOAD=str(BIN.parent / "lib" / "libeverstep_fail_disk.so"),
                                    EVERSTEP_FAIL_DISK_SWITCH=str(self._switch),
                                    EVERSTEP_FAIL_DISK_PREFIX=str(self.directory / fail_disk))
        self._trainings = []
        arguments = ["local", "up", "--servers", str(servers), "--devices", str(devices),
                     "--ready-timeout", f"{60 * SCALE:.0f}s"]
        for name, value in (policy or {}).items():
            arguments += ["--policy", f"{name}={value}"]
        for argument in agent_arguments:
            arguments += [f"--agent-argument={argument}"]
        try:
            self.everstep(*arguments, timeout=120)
        except BaseException:
            self.close()
            raise

    # -- the command line

    def everstep(self, *arguments, check=True, timeout=60):
        command = [str(BIN / "everstep"), *map(str, arguments), "--dir", str(self.directory)]
        if "--" in arguments:  # flags go before the program
            where = command.index("--")
            command = command[:where] + ["--dir", str(self.directory)] + command[where:-2]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout * SCALE,
                              cwd=self.folder)
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}{self.logs()}")
        return done

    def json(self, *arguments):
        return json.loads(self.everstep(*arguments, "-o", "json").stdout)

    def try_json(self, *arguments):
        """None while the controller does not answer."""
        done = self.everstep(*arguments, "-o", "json", "--timeout", f"{5 * SCALE:.0f}s", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    # -- what is there

    def servers(self):
        return {server["name"]: server for server in self.json("get", "servers").get("servers", [])}

    def server_state(self, name):
        listed = self.try_json("get", "servers") or {}
        for server in listed.get("servers", []):
            if server["name"] == name:
                return server["status"]["state"].removeprefix("SERVER_STATE_")
        return None

    def recoveries(self, job=None, failures_only=True):
        """Of one job, oldest first; the start of a job is not counted."""
        listed = self.json("get", "recoveries", *(["--job", job] if job else [])).get("recoveries", [])
        return [r for r in listed if not failures_only or int(r["generationFrom"]) > 0]

    def events(self, *arguments):
        return self.json("get", "events", *arguments).get("events", [])

    def local(self):
        return json.loads((self.directory / "cluster.json").read_text())

    def pid_of(self, name):
        state = self.local()
        if name == "controller":
            return state["controller"]["pid"]
        return next(s["pid"] for s in state["servers"] if s["name"] == name)

    def root_of(self, name):
        return Path(next(s["root"] for s in self.local()["servers"] if s["name"] == name))

    def metrics(self):
        import urllib.request
        with urllib.request.urlopen(f"http://{self.local()['opsAddress']}/metrics", timeout=5) as response:
            return response.read().decode()

    def logs(self, lines=15):
        text = ""
        for path in sorted((self.directory / "logs").glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            text += f"\n--- {path.name}\n" + "\n".join(tail)
        return text

    # -- faults

    def kill(self, *names):
        """All at one instant."""
        self.everstep("local", "kill", *names)

    def pause(self, *names):
        self.everstep("local", "pause", *names)

    def resume(self, *names):
        self.everstep("local", "resume", *names)

    def restart(self, name):
        self.everstep("local", "restart", name)

    def add(self):
        return self.everstep("local", "add").stdout.split()[0].removeprefix("server/")

    def disk_fails(self, error="ENOSPC"):
        self._switch.with_suffix(".new").write_text(error + "\n")
        self._switch.with_suffix(".new").rename(self._switch)

    def disk_stalls(self, where="SYNC"):
        """From now on the first sync (or WRITE) never returns; see wait_stalled."""
        self._held().unlink(missing_ok=True)
        self.disk_fails(f"STALL_{where}")

    def wait_stalled(self, seconds=30):
        """Until some process waits in that call: what it was about to make durable is not."""
        wait_until(self._held().exists, seconds, "a sync or write is held", self.logs)

    def _held(self):
        return self._switch.with_name(self._switch.name + ".held")

    def disk_works(self):
        self._switch.unlink(missing_ok=True)

    def log_of(self, name):
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    # -- jobs

    def train(self, name="train", **options):
        training = Training(self, name, **options)
        self._trainings.append(training)
        return training

    def close(self):
        for training in self._trainings:
            training.close()
        if self.directory.exists():
            self.everstep("local", "down", check=False)
        if os.environ.get("EVERSTEP_E2E_KEEP"):
            print(f"kept: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def train_arguments(steps, size="tiny", extra=()):
    """The example trainer's own flags: what decides the weights, and nothing else."""
    return ["--size", size, "--steps", str(steps), "--seed", "7", *extra]


class Training:
    """One job of the example trainer, followed by `everstep run` in the background."""

    def __init__(self, cluster, name, steps=150, servers=4, size="tiny", pace=20, flags=(), extra=(), program=None,
                 arguments=None):
        self.cluster, self.name, self.steps = cluster, name, steps
        self.size, self.extra, self.servers_wanted = size, tuple(extra), servers
        self.step_logs = cluster.folder / f"steps-{name}"
        self.step_logs.mkdir()
        self.output = cluster.folder / f"{name}.out"
        self.notes = cluster.folder / f"{name}.err"
        if arguments is None:
            arguments = [*train_arguments(steps, size, extra), "--step-log", str(self.step_logs), "--pace", pace]
        command = [str(BIN / "everstep"), "run", "--dir", str(cluster.directory), "--name", name, "--servers", str(servers),
                   *map(str, flags), "--", program or TRAIN, *map(str, arguments)]
        self._files = (open(self.output, "wb"), open(self.notes, "wb"))
        self.run = subprocess.Popen(command, env=cluster.environment, stdout=self._files[0], stderr=self._files[1],
                                    cwd=cluster.folder)

    def close(self):
        if self.run.poll() is None:
            self.run.kill()
        self.run.wait()
        for file in self._files:
            file.close()

    # -- its state

    def job(self):
        return self.cluster.try_json("describe", "job", self.name)

    def status(self):
        job = self.job()
        return job["status"] if job else {}

    def state(self):
        return self.status().get("state", "").removeprefix("JOB_STATE_")

    def ranks(self):
        """rank -> place, of the ranks that have one now (standbys left out)."""
        return {place["rank"]: place for place in self.status().get("ranks", []) if place["rank"] >= 0}

    def standbys(self):
        return [place for place in self.status().get("ranks", []) if place["rank"] < 0]

    def pids(self):
        return {rank: int(place["pid"]) for rank, place in self.ranks().items()}

    def server_of(self, rank):
        return self.ranks()[rank]["server"]

    def step(self):
        return newest_step(self.step_logs)

    def recovered_from_store(self):
        return any("stored" in rank.get("from", "") for r in self.cluster.recoveries(self.name) for rank in r.get("ranks", []))

    def detail(self):
        err = self.notes.read_text(errors="replace")[-1500:]
        return (f"job {self.name} is {self.state() or 'unknown'} at step {self.step()}; run said:\n{err}"
                f"{self.cluster.logs()}")

    # -- waiting

    def wait_step(self, step, seconds=60):
        def reached():
            if self.run.poll() is not None and self.step() < step:
                raise AssertionError(f"{self.name} ended with {self.run.returncode} before step {step}: {self.detail()}")
            return self.step() >= step
        wait_until(reached, seconds, f"{self.name} reaches step {step}", self.detail)

    def wait_state(self, state, seconds=60):
        wait_until(lambda: self.state() == state, seconds, f"{self.name} is {state}", self.detail)

    def running(self):
        """Running, and every rank's process is known (a controller that just returned has yet to hear of them)."""
        status = self.status()
        places = [place for place in status.get("ranks", []) if place["rank"] >= 0]
        return status.get("state") == "JOB_STATE_RUNNING" and bool(places) and all(int(p["pid"]) > 0 for p in places)

    def wait_standby(self, seconds=60):
        wait_until(lambda: any(place.get("readyStandby") for place in self.standbys()), seconds,
                   f"{self.name} has a warm standby", self.detail)

    def wait_recovered(self, count=1, seconds=60):
        """Until `count` recoveries from failures ended in a running job; returns them."""
        def ended():
            done = [r for r in self.cluster.recoveries(self.name) if r.get("outcome")]
            return done if len(done) >= count else None
        return wait_until(ended, seconds, f"{self.name} has recovered {count} time(s)", self.detail)

    def wait_end(self, seconds=120):
        """Its exit code."""
        wait_until(lambda: self.run.poll() is not None, seconds, f"{self.name} ends", self.detail)
        return self.run.returncode

    # -- results

    def lines(self):
        return self.output.read_text(errors="replace").splitlines()

    def digest(self):
        return digest_in(self.lines())

    def log_events(self):
        return read_step_logs(self.step_logs)


def digest_in(lines):
    found = [line.split()[2] for line in lines if re.match(r"^final digest \S+$", line)]
    if len(found) != 1:
        raise AssertionError("expected one digest line in:\n" + "\n".join(lines[-20:]))
    return found[0]


def reference_digest(steps, size="tiny", extra=()):
    """Digest of the weights after an uninterrupted run of one process; computed once per configuration and binary."""
    arguments = [TRAIN, *train_arguments(steps, size, extra)]
    info = os.stat(TRAIN)
    key = hashlib.sha256(json.dumps([arguments, info.st_mtime_ns, info.st_size]).encode()).hexdigest()[:24]
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / key
    with open(CACHE / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600 * SCALE)
            if done.returncode != 0:
                raise AssertionError(f"reference run failed: {done.stdout[-500:]}{done.stderr[-500:]}")
            path.write_text(digest_in(done.stdout.splitlines()))
        return path.read_text()


class EndToEndTest(unittest.TestCase):
    """What every case asserts. Equal digests alone prove nothing: a full restart has them too."""

    def cluster(self, **options):
        cluster = Cluster(**options)
        self.addCleanup(cluster.close)
        return cluster

    def finish(self, training, seconds=180):
        """The job ends well, with the weights of an uninterrupted run."""
        code = training.wait_end(seconds)
        self.assertEqual(code, 0, training.detail())
        self.assertEqual(training.digest(), reference_digest(training.steps, training.size, training.extra),
                         "the weights differ from those of an uninterrupted run: " + training.detail())
        self.assert_every_step_once(training)

    def assert_every_step_once(self, training):
        """Each process applied each step at most once, in order without holes, and together they reached the end."""
        per_process = defaultdict(list)
        for event in training.log_events():
            if event.kind in DONE:
                per_process[event.process].append(event.step)
        self.assertEqual(max((steps[-1] for steps in per_process.values() if steps), default=0), training.steps)
        for process, steps in per_process.items():
            self.assertEqual(steps, list(range(steps[0], steps[0] + len(steps))), f"{process} applied {steps}")

    def assert_no_committed_step_again(self, training):
        """No step was computed in a generation after an earlier one had applied it, by anybody, the dead included."""
        events = training.log_events()
        first_applied = {}
        for event in events:
            if event.kind in DONE:
                known = first_applied.get(event.step)
                if known is None or event.generation < known.generation:
                    first_applied[event.step] = event
        for event in events:
            if event.kind == "computed" and event.step in first_applied:
                applied = first_applied[event.step]
                self.assertLessEqual(event.generation, applied.generation, f"{event} although {applied}")

    def assert_pids_kept(self, before, after, lost=()):
        """Ranks that were not lost are the same processes, and alive."""
        self.assertEqual(sorted(before), sorted(after), "the ranks themselves changed")
        for rank, pid in before.items():
            if rank in lost:
                self.assertNotEqual(after[rank], pid, f"rank {rank} was lost, yet has its old pid")
            else:
                self.assertEqual(after[rank], pid, f"rank {rank} survived, yet its process was replaced")

    def assert_recovery(self, recovery, replaced, steps_lost=0):
        """The timeline is whole, nothing was lost, and each rank's state came from where it should."""
        self.assertEqual(int(recovery.get("stepsLost", 0)), steps_lost, recovery)
        phases = [timing["phase"].removeprefix("RECOVERY_PHASE_").lower() for timing in recovery["phases"]]
        for phase in ("detect", "decide", "fence", "collect", "plan", "assign", "restore", "connect", "resume"):
            self.assertIn(phase, phases, f"the timeline lacks {phase}: {phases}")
        for phase in ("detect", "decide"):  # from the first evidence, and until the decision is on disk: never for free
            lasted = sum(float(timing["duration"].removesuffix("s")) for timing in recovery["phases"]
                         if timing["phase"] == f"RECOVERY_PHASE_{phase.upper()}")
            self.assertGreater(lasted, 0, f"the timeline says that {phase} took no time")
        self.assertTrue(recovery["evidence"], "a recovery without evidence")
        self.assertTrue(recovery["decisionMessage"], "a decision without a message")
        for rank in recovery["ranks"]:
            came_from = rank["from"]
            if rank["rank"] in replaced:
                self.assertFalse(rank.get("keptProcess"), rank)
                # From the memory of a live replica: the nearest copy there is.
                self.assertRegex(came_from, r"^rank \d+$", rank)
                self.assertNotIn(int(came_from.split()[1]), replaced, rank)
            else:
                self.assertTrue(rank.get("keptProcess"), rank)
                self.assertIn(came_from, ("kept", "rolled-forward"), rank)


def kill_process(pid):
    os.kill(pid, signal.SIGKILL)
