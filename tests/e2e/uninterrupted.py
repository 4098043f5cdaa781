#!/usr/bin/env python3
"""Nothing fails: a job from start to end, the command line on the way, a temporary cluster, opaque jobs."""

import json
import os
import subprocess
import tempfile
import unittest

import cluster as support
from cluster import BIN, EndToEndTest, reference_digest, train_arguments, wait_until


class Uninterrupted(EndToEndTest):
    def test_four_servers_reach_the_weights_of_one_process(self):
        cluster = self.cluster(servers=5)
        training = cluster.train(steps=60, pace=0)
        self.finish(training)
        self.assert_no_committed_step_again(training)
        self.assertEqual(cluster.recoveries("train"), [])
        steps = [line for line in training.lines() if line.startswith("step ")]
        self.assertEqual(len(steps), 60, "one line per step of rank 0")

    def test_several_ranks_per_server_and_uneven_shares(self):
        cluster = self.cluster(servers=3, devices=2)
        training = cluster.train(steps=60, servers=3, flags=("--ranks-per-server", "2"))
        training.wait_step(1)
        self.assertEqual(len(training.pids()), 6)
        self.finish(training)

    def test_pipeline_by_data_parallel(self):
        cluster = self.cluster(servers=4)
        training = cluster.train(steps=60, flags=("--pipeline-stages", "2"))
        training.wait_step(1)
        self.assertEqual({(p["dp"], p["pp"]) for p in training.ranks().values()}, {(0, 0), (0, 1), (1, 0), (1, 1)})
        self.finish(training)

    def test_two_jobs_at_once(self):
        cluster = self.cluster(servers=4)
        first = cluster.train("first", steps=60, servers=2)
        second = cluster.train("second", steps=60, servers=2)
        self.finish(first)
        self.finish(second)

    def test_run_without_a_controller_starts_a_temporary_cluster(self):
        with tempfile.TemporaryDirectory() as home:
            environment = dict(os.environ, HOME=home, EVERSTEP_HOME=home, TMPDIR=home)
            environment.pop("EVERSTEP_CONTROLLER", None)
            done = subprocess.run([BIN / "everstep", "run", "--servers", "2", "--", "everstep-train",
                                   *train_arguments(20)], env=environment, capture_output=True, text=True,
                                  timeout=120 * support.SCALE)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("starting a temporary local cluster of 3 servers (1 spare)", done.stderr)
            self.assertEqual(support.digest_in(done.stdout.splitlines()), reference_digest(20))
            self.assertEqual([name for name in os.listdir(home) if name.startswith("everstep-")], [],
                             "the temporary cluster leaves nothing behind")

    def test_interrupt_cancels_the_job(self):
        cluster = self.cluster(servers=2)
        training = cluster.train(steps=100000, servers=2)
        training.wait_step(3)
        pids = training.pids()
        training.run.send_signal(support.signal.SIGINT)
        self.assertEqual(training.wait_end(), 73)
        wait_until(lambda: not any(support.alive(pid) for pid in pids.values()), 15, "its ranks are gone", training.detail)
        self.assertEqual(training.state(), "CANCELLED")

    def test_opaque_job_runs_restarts_and_ends(self):
        cluster = self.cluster(servers=2)
        script = cluster.folder / "program.sh"
        script.write_text('#!/bin/sh\necho "attempt $TORCHELASTIC_RESTART_COUNT of rank $RANK of $WORLD_SIZE"\n'
                          f'if [ -e {cluster.folder}/go ]; then exit 0; fi\nexec sleep 600\n')
        script.chmod(0o755)
        training = cluster.train("opaque", servers=1, flags=("--opaque",), program=str(script), arguments=[])
        training.wait_state("RUNNING")
        (cluster.folder / "go").touch()
        pid = training.pids()[0]
        support.kill_process(pid)
        self.assertEqual(training.wait_end(), 0, training.detail())
        self.assertIn("of rank 0 of 1", training.output.read_text())

    def test_plain_sleep_is_a_job(self):
        cluster = self.cluster(servers=1)
        training = cluster.train("nap", servers=1, flags=("--opaque",), program="/bin/sleep", arguments=["1"])
        self.assertEqual(training.wait_end(), 0, training.detail())


class CommandLine(EndToEndTest):
    """What people and scripts see, on one small cluster."""

    def test_everything_that_can_be_asked(self):
        cluster = self.cluster(servers=3)
        training = cluster.train(steps=100000, servers=2)
        training.wait_step(3)
        table = cluster.everstep("get", "servers").stdout.splitlines()
        self.assertEqual(table[0].split(), ["NAME", "STATE", "DEVICES", "JOB", "RANKS", "INCARNATION", "REASON", "AGE"])
        self.assertEqual(len(table), 4)
        self.assertEqual(sorted(cluster.everstep("get", "servers", "-o", "name").stdout.split()),
                         ["server/s1", "server/s2", "server/s3"])
        self.assertIn("HEARTBEAT", cluster.everstep("get", "servers", "-o", "wide").stdout)
        jobs = cluster.everstep("get", "jobs").stdout.splitlines()
        self.assertEqual(jobs[1].split()[:2], ["train", "Running"])
        self.assertIn("Program:", cluster.everstep("describe", "job", "train").stdout)
        self.assertIn("Failure domain:", cluster.everstep("describe", "server", "s1").stdout)
        self.assertIn("server/s1", cluster.everstep("get", "events").stdout)
        self.assertIn("lease", cluster.everstep("config", "view").stdout)
        self.assertIn("ok", cluster.everstep("doctor").stdout)
        self.assertEqual(cluster.everstep("wait", "job", "train", "--for", "Running").stdout, "job/train Running\n")
        self.assertEqual(cluster.everstep("wait", "job", "train", "--for", "Succeeded", "--for-at-most", "100ms",
                                          check=False).returncode, 3)
        self.assertRegex(cluster.everstep("logs", "job", "train", "--rank", "0").stdout, r"(?m)^step \d+ loss ")
        dry = cluster.everstep("cancel", "job", "train", "--dry-run").stdout
        self.assertIn("dry run", dry)
        self.assertEqual(training.state(), "RUNNING")
        cancelled = cluster.everstep("cancel", "job", "train").stdout
        self.assertIn("job/train", cancelled)
        self.assertEqual(training.wait_end(), 73)
        self.assertEqual(cluster.everstep("wait", "job", "train", check=False).returncode, 73)
        status = json.loads(cluster.everstep("local", "status", "-o", "json").stdout)
        self.assertEqual([p["state"] for p in status["processes"]], ["Running"] * 4)


if __name__ == "__main__":
    unittest.main()
