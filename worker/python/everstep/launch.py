"""One rank of an unchanged script: started by the agent, it has the script run in a process forked from a warm template.

    python -m everstep.launch [--module] SCRIPT ARGUMENTS...

It hands its descriptors, environment and arguments to the template of its server and job (everstep.template), starting
one when there is none, passes signals on, and ends as the script ends. It imports nothing heavy: after a failure, what
lies between the order to start and the script's first line is this, and a fork.

When the script fails and left an error file (torch.distributed.elastic's ``@record``), its message is printed last, where
``everstep run`` shows it as the reason.
"""

import json
import os
import select
import signal
import socket
import sys
import time

_START_SECONDS_MAX = 300.0  # for imports of the script
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def address(module: bool, script: str) -> str:
    """The template's abstract socket: one for each server, job and script."""
    from hashlib import blake2b
    parts = (os.environ.get("EVERSTEP_AGENT_ROOT", ""), os.environ.get("EVERSTEP_JOB", str(os.getppid())), sys.executable,
             str(module), os.path.abspath(script), str(os.getuid()))
    return "\0everstep-template-" + blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def torchrun_environment() -> None:
    """What torchrun sets besides what the agent does."""
    env = os.environ
    world, local_world = int(env.get("WORLD_SIZE", "1")), max(1, int(env.get("LOCAL_WORLD_SIZE", "1")))
    env.setdefault("RANK", "0")
    env.setdefault("LOCAL_RANK", "0")
    env.setdefault("WORLD_SIZE", "1")
    env.setdefault("LOCAL_WORLD_SIZE", "1")
    env.setdefault("GROUP_RANK", "0")
    env["GROUP_WORLD_SIZE"] = str(max(1, world // local_world))
    env["ROLE_NAME"] = "default"
    env["ROLE_RANK"], env["ROLE_WORLD_SIZE"] = env["RANK"], env["WORLD_SIZE"]
    env.setdefault("TORCHELASTIC_RUN_ID", env.get("EVERSTEP_JOB_NAME", "none"))
    # As torchrun counts: each time the processes are started again, whoever failed.
    env["TORCHELASTIC_RESTART_COUNT"] = str(max(0, int(env.get("EVERSTEP_GENERATION", "1")) - 1))
    env.setdefault("TORCHELASTIC_MAX_RESTARTS", "100")
    env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if "EVERSTEP_OUTPUT_DIR" in env:
        env["TORCHELASTIC_ERROR_FILE"] = os.path.join(env["EVERSTEP_OUTPUT_DIR"], "error.json")


def _streams() -> "tuple[int, int, list[tuple[int, list[int]]]]":
    """Standard output and error of the script by EVERSTEP_REDIRECTS and EVERSTEP_TEE (0 to 3, bit 0 output, bit 1 error),
    and the pipes to copy: (from, to)."""
    folder = os.environ.get("EVERSTEP_LOG_DIR")
    redirects, tee = int(os.environ.get("EVERSTEP_REDIRECTS") or 0), int(os.environ.get("EVERSTEP_TEE") or 0)
    out, copies = [1, 2], []
    if folder and (redirects | tee):
        where = os.path.join(folder, f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", os.environ["RANK"])
        os.makedirs(where, exist_ok=True)
        for i, name in enumerate(("stdout.log", "stderr.log")):
            if not (redirects | tee) >> i & 1:
                continue
            file = os.open(os.path.join(where, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if tee >> i & 1:
                read, write = os.pipe()
                copies.append((read, [i + 1, file]))
                out[i] = write
            else:
                out[i] = file
    return out[0], out[1], copies


def _connect(module: bool, script: str) -> "socket.socket | None":
    where = address(module, script)
    deadline = time.monotonic() + _START_SECONDS_MAX
    template = 0
    pause = select.poll()
    while time.monotonic() < deadline:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            s.connect(where)
            return s
        except OSError:
            s.close()
        if template == 0:
            template = _start_template(module, script)
        elif template > 0:
            done, status = os.waitpid(template, os.WNOHANG)
            if done and status != 0:
                return None
            if done:
                template = -1  # another launcher's template was there first
        pause.poll(10)
    return None


def _start_template(module: bool, script: str) -> int:
    """The template lives as long as the agent, beside the ranks, and carries no rank's mark."""
    environment = {k: v for k, v in os.environ.items() if k not in ("EVERSTEP_PROCESS_ID", "EVERSTEP_AGENT_SOCKET")}
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "everstep.template", address(module, script)[1:], str(os.getppid()),
         "module" if module else "script", script],
        environment, setpgroup=0)


def _report(code: int) -> None:
    """Says what the script recorded of its failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if code == 0 or not os.path.exists(path):
        return
    try:
        with open(path) as file:
            message = json.load(file)["message"]
        text = message if isinstance(message, str) else message.get("message", json.dumps(message))
        print(f"everstep: rank {os.environ['RANK']} failed: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, KeyError, TypeError) as e:
        print(f"everstep: {path} is no error file: {e}", file=sys.stderr, flush=True)


def _follow(s: socket.socket, copies: "list[tuple[int, list[int]]]") -> int:
    """Until the script's process ends; its exit status as of waitpid."""
    child = int(s.recv(64))
    for number in _FORWARDED:
        signal.signal(number, lambda n, _: _send(child, n))
    poll = select.poll()
    poll.register(s, select.POLLIN)
    targets = dict(copies)
    for source in targets:
        poll.register(source, select.POLLIN)
    status = None
    while status is None or targets:
        for fd, _ in poll.poll():
            if fd == s.fileno():
                data = s.recv(64)
                status = int(data) if data else signal.SIGKILL
                poll.unregister(s)
                continue
            data = os.read(fd, 1 << 16)
            if not data:
                poll.unregister(fd)
                del targets[fd]
            for target in targets.get(fd, ()):
                _write_all(target, data)
    return status


def _write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data):]


def _send(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass


def main() -> int:
    arguments = sys.argv[1:]
    module = bool(arguments) and arguments[0] == "--module"
    if module:
        arguments = arguments[1:]
    if not arguments:
        print("usage: python -m everstep.launch [--module] SCRIPT ARGUMENTS...", file=sys.stderr)
        return 64
    if not module and not os.path.exists(arguments[0]):
        print(f"everstep: there is no script at {os.path.abspath(arguments[0])}", file=sys.stderr)
        return 64
    torchrun_environment()
    out, err, copies = _streams()
    s = _connect(module, arguments[0])
    if s is None:
        print("everstep: no warm template could be started; the script starts cold", file=sys.stderr, flush=True)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.execv(sys.executable, [sys.executable, *(["-m"] if module else []), *arguments])
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    socket.send_fds(s, [str(len(request)).encode()], [0, out, err])
    for at in range(0, len(request), 1 << 15):
        s.send(request[at:at + (1 << 15)])
    for fd in {out, err} - {1, 2}:
        os.close(fd)
    status = _follow(s, copies)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), number)
        return 128 + number
    _report(os.WEXITSTATUS(status))
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main())
