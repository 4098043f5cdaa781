#!/usr/bin/env python3
"""Real training under real kills: survivors stay, and the weights are those of the run that nothing happened to."""

import os
import random
import signal

from torch_support import TorchTest, main, newest_step, wait_until

SEED = int(os.environ.get("EVERSTEP_TEST_SEED", "20260101"))


class InProcess(TorchTest):
    def kill_one(self, training, victim, count):
        """Kills one rank beside a warm standby; returns the recovery, after the ranks stepped on."""
        training.wait_standby()
        before = training.pids()
        step = newest_step(training.step_logs)
        os.kill(before[victim], signal.SIGKILL)
        recovery = training.wait_recovered(count)[-1]
        self.assert_recovery(recovery, replaced={victim})
        wait_until(lambda: newest_step(training.step_logs) > step + 2, 30, "the job steps on", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={victim})
        return recovery

    def check_kills(self, kills, *arguments):
        print(f"seed {SEED}: EVERSTEP_TEST_SEED={SEED} {self.id()}")
        rng = random.Random(SEED)
        _, training = self.start(*arguments, "--pace", 60)
        training.wait_step(5)
        for count in range(1, kills + 1):
            self.kill_one(training, rng.randrange(4), count)
        self.assertEqual(self.digest(training), self.undisturbed(*arguments), "the weights differ: " + training.detail())
        self.assert_no_committed_step_again(training)
        return training

    def test_killed_rank_is_replaced_and_weights_are_the_same_bits(self):
        self.check_kills(1, "--steps", 200)

    def test_five_random_kills_leave_the_same_bits(self):
        training = self.check_kills(5, "--steps", 900, "--samples", 1003)
        # 1003 samples in steps of 32: 30 steps of 32 and one of 43.
        read = self.samples_read(training)
        self.assertEqual(sorted(read), list(range(1, 901)))
        for epoch in range(900 // 31):
            whole = sorted(i for step in range(epoch * 31 + 1, epoch * 31 + 32) for i in read[step])
            self.assertEqual(whole, list(range(1003)), f"epoch {epoch} did not read each sample exactly once")

    def test_five_random_kills_under_data_parallel_leave_the_same_bits(self):
        self.check_kills(5, "--steps", 900, "--ddp")

    def test_stopped_server_is_replaced_and_weights_are_the_same_bits(self):
        arguments = ("--steps", 400)
        cluster, training = self.start(*arguments, "--pace", 60)
        training.wait_step(5)
        training.wait_standby()
        before = training.pids()
        step = newest_step(training.step_logs)
        cluster.pause(training.server_of(3))
        recovery = training.wait_recovered()[-1]
        self.assert_recovery(recovery, replaced={3})
        wait_until(lambda: newest_step(training.step_logs) > step + 2, 30, "the job steps on", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={3})
        self.assertEqual(self.digest(training), self.undisturbed(*arguments))

    def shrink_and_regrow(self, *arguments, steps=500):
        arguments = ("--steps", steps, "--micro-batches", 4, "--no-norm", *arguments)
        cluster, training = self.start(*arguments, "--pace", 60, servers=4, flags=("--servers-min", 2))
        training.wait_step(5)
        before = training.pids()
        victim = 1
        cluster.kill(training.server_of(victim))
        wait_until(lambda: training.running() and len(training.ranks()) == 3, 60, "three ranks go on", training.detail)
        kept = set(training.pids().values())
        self.assertEqual(kept, set(before.values()) - {before[victim]}, "a survivor was replaced")
        step = newest_step(training.step_logs)
        wait_until(lambda: newest_step(training.step_logs) > step + 10, 60, "three ranks step", training.detail)
        cluster.add()
        wait_until(lambda: training.running() and len(training.ranks()) == 4, 120, "four ranks again", training.detail)
        self.assertTrue(kept < set(training.pids().values()), "a survivor was replaced when the job grew")
        digest = self.digest(training)
        read = self.samples_read(training)
        self.assertEqual(sorted(read), list(range(1, steps + 1)))
        for epoch in range(steps // 31):
            whole = sorted(i for s in range(epoch * 31 + 1, epoch * 31 + 32) for i in read[s])
            self.assertEqual(whole, list(range(1000)), f"epoch {epoch} did not read each sample exactly once")
        self.assertEqual(sum(int(r.get("stepsLost", 0)) for r in cluster.recoveries("torch")), 0)
        return digest, arguments

    def test_exact_sums_keep_the_bits_through_shrink_and_regrowth(self):
        digest, arguments = self.shrink_and_regrow("--exact")
        self.assertEqual(digest, self.undisturbed(*arguments))

    def test_data_parallel_shrinks_and_grows_with_every_sample_once(self):
        digest, _ = self.shrink_and_regrow("--ddp")
        self.assertRegex(digest, "^[0-9a-f]{64}$")


if __name__ == "__main__":
    main()
