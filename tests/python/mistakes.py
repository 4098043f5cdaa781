#!/usr/bin/env python3
"""What users get wrong: each mistake ends in a sentence that says what to change, and none in a hang."""

import re
import signal
import sys
import unittest
from unittest import mock

from torch_support import TorchTest, main, run_alone


class Alone(unittest.TestCase):
    def check(self, mistake, code, message):
        done = run_alone("mistakes.py", mistake, timeout=60)
        output = done.stdout + done.stderr
        self.assertEqual(done.returncode, code, output)
        self.assertRegex(output, message)
        return output

    def test_the_program_itself_is_right(self):
        self.check("none", 0, "done")

    def test_forgotten_commit(self):
        self.check("forgot-commit", 1, r"ended step 1 without job\.commit\(\): call it once for each batch")
        self.check("no-rehearsal-forgot-commit", 1, r"ended step 1 without job\.commit\(\)")

    def test_commit_twice_and_outside_of_a_step(self):
        self.check("twice", 1, r"commit\(\) was called twice in step 1")
        self.check("outside", 1, r"commit\(\) outside of a step: call it in the body of a loop over job\.steps\(loader\)")

    def test_two_sessions_in_one_process(self):
        self.check("two-sessions", 1, "this process has a session already")

    def test_fork_after_the_process_joined(self):
        output = self.check("fork", 0, r"child: process \d+ was forked from rank process \d+ after it had joined")
        self.assertIn("done", output, "the parent goes on")

    def test_data_loader_worker_that_exits(self):
        self.check("worker-exit", 1, "DataLoader worker .* exited unexpectedly")

    def test_keyboard_interrupt(self):
        self.check("interrupt", -signal.SIGINT, "KeyboardInterrupt")

    def test_loss_that_is_not_a_number(self):
        self.check("not-finite", 1, "step 7: some rank's loss or gradients are not finite; nothing was applied")

    def test_old_torch_and_missing_library_are_named(self):
        import torch
        for name in [name for name in sys.modules if name.startswith("everstep")]:
            del sys.modules[name]
        with mock.patch.object(torch, "__version__", "2.1.0"), self.assertRaisesRegex(ImportError, "2.4 or newer, this is 2.1.0"):
            import everstep.torch  # noqa: F401
        done = run_alone("mistakes.py", "none", environment={"EVERSTEP_LIBRARY": "/nowhere/libeverstep.so"})
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nowhere/libeverstep.so can't be loaded", done.stderr)


class InJob(TorchTest):
    def job(self, mistake, message, code=None):
        _, training = self.start(mistake, program="mistakes.py", servers=3, wanted=2, log=False)
        ended = training.wait_end(150)
        said = training.notes.read_text(errors="replace")
        self.assertNotEqual(ended, 0, said)
        if code is not None:
            self.assertEqual(ended, code, said)
        self.assertTrue(re.search(message, said), said)

    def test_rank_that_raises_in_the_step(self):
        self.job("raises", "ValueError: the data of this step is bad", code=1)

    def test_different_code_on_two_ranks(self):
        self.job("different-code", "step 7 failed 3 times because .*ranks disagree.*all ranks must call the same collectives", code=1)

    def test_unequal_values_in_registered_state(self):
        self.job("unequal-values", "hold different bytes of shard 0")

    def test_unequal_shapes_of_registered_state(self):
        self.job("unequal-shapes", "differ")


if __name__ == "__main__":
    main()
