#!/usr/bin/env python3
"""Checks of the source tree that no compiler makes: who may include what, purity of the cores, layout, leftovers.

Run by ctest, or by hand: tests/lint/lint.py [--root DIR] [--compiler g++]. Prints one line per finding and exits 1
when there is one. Each check is a function that yields findings; add one by decorating it with @check.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_SUFFIXES = {".cc", ".h"}
TOP_LEVEL = {"CMakeLists.txt", "CMakePresets.json", "controller", "worker", "checkpoint", "proto", "tests", "deploy",
             "docs", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}

# ---- who may include what (design: layout table). The first rule whose prefix matches a file is the file's rule.
# own: path prefixes of ours that it may include. libraries: names of LIBRARIES below, or ALL.
LIBRARIES = {
    "fmt": ("fmt/",), "grpc": ("grpcpp/", "grpc/"), "protobuf": ("google/protobuf/", "everstep/"), "absl": ("absl/",),
    "rocksdb": ("rocksdb/",), "boost": ("boost/",), "yaml": ("yaml-cpp/",), "cli11": ("CLI/",),
    "spdlog": ("spdlog/",), "prometheus": ("prometheus/",), "xxhash": ("xxhash.h",), "zstd": ("zstd",),
    "openssl": ("openssl/",), "eigen": ("Eigen/",), "gtest": ("gtest/", "gmock/"), "benchmark": ("benchmark/",),
    "gloo": ("gloo/",), "curl": ("curl/",), "hwloc": ("hwloc",), "nccl": ("nccl",), "cuda": ("cuda",),
}
ALL = set(LIBRARIES) | {"system"}
RANK_SIDE = {"fmt", "boost", "xxhash", "system"}
RULES = [
    # prefix, own, libraries
    ("proto/base/", ("proto/base/",), {"fmt"}),
    ("proto/model/", ("proto/base/", "proto/model/"), {"fmt"}),
    ("proto/convert/", ("proto/",), ALL),
    ("controller/core/", ("proto/base/", "proto/model/", "controller/core/"), {"fmt"}),
    ("controller/sim/", ("proto/base/", "proto/model/", "controller/core/", "controller/sim/", "worker/core/",
                         "worker/collective/", "checkpoint/core/"), {"fmt", "system"}),
    ("controller/", ("proto/", "controller/"), ALL),
    ("worker/core/agent/", ("proto/base/", "proto/model/", "worker/core/agent/"), {"fmt"}),
    ("worker/core/session/", ("proto/base/", "proto/model/", "worker/core/session/"), {"fmt"}),
    ("worker/wire/", ("proto/base/", "proto/model/", "worker/wire/"), RANK_SIDE),
    ("worker/collective/nccl/", ("proto/base/", "proto/model/", "worker/collective/"), RANK_SIDE | {"nccl", "cuda"}),
    ("worker/collective/", ("proto/base/", "proto/model/", "worker/collective/"), RANK_SIDE),
    ("worker/client/", ("proto/base/", "proto/model/", "worker/wire/", "worker/collective/", "worker/core/session/",
                        "worker/client/"), RANK_SIDE),
    ("worker/examples/", ("proto/base/", "proto/model/", "worker/client/", "worker/collective/", "worker/examples/"),
     RANK_SIDE | {"eigen", "cli11"}),
    ("worker/python/", ("worker/client/", "worker/python/"), RANK_SIDE),
    ("worker/", ("proto/", "worker/io/", "worker/core/agent/", "worker/wire/", "checkpoint/"), ALL),
    ("checkpoint/core/", ("proto/base/", "proto/model/", "checkpoint/core/"), {"fmt"}),
    # The staging layout is plain data: the ABI between a rank that writes and the keeper that reads.
    ("checkpoint/io/", ("proto/", "checkpoint/", "worker/wire/staging_layout.h"), ALL),
    # The staging format belongs to the rank's side; its agent's snapshots are read from it.
    ("checkpoint/io/", ("proto/", "checkpoint/", "worker/wire/staging_layout.h"), ALL),
    ("checkpoint/", ("proto/", "checkpoint/"), ALL),
    ("tests/sim/", ("proto/base/", "proto/model/", "controller/core/", "controller/sim/", "worker/core/",
                    "worker/collective/", "checkpoint/core/", "tests/"), {"fmt", "system", "gtest"}),
    ("tests/", ("",), ALL),
]
# file, library, reason: each a hole in the table that somebody decided on.
EXCEPTIONS = {
    ("proto/model/heartbeat_codec.cc", "openssl"): "message code of the datagram, a target of its own for shells",
}

STANDARD_HEADERS = set("""
algorithm any array atomic barrier bit bitset cassert ccomplex cctype cerrno cfenv cfloat charconv chrono cinttypes
climits clocale cmath compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint
cstdio cstdlib cstring ctime cwchar deque exception execution filesystem forward_list fstream functional future
initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale map memory memory_resource
mutex new numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore set shared_mutex
source_location span sstream stack stdexcept stop_token streambuf string string_view syncstream system_error thread
tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector version
""".split())
# Standard headers that mean I/O, time or threads: not in a core.
IMPURE_HEADERS = {"thread", "mutex", "shared_mutex", "condition_variable", "future", "fstream", "iostream",
                  "filesystem", "random", "unordered_map", "unordered_set", "latch", "barrier", "semaphore",
                  "stop_token", "execution"}
IMPURE_CALLS = re.compile(
    r"steady_clock::now|system_clock::now|high_resolution_clock|random_device|std::(?:j?thread|mutex|shared_mutex|"
    r"condition_variable|async)\b|\bgetenv\b|\bunordered_|absl::flat_hash|absl::node_hash|\bclock_gettime\b|"
    r"\bgettimeofday\b|\b(?:std::)?rand\(|std::(?:uniform|normal|bernoulli|exponential)\w*distribution")
CORE = re.compile(r"^(controller|checkpoint)/core/|^worker/core/")

# Written in halves, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|not (?:yet )?imple" r"mented|(?<!::)\b[Ss]tub" r"(?:bed)?\b|place" r"holder")
SLEEPS = re.compile(r"sleep_" r"for|sleep_" r"until|\bu" r"sleep\(|time\.sl" r"eep\(|GTEST_" r"SKIP|DISABLED" r"_|@unittest\.sk" r"ip")
MACHINE = re.compile(r"(?<![\w.])/(?:wo" r"rk/(?:main|shared)|ro" r"ot/\.|tmp/bu" r"ild)[/-]?|https?://[\w.-]*(?:py" r"pi|npm" r"js|deb" r"\.debian)\.")

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Tree:
    """The tracked and new (not ignored) files of the checkout, read once."""

    def __init__(self, root, compiler):
        self.root = Path(root)
        self.compiler = compiler
        try:
            listed = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"], check=True,
                                    capture_output=True, text=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError):  # an unpacked archive
            listed = [os.path.relpath(os.path.join(folder, name), root)
                      for folder, folders, names in os.walk(root) for name in names
                      if not any(p.startswith((".", "build")) for p in Path(folder).relative_to(root).parts)]
        self.files = sorted(f for f in listed if (self.root / f).is_file())
        self.sources = [f for f in self.files if Path(f).suffix in SOURCE_SUFFIXES]
        self._text = {}

    def text(self, name):
        if name not in self._text:
            self._text[name] = (self.root / name).read_bytes().decode("utf-8", "replace")
        return self._text[name]

    def lines(self, name):
        return enumerate(self.text(name).splitlines(), 1)


def without_comments_and_strings(text):
    """The same number of lines, with comments and the content of string literals blanked."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return "\n" * token.count("\n")
        return token[0] + token[-1]
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.S)


