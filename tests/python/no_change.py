#!/usr/bin/env python3
"""Scripts that know nothing of Everstep: torchrun's environment and command line, and warm processes after a failure."""

import os
import re
import signal
import subprocess
import sys
import unittest
from pathlib import Path

from torch_support import ENVIRONMENT, PROGRAMS, TorchTest, main, support, wait_until


class CommandLine(unittest.TestCase):
    def command(self, *argv):
        os.environ["EVERSTEP_COMMAND"] = "/bin/everstep"
        from everstep.run import command
        return " ".join(command(argv))

    def test_torchrun_flags_become_those_of_everstep_run(self):
        script = str(PROGRAMS / "unchanged.py")
        line = self.command("--nnodes=2:4", "--nproc_per_node", "2", "--max-restarts", "10", "--rdzv-backend", "c10d", "--rdzv_id",
                            "x7", "--rdzv-endpoint", "host:29500", "--standalone", "--master_port=1", script, "--lr", "0.1", "-m")
        self.assertIn("/bin/everstep run --nnodes 2:4 --nproc-per-node 2 --max-restarts 10 ", line)
        self.assertIn("--name x7 ", line)
        self.assertIn("--env TORCHELASTIC_RUN_ID=x7", line)
        self.assertTrue(line.endswith(f"--opaque -- {sys.executable} -m everstep.launch {script} --lr 0.1 -m"), line)

    def test_modules_programs_and_scripts_that_join(self):
        self.assertTrue(self.command("-m", "json.tool", "x").endswith("--opaque -- " + sys.executable + " -m everstep.launch --module json.tool x"))
        self.assertTrue(self.command("--no-python", "/bin/true", "x").endswith("--opaque -- /bin/true x"))
        joins = self.command(str(PROGRAMS / "text_trainer.py"), "--steps", "3")
        self.assertNotIn("--opaque", joins)
        self.assertTrue(joins.endswith(f"-- {sys.executable} {PROGRAMS / 'text_trainer.py'} --steps 3"), joins)

    def test_nonsense_is_refused_in_a_sentence(self):
        for argv, message in ((("/nowhere/x.py",), "there is no script at /nowhere/x.py"),
                              (("--nproc-per-node", "many", __file__), "'many' is no number"),
                              (("--redirects", "3", __file__), "need --log-dir"), (("--tee", "9", __file__), "take 0 to 3")):
            with self.assertRaisesRegex(SystemExit, message):
                self.command(*argv)

    def test_imports_are_read_without_running_the_script(self):
        from everstep.template import imports_of
        self.assertEqual(imports_of(str(PROGRAMS / "unchanged.py"))[:5], ["os", "sys", "threading", "time", "torch"])


class Unchanged(TorchTest):
    def launch(self, cluster, *argv, name="unchanged", folder=None):
        folder = folder or cluster.folder / name
        folder.mkdir(exist_ok=True)
        environment = {**cluster.environment, **ENVIRONMENT, "EVERSTEP_COMMAND": str(support.BIN / "everstep")}
        out, err = open(folder / "out", "wb"), open(folder / "err", "wb")
        self.addCleanup(out.close)
        self.addCleanup(err.close)
        run = subprocess.Popen([sys.executable, "-m", "everstep.run", "--dir", cluster.directory, "--name", name, *map(str, argv)],
                               env=environment, stdout=out, stderr=err, cwd=folder)
        self.addCleanup(lambda: (run.kill(), run.wait()))
        return run, folder

    def steps(self, folder):
        """rank -> [(step, world size, pid, time)]"""
        return {int(path.stem[6:]): [tuple(map(float, line.split())) for line in path.read_text().split("\n")[:-1]]
                for path in Path(folder).glob("times-*.log")}

    def end(self, cluster, run, folder, seconds=120):
        wait_until(lambda: run.poll() is not None, seconds, "the job ends", lambda: (folder / "err").read_text()[-3000:] + cluster.logs())
        return run.returncode

    def test_killed_rank_restarts_all_from_warm_processes(self):
        cluster = self.cluster(servers=4)
        script = PROGRAMS / "unchanged.py"
        run, folder = self.launch(cluster, "--nnodes", 4, script, ".", 150)
        wait_until(lambda: len(self.steps(folder)) == 4 and all(len(s) > 10 for s in self.steps(folder).values()), 90, "ten steps",
                   lambda: (folder / "err").read_text())
        before = {rank: int(s[-1][2]) for rank, s in self.steps(folder).items()}
        os.kill(before[2], signal.SIGKILL)
        self.assertEqual(self.end(cluster, run, folder), 0, (folder / "err").read_text())
        after = {rank: int(s[-1][2]) for rank, s in self.steps(folder).items()}
        self.assertTrue(all(after[rank] != before[rank] for rank in before), "a process of the old generation went on")
        self.assertTrue(all(s[-1][0] == 150 for s in self.steps(folder).values()))
        environment = dict(line.split("=", 1) for line in (folder / "environment-1").read_text().splitlines())
        self.assertEqual({k: environment[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                                                     "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")},
                         {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
                          "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "unchanged"})
        # It resumed from its own checkpoint. A DDP that is built anew sums in other buckets for a while: nearly the same.
        again, other = self.launch(cluster, "--nnodes", 4, script, ".", 150, 0, name="undisturbed")
        self.assertEqual(self.end(cluster, again, other), 0)
        results = [(f / "out").read_text().splitlines()[-1].split() for f in (folder, other)]
        self.assertEqual(results[0][:2], ["finished", "150"])
        self.assertAlmostEqual(float(results[0][2]) / float(results[1][2]), 1, delta=1e-6)
        # A launcher that is killed takes its rank with it, and nothing stays behind.
        left = [p for p in before.values() if support.alive(p)]
        self.assertEqual(left, [])

    def test_failing_script_tells_what_it_recorded(self):
        cluster = self.cluster(servers=2)
        run, folder = self.launch(cluster, "--nnodes", 2, "--max-restarts", 0, PROGRAMS / "unchanged.py", ".", 50, 0.01, 7)
        self.assertEqual(self.end(cluster, run, folder), 1)
        said = (folder / "err").read_text()
        self.assertTrue(re.search("everstep: rank 1 failed: .*step 7 has bad data", said), said)

    def test_two_ranks_per_server_with_tee_and_redirects(self):
        cluster = self.cluster(servers=1, devices=2)
        logs = cluster.folder / "log"
        run, folder = self.launch(cluster, "--nproc-per-node", 2, "--log-dir", logs, "--tee", 1, "--redirects", 2,
                                  PROGRAMS / "unchanged.py", ".", 5, 0.01)
        self.assertEqual(self.end(cluster, run, folder), 0, (folder / "err").read_text())
        self.assertIn("finished 5", (folder / "out").read_text())
        self.assertIn("finished 5", (logs / "attempt_0" / "0" / "stdout.log").read_text())
        self.assertTrue((logs / "attempt_0" / "1" / "stderr.log").exists())

    def test_everstep_run_takes_a_script(self):
        cluster = self.cluster(servers=2)
        folder = cluster.folder / "script"
        folder.mkdir()
        environment = {**cluster.environment, **ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run([support.BIN / "everstep", "run", "--dir", cluster.directory, "--nnodes", "2", PROGRAMS / "unchanged.py",
                               ".", "5", "0.01"], env=environment, cwd=folder, capture_output=True, text=True, timeout=120 * support.SCALE)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("finished 5", done.stdout)


if __name__ == "__main__":
    main()
