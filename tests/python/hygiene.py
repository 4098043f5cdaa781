#!/usr/bin/env python3
"""Many recoveries in one process: nothing is left behind, whatever the collective at which a generation ends."""

from torch_support import TorchTest, main


class Hygiene(TorchTest):
    def check(self, *arguments):
        cluster, training = self.start("--aborts", 330, *arguments, servers=3, wanted=3, program="often_aborted.py",
                                       flags=("--standbys", "0", "--max-restarts", "1000"))
        digest = self.digest(training, 300)
        lines = [list(map(int, path.read_text().split())) for path in training.step_logs.glob("resources-*")]
        self.assertEqual(len(lines), 3)
        for generations, memory, files, threads, memory_end, files_end, threads_end in lines:
            print(f"{generations} generations: {memory} -> {memory_end} KiB, {files} -> {files_end} descriptors, {threads} -> {threads_end} threads")
            self.assertGreaterEqual(generations, 200, "too few recoveries happened")
            self.assertLessEqual(memory_end, memory * 1.02 + 256, "memory grew")
            self.assertLessEqual((files_end, threads_end), (files, threads), "descriptors or threads were left behind")
        cluster.close()
        _, calm = self.start("--aborts", 330, "--baseline", 0, *arguments, servers=3, wanted=3, program="often_aborted.py", name="calm",
                             environment={"EVERSTEP_TEST_CALM": "1"})
        self.assertEqual(digest, self.digest(calm, 120), "the weights differ from those of a run without aborts")

    def test_two_hundred_recoveries_leave_nothing_behind(self):
        self.check()

    def test_two_hundred_recoveries_under_data_parallel_leave_nothing_behind(self):
        self.check("--ddp")

    def test_two_hundred_recoveries_with_exact_reduction_leave_nothing_behind(self):
        self.check("--exact")


if __name__ == "__main__":
    main()
