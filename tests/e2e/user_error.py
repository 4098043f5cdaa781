#!/usr/bin/env python3
"""The program's own failures, and bad input: case 12, and what must be refused in one line."""

import os
import socket
import subprocess
import tempfile
import unittest
from pathlib import Path

from cluster import BIN, EndToEndTest, SCALE, TRAIN, wait_until


class UserError(EndToEndTest):
    def test_failing_program_stops_the_job_with_its_code_and_last_lines(self):
        cluster = self.cluster(servers=3)
        script = cluster.folder / "broken.sh"
        script.write_text("#!/bin/sh\necho 'about to fail: no such layer'\nexit 9\n")
        script.chmod(0o755)
        training = cluster.train("broken", servers=2, program=str(script), arguments=[])
        self.assertEqual(training.wait_end(60), 9, training.detail())
        self.assertIn("no such layer", training.notes.read_text())
        job = training.job()["status"]
        self.assertEqual(job["outcome"]["reason"], "UserError")
        self.assertLessEqual(int(job["failures"]), 4, "a fail-over storm")
        self.assertEqual({name: cluster.server_state(name) for name in ("s1", "s2", "s3")},
                         {"s1": "SPARE", "s2": "SPARE", "s3": "SPARE"}, "servers suffer for a program's error")

    def test_failure_twice_at_the_same_step_stops_the_job(self):
        cluster = self.cluster(servers=5)
        missing = cluster.folder / "nothing-here"
        training = cluster.train("nodata", servers=2, arguments=["--data", str(missing), "--steps", "5"])
        code = training.wait_end(60)
        self.assertIn(code, range(1, 64), training.detail())
        self.assertIn("nothing-here", training.notes.read_text())

    def test_program_ended_by_a_signal_of_its_own_gets_code_70(self):
        cluster = self.cluster(servers=2)
        script = cluster.folder / "abort.sh"
        script.write_text("#!/bin/sh\necho aborting\nkill -ABRT $$\n")
        script.chmod(0o755)
        training = cluster.train("abort", servers=1, program=str(script), arguments=[])
        self.assertEqual(training.wait_end(60), 70, training.detail())

    def test_program_missing_on_a_server_names_server_and_path(self):
        cluster = self.cluster(servers=1)
        file = cluster.folder / "job.yaml"
        file.write_text("name: gone\nprogram: /opt/none/such-program\nservers_wanted: 1\n")
        done = cluster.everstep("run", "-f", str(file), check=False)
        self.assertIn("/opt/none/such-program", done.stderr)
        self.assertIn("s1", done.stderr)
        self.assertNotEqual(done.returncode, 0)


class BadInput(EndToEndTest):
    """Each a one-line error that names the field, the value and the remedy, and nothing half-started left behind."""

    def refused(self, arguments, code, *words, logs=False):
        with tempfile.TemporaryDirectory() as home:
            done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, timeout=60 * SCALE,
                                  env=dict(os.environ, HOME=home, EVERSTEP_HOME=home))
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            lines = done.stderr.strip().splitlines()
            if not logs:  # a daemon that got as far as its log has lines of it before the error
                self.assertEqual(len(lines), 1, done.stderr)
            for word in words:
                self.assertIn(word, lines[-1])

    def test_command_line_is_refused(self):
        everstep = BIN / "everstep"
        self.refused([everstep, "get", "serverz"], 2, "serverz", "servers")
        self.refused([everstep, "run", "--nmae", "x", "program"], 64, "--nmae")
        self.refused([everstep, "run", "--", "no-such-program"], 64, "no-such-program", "PATH")
        self.refused([everstep, "run", "--servers", "zero", "--", TRAIN], 64, "--servers", "zero")
        self.refused([everstep, "get", "servers", "--controller", "nowhere"], 2, "nowhere", "host:port")
        self.refused([everstep, "get", "servers", "--timeout", "10"], 2, "--timeout", "10")
        self.refused([everstep, "get", "servers"], 1, "everstep local up")
        self.refused([everstep, "local", "up", "--servers", "0"], 2, "--servers", "0")
        self.refused([everstep, "local", "kill", "s1"], 1, "everstep local up")

    def test_job_files_are_refused(self):
        cluster = self.cluster(servers=2)
        everstep = [BIN / "everstep", "run", "--dir", cluster.directory, "-f"]
        file = cluster.folder / "job.yaml"

        def job(text, *words):
            file.write_text(f"name: bad\nprogram: {TRAIN}\n{text}\n")
            self.refused([*everstep, file], 64, *words)
        job("servers_wantd: 2", "job.yaml:3", "servers_wantd", "servers_wanted")
        job("termination_grace: 5", "job.yaml:3", "termination_grace")
        job("servers_wanted: 2\nservers_min: 3", "servers_min", "3")
        job("servers_wanted: 1\nranks_per_server: 0", "ranks_per_server")
        job("servers_wanted: 1\npipeline_stages: 7", "pipeline_stages", "7")
        self.assertEqual(cluster.json("get", "jobs").get("jobs", []), [], "a refused job was left behind")

    def test_controller_refuses_a_port_in_use_and_a_locked_directory(self):
        cluster = self.cluster(servers=1)
        controller = BIN / "everstep-controller"
        with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            config = Path(folder) / "c.yaml"

            def configured(text):
                config.write_text(text)
                return [controller, "--config", config]
            self.refused(configured(f"data_directory: {folder}/d\nlisten: 127.0.0.1:{port}\nops_listen: 127.0.0.1:0\n"), 2,
                         str(port))
            self.refused(configured(f"data_directory: {cluster.directory}/controller/data\nlisten: 127.0.0.1:0\n"
                                    "ops_listen: 127.0.0.1:0\n"), 2, "controller/data")
            self.refused(configured(f"data_directory: {folder}/d\nlease: 5s\n"), 2, "lease")
            self.refused(configured(f"data_directory: {folder}/d\nlisten: 127.0.0.1:0\nops_listen: 127.0.0.1:0\n"
                                    "policy:\n  lease: 5 bananas\n"), 2, "c.yaml:5", "lease", "5 bananas")

    def test_two_agents_with_one_name_and_bad_flags(self):
        cluster = self.cluster(servers=2)
        agent = BIN / "everstep-agent"
        with tempfile.TemporaryDirectory() as folder:
            self.refused([agent, "--name", "s1", "--controller", cluster.local()["address"], "--root", f"{folder}/r"], 2, "s1",
                         "--name", logs=True)
            self.refused([agent, "--name", "s 1", "--root", f"{folder}/r"], 2, "--name", "s 1")
            self.refused([agent, "--name", "s9", "--root", f"{folder}/r", "--devices", "-1"], 2, "--devices", "-1")
            self.refused([agent, "--name", "s9", "--root", "/proc/none"], 2, "/proc/none")
        self.assertEqual(sorted(cluster.servers()), ["s1", "s2"])
        wait_until(lambda: cluster.server_state("s1") == "SPARE", 10, "the first s1 was not disturbed")


if __name__ == "__main__":
    unittest.main()
