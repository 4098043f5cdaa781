#!/usr/bin/env python3
"""Too few servers, or two jobs for one: cases 9, 13 and 16."""

import unittest

from cluster import EndToEndTest, wait_until


def aborted_steps(training):
    """Steps that were discarded and not applied later in the same generation (one that was had only left the range of
    exact reduction, and was computed again)."""
    events = training.log_events()
    applied = {(e.process, e.step, e.generation) for e in events if e.kind == "applied"}
    return [e for e in events if e.kind == "discarded" and (e.process, e.step, e.generation) not in applied]


class Capacity(EndToEndTest):
    def test_shrinks_without_a_spare_and_regrows_without_losing_a_step(self):
        cluster = self.cluster(servers=4, policy={"regrow_delay": "200ms"})
        training = cluster.train(steps=500, flags=("--servers-min", "2"))
        training.wait_step(5)
        before, victim = training.pids(), training.server_of(3)
        cluster.kill(victim)
        recovery = training.wait_recovered()[0]
        self.assertEqual(recovery["decision"], "JobShrunk")
        self.assertEqual(int(recovery.get("stepsLost", 0)), 0)
        wait_until(training.running, 30, "it runs shrunk", training.detail)
        self.assertEqual(int(training.status()["worldSize"]), 3)
        self.assertEqual(set(training.pids().values()), set(before.values()) - {before[3]})
        step = training.step()
        training.wait_step(step + 5)
        cluster.restart(victim)
        wait_until(lambda: int(training.status().get("worldSize", 0)) == 4 and training.running(), 60,
                   "it has grown back", training.detail)
        regrown = training.wait_recovered(2)
        self.assertEqual(regrown[0]["decision"], "JobShrunk")
        self.assertEqual(regrown[1]["reason"], "JobRegrown")
        self.assertTrue(regrown[1]["planned"], "a regrowth is planned: no step is aborted")
        self.assertLessEqual(set(before.values()) - {before[3]}, set(training.pids().values()))
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_below_the_minimum_it_waits_in_a_named_state_and_resumes(self):
        cluster = self.cluster(servers=3, policy={"regrow_delay": "200ms"})
        training = cluster.train(steps=300, servers=3)
        training.wait_step(5)
        victim = training.server_of(2)
        cluster.kill(victim)
        training.wait_state("WAITING_FOR_CAPACITY")
        self.assertTrue(training.status()["message"], "a wait without a sentence that says for what")
        step = training.step()
        cluster.restart(victim)
        training.wait_step(step + 5)
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_drain_moves_a_server_at_a_boundary_and_aborts_no_step(self):
        cluster = self.cluster(servers=5)
        training = cluster.train(steps=300)
        training.wait_step(5)
        training.wait_standby()
        before, drained = training.pids(), training.server_of(1)
        said = cluster.everstep("drain", "server", drained).stdout
        self.assertIn(f"server/{drained}", said)
        wait_until(lambda: training.running() and training.ranks()[1]["server"] != drained, 60,
                   "the drained server is empty", training.detail)
        recovery = training.wait_recovered()[0]
        self.assertTrue(recovery["planned"])
        self.assertEqual(int(recovery.get("stepsLost", 0)), 0)
        self.assert_pids_kept(before, training.pids(), lost={1})
        self.finish(training)
        self.assert_no_committed_step_again(training)
        self.assertEqual(aborted_steps(training), [], "a planned change aborted a step")
        self.assertEqual(cluster.server_state(drained), "DRAINING")
        self.assertIn(drained, cluster.everstep("undrain", "server", drained).stdout)
        wait_until(lambda: cluster.server_state(drained) == "SPARE", 15, "the server is a spare again")

    def test_two_jobs_compete_for_one_spare_and_priority_decides(self):
        cluster = self.cluster(servers=4)
        flags = ("--servers-min", "2", "--standbys", "0")
        low = cluster.train("low", steps=300, servers=2, flags=flags)  # the older one
        low.wait_step(5)
        high = cluster.train("high", steps=300, servers=2, flags=(*flags, "--priority", "10"))
        high.wait_step(5)
        before = {job.name: job.pids() for job in (low, high)}
        # Both lose a server while there is no spare, so both wait when one comes.
        for job in (low, high):
            cluster.kill(job.server_of(1))
        for job in (low, high):
            job.wait_state("WAITING_FOR_CAPACITY")
        spare = cluster.add()
        high.wait_state("RUNNING")
        self.assertEqual(high.server_of(1), spare)
        self.assertEqual(low.state(), "WAITING_FOR_CAPACITY", "exactly one job gets the spare")
        self.assert_pids_kept(before["high"], high.pids(), lost={1})
        cluster.add()
        low.wait_state("RUNNING")
        self.assert_pids_kept(before["low"], low.pids(), lost={1})
        for job in (high, low):
            self.finish(job)
            self.assert_no_committed_step_again(job)

    def test_two_jobs_lose_a_server_in_one_window_and_one_gets_the_spare(self):
        cluster = self.cluster(servers=5)
        flags = ("--servers-min", "2", "--standbys", "0")
        low = cluster.train("low", steps=300, servers=2, flags=flags)  # the older one
        low.wait_step(5)
        high = cluster.train("high", steps=300, servers=2, flags=(*flags, "--priority", "10"))
        high.wait_step(5)
        before = {job.name: job.pids() for job in (low, high)}
        spare = next(name for name, server in cluster.servers().items() if not server["status"].get("ranks"))
        cluster.kill(low.server_of(1), high.server_of(1))  # at one instant, while the spare is there
        high.wait_recovered()
        self.assertEqual(high.server_of(1), spare)
        low.wait_state("WAITING_FOR_CAPACITY")
        self.assert_pids_kept(before["high"], high.pids(), lost={1})
        # Both records say by which rule.
        told = cluster.everstep("describe", "job", "low").stdout
        self.assertIn("the claim of job high is higher (priority, then age)", told)
        cluster.add()
        low.wait_recovered()
        self.assert_pids_kept(before["low"], low.pids(), lost={1})
        for job in (high, low):
            self.finish(job)
            self.assert_no_committed_step_again(job)

    def test_grows_into_free_servers_and_gives_them_back(self):
        cluster = self.cluster(servers=5, policy={"regrow_delay": "200ms"})
        training = cluster.train(steps=400, servers=2, flags=("--servers-max", "4"))
        wait_until(lambda: 1 in training.ranks(), 30, "it runs", training.detail)
        before = {rank: pid for rank, pid in training.pids().items() if rank < 2}
        training.wait_step(5)
        wait_until(lambda: int(training.status().get("worldSize", 0)) == 4 and training.running(), 60,
                   "it has grown to its maximum", training.detail)
        self.assertLessEqual(set(before.values()), set(training.pids().values()))
        training.wait_step(training.step() + 10)
        other = cluster.train("other", steps=700, servers=2, flags=("--servers-min", "2", "--standbys", "0"))
        other.wait_step(5)
        wait_until(lambda: int(training.status().get("worldSize", 0)) == 2 and training.running(), 60,
                   "it has given the extra servers back", training.detail)
        self.assertEqual(training.pids(), before, "the processes of the wanted size are the same")
        planned = [r for r in cluster.recoveries("train") if r["planned"]]
        self.assertEqual([r["reason"] for r in planned][:2], ["JobRegrown", "JobShrunk"])
        self.finish(training)  # before the other one: what it gives back would grow in again
        self.assert_no_committed_step_again(training)
        self.assertEqual(aborted_steps(training), [], "a planned change aborted a step")
        self.finish(other)


if __name__ == "__main__":
    unittest.main()
