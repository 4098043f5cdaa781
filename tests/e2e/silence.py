#!/usr/bin/env python3
"""Servers fall silent without dying: cases 3 and 10."""

import unittest

from cluster import EndToEndTest, alive, read_step_logs, wait_until


class Silence(EndToEndTest):
    def test_silent_server_is_replaced_and_its_zombie_touches_nothing(self):
        cluster = self.cluster(servers=5)
        training = cluster.train(steps=400)
        training.wait_step(5)
        training.wait_standby()
        before, victim = training.pids(), training.server_of(2)
        cluster.pause(victim)
        recovery = training.wait_recovered()[0]
        self.assertEqual(recovery["reason"], "ServerSilent")
        self.assert_pids_kept(before, training.pids(), lost={2})
        self.assert_recovery(recovery, replaced={2})
        self.assertTrue(alive(before[2]), "it was only paused")
        step, generation = training.step(), int(training.status()["generation"])
        incarnation = int(cluster.servers()[victim]["status"]["incarnation"])
        cluster.resume(victim)
        # It wakes with the memory, sockets and promises of an old generation, and must end its rank before it registers.
        wait_until(lambda: not alive(before[2]), 30, "the zombie's rank is killed", training.detail)
        wait_until(lambda: cluster.server_state(victim) == "SPARE" and
                   int(cluster.servers()[victim]["status"]["incarnation"]) > incarnation, 30,
                   "the zombie registered as a new incarnation", training.detail)
        training.wait_step(step + 10)
        self.assertEqual(int(training.status()["generation"]), generation, "the zombie disturbed the job")
        self.assertEqual(len(cluster.recoveries("train")), 1, "the zombie caused a recovery")
        late = [e for e in read_step_logs(training.step_logs) if e.pid == before[2] and e.generation >= generation]
        self.assertEqual(late, [], "the zombie stepped in the new generation")
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_short_silence_is_forgiven(self):
        cluster = self.cluster(servers=4, policy={"lease": "4s", "mass_silence_hold": "8s"})
        training = cluster.train(steps=250)
        training.wait_step(5)
        before, victim = training.pids(), training.server_of(1)
        cluster.pause(victim)
        step = training.step()
        cluster.resume(victim)
        training.wait_step(step + 10)
        self.assertEqual(cluster.recoveries("train"), [])
        self.assert_pids_kept(before, training.pids())
        self.finish(training)

    def test_most_servers_silent_at_once_freeze_and_return_without_a_storm(self):
        cluster = self.cluster(servers=6)
        training = cluster.train(steps=300, servers=5)
        training.wait_step(5)
        before = training.pids()
        silent = sorted({training.server_of(rank) for rank in (0, 1, 2, 3)})
        cluster.pause(*silent)
        frozen = lambda: any(e["reason"] == "MassSilence" for e in cluster.events())
        wait_until(frozen, 30, "the controller doubts its own network", training.detail)
        self.assertEqual(cluster.recoveries("train"), [], "a recovery began although most fell silent")
        cluster.resume(*silent)
        step = training.step()
        training.wait_step(step + 20)
        self.assertEqual(cluster.recoveries("train"), [], "a recovery storm")
        self.assert_pids_kept(before, training.pids())
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_most_servers_really_lost_end_in_a_recovery_not_in_a_freeze(self):
        cluster = self.cluster(servers=8)
        training = cluster.train(steps=300, servers=5, flags=("--servers-min", "2"))
        training.wait_step(5)
        before, places = training.pids(), training.ranks()
        spares = sorted(set(cluster.servers()) - {p["server"] for p in places.values()})
        # Two of three spares too: five of eight are gone, at one instant.
        cluster.kill(*(places[rank]["server"] for rank in (0, 1, 2)), *spares[:2])
        wait_until(lambda: training.running() and cluster.recoveries("train") and
                   all(alive(pid) for pid in training.pids().values()), 90, "the job runs on what is left", training.detail)
        for rank in training.pids().values():
            self.assertTrue(alive(rank))
        survivors = set(before.values()) & set(training.pids().values())
        self.assertEqual(survivors, {before[3], before[4]}, "the survivors' processes were not kept")
        self.finish(training)
        self.assert_no_committed_step_again(training)


if __name__ == "__main__":
    unittest.main()