def includes_of(tree, name):
    for number, line in tree.lines(name):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1) == '"', match.group(2)


def library_of(path):
    for library, prefixes in LIBRARIES.items():
        if path.startswith(prefixes):
            return library
    return "standard" if path in STANDARD_HEADERS else "system"


@check
def include_table(tree):
    """Each folder includes only what the table of the design allows."""
    for name in tree.sources:
        rule = next((r for r in RULES if name.startswith(r[0])), None)
        if rule is None:
            yield f"{name}: no rule says what this folder may include; add one to RULES"
            continue
        prefix, own, libraries = rule
        anything = name.endswith("main.cc") and not CORE.match(name)
        for number, quoted, path in includes_of(tree, name):
            if path.split("/")[0] in TOP_LEVEL:  # ours
                if not anything and not path.startswith(own):
                    yield f"{name}:{number}: {prefix} must not include {path}"
                continue
            if quoted and not path.startswith("everstep/"):
                yield f"{name}:{number}: include {path} by its path from the root"
                continue
            library = library_of(path)
            if library == "standard":
                if CORE.match(name) and path in IMPURE_HEADERS:
                    yield f"{name}:{number}: a core must not include <{path}>"
            elif not anything and library not in libraries and (name, library) not in EXCEPTIONS:
                yield f"{name}:{number}: {prefix} must not include {library} (<{path}>)"


@check
def pure_cores(tree):
    """No clock, thread, lock, environment, OS randomness or hash-container iteration in a core."""
    for name in tree.sources:
        if not CORE.match(name):
            continue
        for number, line in enumerate(without_comments_and_strings(tree.text(name)).splitlines(), 1):
            match = IMPURE_CALLS.search(line)
            if match:
                yield f"{name}:{number}: a core must not use {match.group(0)}"


