#!/usr/bin/env python3
"""The controller dies, or its disk does: cases 4, 5 and 15."""

import os
import signal
import unittest

from cluster import EndToEndTest, kill_process, wait_until


class ControllerLoss(EndToEndTest):
    def test_training_does_not_pause_and_the_generation_is_adopted(self):
        cluster = self.cluster(servers=5)
        training = cluster.train(steps=400)
        training.wait_step(5)
        training.wait_standby()
        before, generation = training.pids(), int(training.status()["generation"])
        cluster.kill("controller")
        step = training.step()
        training.wait_step(step + 40, seconds=30)  # with nobody there to help
        cluster.restart("controller")
        wait_until(training.running, 30, "the restarted controller adopts the job", training.detail)
        self.assertEqual(int(training.status()["generation"]), generation)
        self.assert_pids_kept(before, training.pids())
        self.assertEqual(cluster.recoveries("train"), [])
        # And it is a controller again: a loss is recovered as ever.
        training.wait_standby()
        kill_process(training.pids()[1])
        recovery = training.wait_recovered()[0]
        self.assert_recovery(recovery, replaced={1})
        self.assert_pids_kept(before, training.pids(), lost={1})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def killed_in_phase(self, phase):
        """The controller dies when a recovery enters `phase` (it ends itself there, as SIGKILL would), and returns."""
        cluster = self.cluster(servers=5, policy={"recovery_budget": "20s"})
        training = cluster.train(steps=400)
        training.wait_step(5)
        training.wait_standby()
        before = training.pids()
        controller = cluster.pid_of("controller")
        kill_process(before[2])
        phases = ("DETECT", "DECIDE", "FENCE", "COLLECT", "PLAN", "ASSIGN", "RESTORE", "CONNECT", "RESUME")
        wanted = phases[phases.index(phase):]

        def reached():
            status = training.status()
            now = status.get("phase", "").removeprefix("RECOVERY_PHASE_")
            return now in wanted or cluster.recoveries("train")
        wait_until(reached, 30, f"the recovery reaches {phase}", training.detail)
        kill_process(controller)
        cluster.restart("controller")
        wait_until(lambda: training.running() and training.pids().get(2) not in (None, before[2]), 60,
                   "the job runs again", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={2})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def returned_and_recovered(self, cluster, training, before, evidence):
        """The controller was just killed; it returns, and what it did not make durable has not happened."""
        cluster.restart("controller")
        wait_until(lambda: training.running() and training.pids().get(2) not in (None, before[2]), 60,
                   "the job runs again", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={2})
        recovery = training.wait_recovered()[-1]
        self.assertIn(evidence, recovery["evidence"])
        self.assertEqual(int(recovery.get("stepsLost", 0)), 0, recovery)
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_killed_during_a_recovery_in_detect(self):
        # A silent server is suspected from half its lease on, and lost only at its end: seconds to act in between.
        cluster = self.cluster(servers=5, policy={"lease": "8s", "mass_silence_hold": "16s"})
        training = cluster.train(steps=400)
        training.wait_step(5)
        training.wait_standby()
        before, victim = training.pids(), training.server_of(2)
        controller = cluster.pid_of("controller")
        cluster.pause(victim)
        wait_until(lambda: cluster.server_state(victim) == "SUSPECT", 30, f"{victim} is suspected", training.detail)
        kill_process(controller)
        self.assertNotIn("Server declared dead", cluster.log_of("controller"), "detection was over already")
        self.returned_and_recovered(cluster, training, before, "did not find every member")

    def test_killed_during_a_recovery_in_decide(self):
        # Nothing of the decision is on the disk: the next controller finds a running generation that lacks a member.
        self.killed_while_deciding("WRITE", "did not find every member")

    def test_killed_during_a_recovery_in_decide_after_the_write(self):
        # The record is there, yet was never promised to anybody; it counts, and the next controller goes on above it.
        self.killed_while_deciding("SYNC", "found an unfinished recovery")

    def killed_while_deciding(self, where, evidence):
        cluster = self.cluster(servers=5, fail_disk="controller/data")
        training = cluster.train(steps=400)
        training.wait_step(5)
        training.wait_standby()
        before = training.pids()
        cluster.disk_stalls(where)
        kill_process(before[2])
        cluster.wait_stalled()  # the fence is decided, and neither durable nor told to anybody
        kill_process(cluster.pid_of("controller"))
        cluster.disk_works()
        self.returned_and_recovered(cluster, training, before, evidence)

    def test_killed_during_a_recovery_in_plan(self):
        cluster = self.cluster(servers=5, fail_disk="controller/data", policy={"recovery_budget": "600s"})
        training = cluster.train(steps=400)
        training.wait_step(5)
        training.wait_standby()
        before = training.pids()
        os.kill(before[0], signal.SIGSTOP)  # Collect waits for its answer
        kill_process(before[2])
        wait_until(lambda: training.status().get("phase", "").removeprefix("RECOVERY_PHASE_") in ("FENCE", "COLLECT"), 30,
                   "the fence is durable", training.detail)
        cluster.disk_stalls()
        os.kill(before[0], signal.SIGCONT)
        cluster.wait_stalled()  # recovery point and plan are decided, and not durable
        kill_process(cluster.pid_of("controller"))
        cluster.disk_works()
        self.returned_and_recovered(cluster, training, before, "found an unfinished recovery")

    def test_killed_during_a_recovery_in_fence(self):
        self.killed_in_phase("FENCE")

    def test_killed_during_a_recovery_in_collect(self):
        self.killed_in_phase("COLLECT")

    def test_killed_during_a_recovery_in_assign(self):
        self.killed_in_phase("ASSIGN")

    def test_killed_during_a_recovery_in_restore(self):
        self.killed_in_phase("RESTORE")

    def test_killed_during_a_recovery_in_connect(self):
        self.killed_in_phase("CONNECT")

    def test_killed_during_a_recovery_in_resume(self):
        self.killed_in_phase("RESUME")

    def test_server_lost_while_the_controller_is_away(self):
        cluster = self.cluster(servers=5)
        training = cluster.train(steps=300)
        training.wait_step(5)
        training.wait_standby()
        before, victim = training.pids(), training.server_of(1)
        cluster.kill("controller")
        cluster.kill(victim)
        cluster.restart("controller")
        wait_until(lambda: training.running() and training.pids().get(1) not in (None, before[1]), 60,
                   "the lost server is replaced", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={1})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def ledger_disk_fails(self, error):
        cluster = self.cluster(servers=5, fail_disk="controller/data")
        training = cluster.train(steps=500)
        training.wait_step(5)
        training.wait_standby()
        before = training.pids()
        cluster.disk_fails(error)
        # A promise that cannot be made durable is not made.
        late = cluster.everstep("submit", "--timeout", "3s", "--name", "late", "--servers", "1", "--opaque", "--", "/bin/sleep",
                                "1", check=False)
        self.assertNotEqual(late.returncode, 0, late.stdout)
        step = training.step()
        training.wait_step(step + 30, seconds=30)
        self.assertIn("LedgerFailed", cluster.log_of("controller"), "a failing ledger must be said loudly")
        cluster.disk_works()
        cluster.restart("controller")
        wait_until(training.running, 30, "the job is adopted", training.detail)
        self.assert_pids_kept(before, training.pids())
        training.wait_standby()
        kill_process(before[1])
        recovery = training.wait_recovered()[0]
        self.assert_recovery(recovery, replaced={1})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_ledger_disk_full_lets_jobs_run_and_makes_no_promise(self):
        self.ledger_disk_fails("ENOSPC")

    def test_ledger_sync_error_lets_jobs_run_and_makes_no_promise(self):
        self.ledger_disk_fails("EIO")


if __name__ == "__main__":
    unittest.main()
