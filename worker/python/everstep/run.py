"""``python -m everstep.run``: torchrun's command line for ``everstep run``.

    python -m everstep.run --nnodes 2:4 --nproc-per-node 2 --max-restarts 10 train.py --lr 0.1

A script that uses ``everstep.torch`` (or ``everstep.Session``) recovers in process. Any other is started unchanged: after
a failure all its processes are replaced at once, from warm ones, and it resumes from its own checkpoint.

Rendezvous belongs to the controller: torchrun's ``--rdzv-*``, ``--node-rank`` and ``--master-*`` are accepted, and the run
id apart without effect.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Optional, Sequence

_PASSED = ("PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV", "EVERSTEP_LIBRARY")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m everstep.run", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                                description=__doc__)

    def add(*names: str, **options: object) -> None:
        every = [*names, *(n.replace("-", "_").replace("__", "--", 1) for n in names if n.startswith("--") and "-" in n[2:])]
        p.add_argument(*dict.fromkeys(every), **options)  # type: ignore[arg-type]

    add("--nnodes", default="1", help="servers, or MINIMUM:WANTED")
    add("--nproc-per-node", default="1", help="ranks on each server: a number, cpu, gpu or auto")
    add("--spares", type=int, help="spare servers of a temporary local cluster")
    add("--max-restarts", type=int, default=100, help="failures of the program's own that the job survives")
    add("--rdzv-id", default=None, help="name of the run")
    add("--name", default=None, help="name of the job")
    add("--log-dir", default=None, help="folder of --redirects and --tee, on the servers")
    add("-r", "--redirects", default="0", help="1: output, 2: errors, 3: both go to files instead of the console")
    add("-t", "--tee", default="0", help="as --redirects, and to the console too")
    add("-m", "--module", action="store_true", help="the script is a module")
    add("--no-python", action="store_true", help="the script is a program")
    add("--standalone", action="store_true", help="accepted: without a controller a local cluster is started in any case")
    add("--controller", default=None, help="address of the controller, host:port")
    add("--dir", default=None, help="directory of the local cluster")
    add("--everstep-flag", action="append", default=[], help="one more argument for everstep run; may be repeated")
    for name in ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--node-rank", "--master-addr", "--master-port", "--role",
                 "--monitor-interval", "--start-method", "--local-addr", "--local-ranks-filter", "--logs-specs"):
        add(name, default=None, help="accepted, without effect")
    p.add_argument("script", help="script, module or program")
    p.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return p


def joins(script: str) -> bool:
    """True for a program that takes part itself: one that imports everstep."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return False
    return re.search(r"^\s*(import\s+everstep|from\s+everstep)\b", text, re.MULTILINE) is not None


def _ranks(value: str) -> str:
    if value.isdigit() and int(value) > 0:
        return value
    if value in ("cpu", "gpu", "auto"):
        count = 0
        if value != "cpu":
            import torch
            count = torch.cuda.device_count()
            if value == "gpu" and count == 0:
                raise SystemExit("everstep: --nproc-per-node gpu, and there is none")
        return str(count or os.cpu_count() or 1)
    raise SystemExit(f"everstep: --nproc-per-node '{value}' is no number, nor cpu, gpu or auto")


def command(argv: Sequence[str]) -> "list[str]":
    """The ``everstep run`` that does what these arguments ask for."""
    a = _parser().parse_args(list(argv))
    everstep = os.environ.get("EVERSTEP_COMMAND") or shutil.which("everstep")
    if everstep is None:
        raise SystemExit("everstep: the everstep command is not on the PATH, nor named by EVERSTEP_COMMAND")
    out = [everstep, "run", "--nnodes", a.nnodes, "--nproc-per-node", _ranks(a.nproc_per_node),
           "--max-restarts", str(a.max_restarts), "--working-directory", os.getcwd()]
    name = a.name or a.rdzv_id or re.sub(r"[^a-z0-9-]+", "-", Path(a.script).stem.lower()).strip("-")
    out += ["--name", name]
    for flag, value in (("--spares", a.spares), ("--controller", a.controller), ("--dir", a.dir)):
        if value is not None:
            out += [flag, str(value)]
    environment = {key: os.environ[key] for key in _PASSED if key in os.environ}
    if _ranks(a.nproc_per_node) != "1":
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    environment["TORCHELASTIC_RUN_ID"] = a.rdzv_id or name
    environment["TORCHELASTIC_MAX_RESTARTS"] = str(a.max_restarts)
    environment["PYTHONUNBUFFERED"] = "1"
    if a.log_dir:
        environment["EVERSTEP_LOG_DIR"] = os.path.abspath(a.log_dir)
    for key, value in (("EVERSTEP_REDIRECTS", a.redirects), ("EVERSTEP_TEE", a.tee)):
        if value not in ("0", "1", "2", "3"):
            raise SystemExit(f"everstep: --redirects and --tee take 0 to 3, not '{value}'")
        if value != "0":
            if not a.log_dir:
                raise SystemExit("everstep: --redirects and --tee need --log-dir")
            environment[key] = value
    for key, value in environment.items():
        out += ["--env", f"{key}={value}"]
    out += a.everstep_flag
    script = a.script if a.module or a.no_python else os.path.abspath(a.script)
    if not a.module and not a.no_python and not os.path.exists(script):
        raise SystemExit(f"everstep: there is no script at {script}")
    if a.no_python:
        return [*out, "--opaque", "--", script, *a.arguments]
    if not a.module and joins(script):
        return [*out, "--", sys.executable, script, *a.arguments]
    return [*out, "--opaque", "--", sys.executable, "-m", "everstep.launch", *(["--module"] if a.module else []), script, *a.arguments]


def main(argv: Optional[Sequence[str]] = None) -> None:
    line = command(sys.argv[1:] if argv is None else argv)
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
