#!/usr/bin/env python3
"""No live copy of a shard is left, or a copy is damaged: cases 11 and 14."""

import os
import signal
import unittest

from cluster import EndToEndTest, alive, wait_until


class StateLoss(EndToEndTest):
    def test_all_replicas_of_a_shard_lost_rolls_back_to_the_newest_protected_state(self):
        cluster = self.cluster(servers=6)
        training = cluster.train(steps=300, servers=4, flags=("--pipeline-stages", "2"), extra=("--snapshot-every", "5"))
        training.wait_step(30)
        wait_until(lambda: int(training.status().get("protectedStep", 0)) >= 10, 30, "a state is protected", training.detail)
        places = training.ranks()
        before = training.pids()
        stage = [rank for rank, place in places.items() if place["pp"] == 1]
        self.assertEqual(len(stage), 2)
        cluster.kill(*(places[rank]["server"] for rank in stage))
        recovery = training.wait_recovered()[-1]
        protected = int(recovery["recoveryPoint"]["step"])
        self.assertGreaterEqual(protected, 10, "it went back further than the newest protected state")
        self.assertEqual(protected % 5, 0, "the recovery point is a snapshot")
        self.assertGreaterEqual(int(recovery["stepsLost"]), 0)
        restored = {r["rank"]: r for r in recovery["ranks"]}
        for rank in stage:
            self.assertRegex(restored[rank]["from"], r"staged|peer|stored", "a lost shard came from nowhere")
        self.assert_pids_kept(before, training.pids(), lost=set(stage))
        self.finish(training)

    def test_full_checkpoint_disk_is_said_and_training_goes_on(self):
        cluster = self.cluster(servers=4, fail_disk="servers")
        training = cluster.train(steps=200, servers=3, flags=("--persist-every", "10"), extra=("--snapshot-every", "5"))
        wait_until(lambda: cluster.json("get", "checkpoints").get("checkpoints"), 60, "a checkpoint is complete", training.detail)
        before = training.pids()
        cluster.disk_fails("ENOSPC")
        wait_until(lambda: any(e["reason"] == "StorageFull" for e in cluster.events()), 30, "the full disk is said",
                   training.detail)
        step = training.step()
        training.wait_step(step + 20)
        self.assert_pids_kept(before, training.pids())
        self.assertEqual(cluster.recoveries("train"), [])
        cluster.disk_works()
        self.finish(training)

    def power_loss(self, damage, size, steps, policy=None):
        """All machines lose power at one instant: memory is gone, disks are not; `damage` may touch a disk meanwhile."""
        cluster = self.cluster(servers=3, policy=policy)
        training = cluster.train(steps=steps, servers=3, size=size, flags=("--persist-every", "5"),
                                 extra=("--snapshot-every", "5"))

        def two():
            found = cluster.json("get", "checkpoints").get("checkpoints", [])
            return found if len(found) >= 2 else None
        checkpoints = wait_until(two, 120, "two checkpoints are complete", training.detail)
        agents = {name: cluster.pid_of(name) for name in cluster.servers()}
        pids = training.pids().values()
        for name in (signal.SIGSTOP, signal.SIGKILL):
            for pid in [*agents.values(), *pids]:
                if alive(pid):
                    os.kill(pid, name)
        for pid in pids:
            wait_until(lambda: not alive(pid), 15, "the ranks are dead")
        damage(cluster.root_of(checkpoints[-1]["shards"][0]["server"]))
        for name in agents:
            cluster.restart(name)
        wait_until(lambda: training.running() and training.recovered_from_store(), 120,
                   "the job runs from its stored state", training.detail)
        return cluster, training

    def test_power_loss_of_all_servers_resumes_from_the_stored_checkpoint(self):
        _, training = self.power_loss(lambda root: None, "tiny", 150)
        self.finish(training)

    def test_flipped_bit_in_a_stored_chunk_is_detected_and_an_older_state_is_used(self):
        def flip(root):
            files = sorted((p for p in root.rglob("*.sst") if p.stat().st_size > 100000), key=lambda p: p.stat().st_mtime_ns)
            self.assertTrue(files, "no stored chunk to damage")
            data = bytearray(files[-1].read_bytes())
            data[len(data) // 2] ^= 1
            files[-1].write_bytes(data)
        cluster, training = self.power_loss(flip, "base", 30, {"recovery_budget": "10s"})
        wait_until(lambda: any(e["reason"] == "StorageCorrupt" for e in cluster.events()), 10, "the damage is said",
                   training.detail)
        self.finish(training)

    def finish(self, training, seconds=180):
        """As ever, but steps past the recovery point are computed twice: each process still in order, from there on."""
        self.assertEqual(training.wait_end(seconds), 0, training.detail())
        from cluster import reference_digest
        self.assertEqual(training.digest(), reference_digest(training.steps, training.size, training.extra), training.detail())


if __name__ == "__main__":
    unittest.main()
