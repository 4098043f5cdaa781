#!/usr/bin/env python3
"""No live copy of a shard is left, or a copy is damaged: cases 11 and 14."""

import unittest

from cluster import EndToEndTest, wait_until


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

    def finish(self, training, seconds=180):
        """As ever, but steps past the recovery point are computed twice: each process still in order, from there on."""
        self.assertEqual(training.wait_end(seconds), 0, training.detail())
        from cluster import reference_digest
        self.assertEqual(training.digest(), reference_digest(training.steps, training.size, training.extra), training.detail())


if __name__ == "__main__":
    unittest.main()
