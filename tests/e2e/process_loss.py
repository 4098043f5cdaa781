#!/usr/bin/env python3
"""Processes and servers die: cases 1, 2, 6, 7 and 8, and what must hold for every one of them."""

import json
import os
import unittest
from pathlib import Path

import cluster as support
from cluster import EndToEndTest, alive, kill_process, wait_until


def writable_cgroup():
    """True when this process may make control groups below its own in the unified hierarchy."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    own = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    return any(kind == "cgroup2" and own and os.access(f"{where}{own[0].rstrip('/')}/cgroup.procs", os.W_OK)
               for _, where, kind, *_ in mounts)


class ProcessLoss(EndToEndTest):
    def start(self, servers=5, wanted=4, **options):
        cluster = self.cluster(servers=servers)
        training = cluster.train(servers=wanted, **options)
        training.wait_step(5)
        if servers > wanted:
            training.wait_standby()
        return cluster, training

    def test_killed_rank_is_replaced_and_nothing_else_moves(self):
        cluster, training = self.start()
        before = training.pids()
        kill_process(before[2])
        recovery = training.wait_recovered()[0]
        self.assert_pids_kept(before, training.pids(), lost={2})
        self.assert_recovery(recovery, replaced={2})
        self.assertEqual(recovery["reason"], "ProcessKilled")
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_killed_leader_rank_is_replaced(self):
        cluster, training = self.start()
        before = training.pids()
        kill_process(before[0])
        recovery = training.wait_recovered()[0]
        self.assert_pids_kept(before, training.pids(), lost={0})
        self.assert_recovery(recovery, replaced={0})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_killed_server_is_replaced_by_the_spare(self):
        cluster, training = self.start()
        before, places = training.pids(), training.ranks()
        victim = places[1]["server"]
        spare = (set(cluster.servers()) - {place["server"] for place in places.values()}).pop()
        root = cluster.root_of(victim)
        cluster.kill(victim)
        self.assertFalse(root.exists(), "a killed server's directory must be gone")
        recovery = training.wait_recovered()[0]
        self.assert_pids_kept(before, training.pids(), lost={1})
        self.assert_recovery(recovery, replaced={1})
        self.assertEqual(training.server_of(1), spare)
        self.assertIn(recovery["decision"], ("StandbyPromoted", "SpareTaken"))
        self.assertFalse(alive(before[1]), "a rank outlived its server")
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_second_server_dies_during_the_recovery_of_the_first(self):
        cluster, training = self.start(servers=6)
        before, places = training.pids(), training.ranks()
        cluster.kill(places[1]["server"])
        wait_until(lambda: training.state() == "RECOVERING" or training.cluster.recoveries("train"), 30,
                   "the first recovery has begun", training.detail)
        cluster.kill(places[2]["server"])
        wait_until(lambda: training.running() and {p["server"] for p in training.ranks().values()}.isdisjoint(
            {places[1]["server"], places[2]["server"]}), 60, "the job runs without both servers", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={1, 2})
        for recovery in cluster.recoveries("train"):
            self.assertEqual(int(recovery.get("stepsLost", 0)), 0, recovery)
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_promoted_spare_dies_while_restoring(self):
        cluster, training = self.start(servers=6)
        before, places = training.pids(), training.ranks()
        victim, standby = places[3]["server"], training.standbys()[0]
        # The standby stops just before it is promoted, so that it is certainly restoring, and no further, when it dies.
        os.kill(int(standby["pid"]), 19)
        cluster.kill(victim)
        wait_until(lambda: any(p["server"] == standby["server"] for p in training.ranks().values()) or
                   training.running() and training.pids().get(3) not in (None, before[3]), 30,
                   "a spare was promoted", training.detail)
        cluster.kill(standby["server"])
        wait_until(lambda: training.running() and
                   training.ranks()[3]["server"] not in (victim, standby["server"]), 90,
                   "the job runs on the other spare", training.detail)
        self.assert_pids_kept(before, training.pids(), lost={3})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_two_servers_lost_in_one_window_make_one_plan(self):
        cluster, training = self.start(servers=6)
        before, places = training.pids(), training.ranks()
        generation = int(training.status()["generation"])
        cluster.kill(places[1]["server"], places[2]["server"])
        recovery = training.wait_recovered()[0]
        self.assertEqual(len(cluster.recoveries("train")), 1, "two losses in one window are one recovery")
        self.assertEqual(int(recovery["generationTo"]), generation + 1, "one plan, one generation")
        self.assert_recovery(recovery, replaced={1, 2})
        self.assert_pids_kept(before, training.pids(), lost={1, 2})
        self.finish(training)
        self.assert_no_committed_step_again(training)

    def test_no_grandchild_escapes_its_cgroup(self):
        if not writable_cgroup():
            self.skipTest("this machine has no writable cgroup v2 hierarchy")
        cluster = self.cluster(servers=1)
        # A grandchild without marks, in a session of its own.
        script = cluster.folder / "escape.sh"
        script.write_text("#!/bin/sh\nsetsid env -i /bin/sh -c 'echo $$ >\"$0\"; exec sleep 600' \"$1/escaped\" &\nexec sleep 600\n")
        script.chmod(0o755)
        training = cluster.train("escape", servers=1, flags=("--opaque",), program=str(script), arguments=[cluster.folder])
        escaped = cluster.folder / "escaped"
        pid = wait_until(lambda: escaped.exists() and escaped.read_text().strip(), 30, "the grandchild runs", training.detail)
        self.assertTrue(alive(int(pid)))
        cluster.everstep("cancel", "job", "escape")
        wait_until(lambda: not alive(int(pid)), 30, "the grandchild went with its rank", training.detail)

    def test_dead_agent_leaves_no_orphans(self):
        cluster = self.cluster(servers=3)
        # A rank that hides a grandchild in a session of its own.
        script = cluster.folder / "hide.sh"
        script.write_text("#!/bin/sh\nsetsid sleep 600 &\necho $! >\"$1/grandchild.$$\"\nexec sleep 600\n")
        script.chmod(0o755)
        training = cluster.train("hide", servers=2, flags=("--opaque",), program=str(script), arguments=[cluster.folder])
        pids = wait_until(lambda: [int(p.read_text()) for p in cluster.folder.glob("grandchild.*") if p.read_text().strip()],
                          30, "the grandchildren run", training.detail)
        wait_until(lambda: 0 in training.ranks(), 30, "rank 0 has its place", training.detail)
        victim = training.server_of(0)
        agent, root = cluster.pid_of(victim), cluster.root_of(victim)

        def marked():
            found = []
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit() and f"EVERSTEP_AGENT_ROOT={root}\0".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
            return [pid for pid in found if alive(pid) and pid != agent]
        self.assertGreaterEqual(len(marked()), 2, "the rank and its grandchild carry the server's mark")
        self.assertTrue(pids)
        kill_process(agent)  # the agent alone: its ranks must follow by themselves
        cluster.restart(victim)
        old = set(pids)
        wait_until(lambda: cluster.server_state(victim) in ("SPARE", "ACTIVE"), 30, "the agent is back", training.detail)
        left = [pid for pid in old if alive(pid) and f"EVERSTEP_AGENT_ROOT={root}\0".encode() in
                Path(f"/proc/{pid}/environ").read_bytes()]
        self.assertEqual(left, [], "grandchildren of a dead agent's ranks are found before it registers again")
        cluster.everstep("cancel", "job", "hide")
        self.assertEqual(training.wait_end(), 73)

    def test_no_process_opens_a_path_under_another_servers_root(self):
        cluster, training = self.start(servers=5)
        cluster.kill(training.server_of(1))
        training.wait_recovered()
        roots = {server["name"]: Path(server["root"]) for server in cluster.local()["servers"]}
        looked = 0
        for place in [*training.ranks().values(), *({"server": name, "pid": cluster.pid_of(name)} for name in roots)]:
            for link in Path(f"/proc/{place['pid']}/fd").glob("*"):
                try:
                    target = os.readlink(link)
                except OSError:
                    continue
                looked += 1
                for name, root in roots.items():
                    if name != place["server"]:
                        self.assertFalse(target.startswith(f"{root}/"), f"{place} opened {target} of {name}")
        self.assertGreater(looked, 20)
        self.finish(training)

    def test_recovery_is_told_to_people(self):
        cluster, training = self.start()
        kill_process(training.pids()[1])
        recovery = training.wait_recovered()[0]
        text = cluster.everstep("describe", "recovery", recovery["id"]).stdout
        for word in ("Evidence:", "Decision:", "Steps lost:       0", "detect", "decide", "fence", "collect", "plan", "assign",
                     "restore", "connect", "resume", "kept"):
            self.assertIn(word, text)
        explained = cluster.everstep("explain", "recovery").stdout
        self.assertIn(recovery["decisionMessage"], explained)
        listed = cluster.everstep("get", "recoveries", "--job", "train").stdout
        self.assertIn(recovery["reason"], listed)
        again = json.loads(cluster.everstep("describe", "recovery", recovery["id"], "-o", "json").stdout)
        self.assertEqual(again["id"], recovery["id"])
        self.assertIn("everstep_recoveries_total", cluster.metrics())
        self.finish(training)


if __name__ == "__main__":
    support.unittest.main()
