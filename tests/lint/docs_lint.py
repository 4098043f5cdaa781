#!/usr/bin/env python3
"""Keeps the reference pages equal to what they describe: docs/cli.md, reasons.md, config.md, metrics.md, README.

Run by ctest with the folder of the binaries; `--write` writes docs/cli.md.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

def read(name):
    path = ROOT / name
    return path.read_text() if path.exists() else ""


def reason_rows():
    entries = re.findall(r'X\((\w+),\s*"((?:[^"\\]|\\.)*)"\)', read("proto/base/reason.h"))
    assert len(entries) > 20, "proto/base/reason.h no longer has the table this reads"
    return [f"| `{name}` | {text} |" for name, text in entries]


def cli_page(binaries):
    return subprocess.run([binaries / "everstep", "reference"], check=True, capture_output=True, text=True).stdout


def equal(name, wanted):
    if read(name) != wanted:
        ours, theirs = read(name).splitlines(), wanted.splitlines()
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs), 1) if a != b), min(len(ours), len(theirs)) + 1)
        yield f"{name}:{first}: differs from what the program says; run tests/lint/docs_lint.py --binaries DIR --write"


def messages(proto):
    """Message name -> its field names, of one .proto file without nested messages."""
    text = re.sub(r"//[^\n]*", "", read(proto))
    return {name: re.findall(r"\s(\w+)\s*=\s*\d+\s*;", body) for name, body in re.findall(r"message (\w+) \{(.*?)\n\}", text, re.S)}


def reference_rows(binaries, which):
    """The table rows that the controller prints about itself."""
    done = subprocess.run([binaries / "everstep-controller", "--reference", which], check=True, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert rows, f"everstep-controller --reference {which} printed no table"
    return rows


def names(rows):
    return {re.match(r"\| `([^`]+)`", row).group(1) for row in rows}


def same_rows(page, rows):
    """Every row of the program stands on the page as it is."""
    lines = read(page).splitlines()
    for row in rows:
        if row not in lines:
            yield f"{page}: this row is missing or differs: {row}"


def config(binaries):
    """Every value of the configuration with its default, and every field of job files."""
    rows = reference_rows(binaries, "config")
    yield from same_rows("docs/config.md", rows)
    page = read("docs/config.md")
    fields = messages("proto/everstep/v1/types.proto").get("JobSpec", [])
    assert len(fields) > 10, "types.proto no longer has the message this reads"
    for field in fields:
        if f"`{field}`" not in page:
            yield f"docs/config.md: the field {field} of job files is missing"
    known = names(rows) | set(fields)
    for name in sorted(names(line for line in page.splitlines() if line.startswith("| `"))):
        if name not in known:
            yield f"docs/config.md: {name} is not a field of the configuration or of job files"


def metrics(binaries):
    """Every metric with its type, labels and help."""
    rows = reference_rows(binaries, "metrics")
    yield from same_rows("docs/metrics.md", rows)
    for name in sorted(set(re.findall(r"^\| `(everstep_\w+)", read("docs/metrics.md"), re.M)) - names(rows)):
        yield f"docs/metrics.md: {name} is on the page, but the controller has no such metric"


def reasons(_):
    rows = reason_rows()
    yield from same_rows("docs/reasons.md", rows)
    for line in read("docs/reasons.md").splitlines():
        if line.startswith("| `") and line not in rows:
            yield f"docs/reasons.md: not a reason, or another text: {line}"


def cli(binaries):
    yield from equal("docs/cli.md", cli_page(binaries))


def links(_):
    """Relative links of all pages lead somewhere; flags and commands named in the README exist."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if not path.exists():
            yield f"{path.name}: missing"
            continue
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
            if not (path.parent / target).exists():
                yield f"{path.relative_to(ROOT)}: the link {target} leads nowhere"


CHECKS = (cli, reasons, config, metrics, links)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        (ROOT / "docs/cli.md").write_text(cli_page(arguments.binaries))
    findings = 0
    for check in CHECKS:
        for finding in check(arguments.binaries):
            print(f"[{check.__name__}] {finding}")
            findings += 1
    print(f"docs lint: {findings} finding(s)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
