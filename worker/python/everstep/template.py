"""The warm template of one script on one server: it has imported what the script imports, and forks a process for each
rank that everstep.launch asks for.

It runs nothing of the script itself but its imports, has one thread, and opens nothing that a child must not share. A
child dies when its launcher does; all of them and the template die with the agent. With nobody to serve for a while it
ends.
"""

import ast
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from typing import Optional

_IDLE_MILLISECONDS_MAX = 60_000
_PR_SET_PDEATHSIG = 1


class _Child:
    """One rank's process, as the template sees it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        self.pidfd = os.pidfd_open(pid)


def imports_of(path: str) -> "list[str]":
    """Modules that a script imports at its top level, __main__ guards and functions left out."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read(), path)
    found = []
    for node in tree.body:
        for inner in ast.walk(node) if isinstance(node, ast.Try) else [node]:
            if isinstance(inner, ast.Import):
                found += [alias.name for alias in inner.names]
            elif isinstance(inner, ast.ImportFrom) and inner.module and inner.level == 0:
                found.append(inner.module)
    return list(dict.fromkeys(found))


def _path_of(module: bool, script: str) -> Optional[str]:
    if not module:
        return script
    spec = importlib.util.find_spec(script)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(script + ".__main__")
    return spec.origin if spec is not None else None


def warm(module: bool, script: str) -> None:
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    try:
        path = _path_of(module, script)
        names = imports_of(path) if path else []
    except (OSError, SyntaxError, ValueError, ImportError):
        names = []  # the script will say it better when it runs
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: B036 - the script, which may expect it, will meet it again
            pass
    if "torch" in sys.modules:
        # What torch itself imports late: two seconds in the first DistributedDataParallel or optimizer step.
        for name in ("torch._dynamo", "torch.distributed", "torch.profiler", "torch.utils.data", "torch.nn.parallel"):
            try:
                importlib.import_module(name)
            except ImportError:
                pass


def _receive(connection: socket.socket) -> "Optional[tuple[dict, list[int]]]":
    data, fds, _, _ = socket.recv_fds(connection, 64, 3)
    if not data:
        return None
    size, text = int(data), b""
    while len(text) < size:
        piece = connection.recv(1 << 16)
        if not piece:
            for fd in fds:
                os.close(fd)
            return None
        text += piece
    return json.loads(text), list(fds)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def serve(listener: socket.socket, agent: int) -> "Optional[dict]":
    """In the template: until it is no longer needed, then None. In a child: what it is to run."""
    children: "dict[int, _Child]" = {}
    by_connection: "dict[int, _Child]" = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(agent, select.POLLIN)
    while True:
        ready = poll.poll(None if children else _IDLE_MILLISECONDS_MAX)
        if not ready:
            return None
        for fd, _ in ready:
            if fd == agent:
                for child in children.values():
                    os.kill(child.pid, signal.SIGKILL)
                return None
            if fd == listener.fileno():
                connection, _ = listener.accept()
                request = _receive(connection)
                if request is None:
                    connection.close()
                    continue
                wanted, fds = request
                me = os.getpid()
                pid = os.fork()
                if pid == 0:
                    _become(wanted, fds, me, [listener, connection, *(c.connection for c in children.values())],
                            [agent, *(c.pidfd for c in children.values())])
                    return wanted
                for each in fds:
                    os.close(each)
                child = _Child(pid, connection)
                connection.send(str(pid).encode())
                children[child.pidfd] = by_connection[connection.fileno()] = child
                poll.register(child.pidfd, select.POLLIN)
                poll.register(connection, select.POLLIN)
            elif fd in children:
                child = children.pop(fd)
                poll.unregister(fd)
                if by_connection.pop(child.connection.fileno(), None) is not None:
                    poll.unregister(child.connection)
                _, status = os.waitpid(child.pid, 0)
                os.close(fd)
                try:
                    child.connection.send(str(status).encode())
                except OSError:
                    pass  # its launcher is gone
                child.connection.close()
            elif fd in by_connection:  # nothing is ever sent: the launcher ended, and so does the rank
                child = by_connection.pop(fd)
                poll.unregister(fd)
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    os.kill(child.pid, signal.SIGKILL)


def _become(wanted: dict, fds: "list[int]", parent: int, sockets: "list[socket.socket]", others: "list[int]") -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    for s in sockets:
        s.close()
    for fd in others:
        os.close(fd)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))


def main() -> None:
    where, agent, kind, script = sys.argv[1:5]
    module = kind == "module"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + where)
    except OSError:
        return  # another launcher of this server was faster
    try:
        agent_fd = os.pidfd_open(int(agent))
    except ProcessLookupError:
        return
    warm(module, script)
    if _threads() != 1:
        print(f"everstep: the imports of {script} start threads, so its ranks can't be forked from a warm process",
              file=sys.stderr, flush=True)
        sys.exit(1)
    gc.collect()
    gc.freeze()
    # Not from here on: whoever comes earlier finds nobody, and asks again.
    listener.listen(64)
    wanted = serve(listener, agent_fd)
    if wanted is None:
        return
    sys.argv = list(wanted["arguments"])
    if module:
        sys.path[0] = wanted["directory"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