@check
def headers(tree):
    """#pragma once, an opening paragraph, and a header that stands on its own."""
    alone = []
    sources = set(tree.sources)
    for name in tree.sources:
        if not name.endswith(".h"):
            continue
        text = tree.text(name)
        c_header = 'extern "C"' in text and "#ifndef" in text  # may be read by a C compiler that lacks the pragma
        if "#pragma once" not in text and not c_header:
            yield f"{name}: #pragma once is missing"
        if not text.startswith("//") and not text.startswith("/*"):
            yield f"{name}: begin with a paragraph: what it is, who calls it, on which thread"
        # A source file that includes its own header first proves that the header is self-contained, at no cost.
        twin = name[:-2] + ".cc"
        if twin in sources:
            first = next((path for _, _, path in includes_of(tree, twin)), None)
            if first != name:
                yield f"{twin}: include {name} first, which proves that it is self-contained"
        elif name.startswith(("proto/base/", "proto/model/", "controller/core/", "worker/core/", "worker/wire/",
                              "checkpoint/core/")):
            alone.append(name)

    def compile_alone(name):
        done = subprocess.run([tree.compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-I", str(tree.root),
                               "-DFMT_HEADER_ONLY", "-include", str(tree.root / name), "/dev/null"],
                              capture_output=True, text=True)
        if done.returncode != 0:
            return f"{name}: not self-contained: {done.stderr.strip().splitlines()[0]}"
        return None
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from filter(None, pool.map(compile_alone, alone))


@check
def leftovers(tree):
    """Nothing unfinished by its own words, nothing that belongs to one machine."""
    for name in tree.files:
        if name in ("LICENSE",) or Path(name).suffix in (".png", ".svg", ".ico", ".csv"):
            continue
        rpc = "grpcpp/" in tree.text(name)  # there, the word names what calls a service
        for number, line in tree.lines(name):
            found = UNFINISHED.search(line)
            if found and not (rpc and found.group(0).lower() == "st" "ub"):
                yield f"{name}:{number}: unfinished by its own words: {line.strip()[:80]}"
            if MACHINE.search(line):
                yield f"{name}:{number}: a path or host of one machine: {line.strip()[:80]}"


@check
def tests_without_sleeps(tree):
    """A sleep is not synchronisation, and a skipped test tests nothing."""
    for name in tree.files:
        # Benchmarks pace their load; nothing there waits for anything by sleeping.
        if name.startswith("tests/") and not name.startswith("tests/bench/") and Path(name).suffix in (".cc", ".h", ".py"):
            for number, line in tree.lines(name):
                match = SLEEPS.search(line)
                if match:
                    yield f"{name}:{number}: {match.group(0).rstrip('(')} in a test; wait for a condition with a deadline"


@check
def tests_assert(tree):
    """A test that asserts nothing tests nothing."""
    body = re.compile(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)\s*\{(.*?)^\}", re.M | re.S)
    function = re.compile(r"(\w+)\([^;{}]*\)(?:\s*const)?\s*\{(.*?)^ {0,2}\}", re.M | re.S)
    asserts = re.compile(r"EXPECT_|ASSERT_|FAIL\(|ADD_FAILURE|\b(?:Expect|Check|Verify|Assert|Must|Require|Run)\w*\(")
    for name in tree.sources:
        if name.startswith("tests/"):
            text = tree.text(name)
            # Helpers of the same file that assert.
            helpers = {f.group(1) for f in function.finditer(text) if asserts.search(f.group(2))}
            for match in body.finditer(text):
                called = set(re.findall(r"\b(\w+)\(", match.group(3)))
                if not asserts.search(match.group(3)) and not called & helpers:
                    line = text[:match.start()].count("\n") + 1
                    yield f"{name}:{line}: {match.group(1)}.{match.group(2)} asserts nothing"


@check
def layout(tree):
    """The top level is fixed; sources belong to a CMakeLists.txt; lines fit."""
    for entry in sorted({f.split("/")[0] for f in tree.files}):
        if entry not in TOP_LEVEL and not entry.startswith("."):
            yield f"{entry}: top-level entry outside the fixed layout"
    lists = "\n".join(tree.text(f) for f in tree.files if f.endswith(("CMakeLists.txt", ".cmake")))
    for name in tree.sources:
        if name.endswith(".cc") and Path(name).name not in lists:
            yield f"{name}: no CMakeLists.txt names it, so nothing builds it"
        for number, line in tree.lines(name):
            # The formatter keeps code at 100; tables and long texts may run over, within reason.
            if len(line) > 200:
                yield f"{name}:{number}: {len(line)} columns"
                break


@check
def licence(tree):
    """The licence is Apache-2.0 and whole."""
    if "LICENSE" not in tree.files or "Apache License" not in tree.text("LICENSE") or \
            "END OF TERMS AND CONDITIONS" not in tree.text("LICENSE"):
        yield "LICENSE: the whole text of the Apache License 2.0 belongs here"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--check", action="append", help="only this check (may be repeated)",
                        choices=[f.__name__ for f in CHECKS])
    arguments = parser.parse_args()
    tree = Tree(arguments.root, arguments.compiler)
    findings = 0
    for function in CHECKS:
        if arguments.check and function.__name__ not in arguments.check:
            continue
        for finding in function(tree):
            print(f"[{function.__name__}] {finding}")
            findings += 1
    print(f"lint: {len(tree.files)} files, {findings} finding(s)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
