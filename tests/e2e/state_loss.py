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
        for rank in stage:
            cluster.kill(places[rank]["server"])
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

    def test_flipped_bit_in_a_stored_chunk_is_detected_and_another_copy_is_used(self):
        cluster = self.cluster(servers=3)
        training = cluster.train(steps=400, servers=3, flags=("--persist-every", "10"), extra=("--snapshot-every", "5"))

        def newest():
            found = cluster.json("get", "checkpoints").get("checkpoints", [])
            return found[-1] if found and len({s["server"] for s in found[-1]["shards"]}) >= 2 else None
        checkpoint = wait_until(newest, 60, "a checkpoint has copies on two servers", training.detail)
        holders = sorted({shard["server"] for shard in checkpoint["shards"] if shard["tier"].endswith("STORED")})
        # All power is lost at one instant: memory is gone, disks are not.
        agents = {name: cluster.pid_of(name) for name in cluster.servers()}
        for pid in agents.values():
            os.kill(pid, signal.SIGSTOP)
        for pid in agents.values():
            os.kill(pid, signal.SIGKILL)
        for pid in training.pids().values():
            wait_until(lambda: not alive(pid), 15, "the ranks died with their agents")
        flipped = 0
        for path in sorted(cluster.root_of(holders[0]).rglob("*")):
            if path.suffix in (".sst", ".blob", ".log") and path.is_file() and path.stat().st_size > 20000:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
                flipped += 1
        self.assertGreater(flipped, 0, "no stored chunk to damage")
        for name in agents:
            cluster.restart(name)
        wait_until(lambda: training.running() and training.recovered_from_store(), 120,
                   "the job runs from its stored state", training.detail)
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
