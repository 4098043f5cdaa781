#!/usr/bin/env python3
"""The lint's own tests: each plants one violation in a small tree and expects exactly that finding."""

import tempfile
import unittest
from pathlib import Path

import lint

HEADER = "// What it is.\n#pragma once\n"


class LintTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def findings(self, function, files):
        root = Path(self.folder.name)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        tree = lint.Tree(root, "g++")
        tree.files = sorted(files)
        tree.sources = [f for f in tree.files if Path(f).suffix in lint.SOURCE_SUFFIXES]
        return list(function(tree))

    def test_core_must_not_include_a_library(self):
        found = self.findings(lint.include_table, {"controller/core/a.cc": "#include <grpcpp/grpcpp.h>\n"})
        self.assertEqual(len(found), 1)
        self.assertIn("must not include grpc", found[0])

    def test_core_must_not_include_another_components_core(self):
        found = self.findings(lint.include_table,
                              {"controller/core/a.cc": '#include "worker/core/agent/agent_core.h"\n'})
        self.assertIn("must not include worker/core/agent/agent_core.h", found[0])

    def test_client_must_not_include_generated_messages(self):
        found = self.findings(lint.include_table,
                              {"worker/client/a.cc": '#include "everstep/v1/agent.pb.h"\n'})
        self.assertEqual(len(found), 1)

    def test_main_may_include_everything(self):
        self.assertEqual(self.findings(lint.include_table,
                                       {"worker/main.cc": '#include <grpcpp/grpcpp.h>\n#include "controller/io/x.h"\n'}), [])

    def test_core_must_not_read_a_clock_but_may_speak_of_it(self):
        text = "// never steady_clock" + "::now\nint a = 1;\nauto t = std::chrono::steady_clock" + "::now();\n"
        found = self.findings(lint.pure_cores, {"checkpoint/core/a.cc": text})
        self.assertEqual(len(found), 1)
        self.assertIn("a.cc:3:", found[0])

    def test_header_needs_pragma_once_and_a_paragraph(self):
        found = self.findings(lint.headers, {"controller/io/a.h": "int x;\n"})
        self.assertEqual(len(found), 2)

    def test_header_must_stand_alone(self):
        found = self.findings(lint.headers, {"proto/base/a.h": HEADER + "std::string x;\n"})
        self.assertEqual(len(found), 1)
        self.assertIn("not self-contained", found[0])

    def test_source_includes_its_own_header_first(self):
        found = self.findings(lint.headers, {"proto/base/a.h": HEADER,
                                             "proto/base/a.cc": '#include <string>\n#include "proto/base/a.h"\n'})
        self.assertEqual(len(found), 1)

    def test_test_must_not_sleep(self):
        found = self.findings(lint.tests_without_sleeps, {"tests/unit/a.cc": "std::this_thread::sleep_" + "for(1s);\n"})
        self.assertEqual(len(found), 1)

    def test_test_must_assert(self):
        found = self.findings(lint.tests_assert, {"tests/unit/a.cc": "TEST(A, Nothing) {\n  int a = 1;\n}\n"
                                                                     "TEST(A, Some) {\n  EXPECT_EQ(1, 1);\n}\n"})
        self.assertEqual(len(found), 1)
        self.assertIn("A.Nothing", found[0])

    def test_unfinished_words_and_machine_paths_are_found(self):
        found = self.findings(lint.leftovers, {"docs/a.md": "TO" + "DO later\nsee /wo" + "rk/main/x\n"})
        self.assertEqual(len(found), 2)

    def test_layout_is_fixed_and_sources_are_built(self):
        found = self.findings(lint.layout, {"scripts/x.md": "x\n", "proto/a.cc": "int x;\n"})
        self.assertEqual(len(found), 2)


if __name__ == "__main__":
    unittest.main()
