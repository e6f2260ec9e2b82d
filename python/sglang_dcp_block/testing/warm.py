"""Start-up cost: importing SGLang takes 20 s of CPU, and an engine does it once per process. Import once, fork instead.

Two forks, both taken before any plugin is loaded and before any thread runs, so that every process still loads its
plugins and unpickles its arguments itself, as with SGLang's own "spawn":

- :class:`Template`: in the engine's process, a clean copy of it that becomes multiprocessing's fork server. Schedulers
  and the detokenizer are forked from there. Their parent is the template: it hands SIGQUIT, by which SGLang's children
  report a crash, on to the engine.
- :class:`WarmServer`: a process that has imported everything and forks engine processes, so that a session of many
  engines imports once.

Linux only, CPU only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_sglang() -> None:
    """Import what an engine's processes import, the model files included (SGLang reads all of them to find one)."""
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models.registry import import_model_classes

    import_model_classes("sglang.srt.models")  # cached there
    gc.collect()
    gc.freeze()
    if threading.active_count() > 1:
        raise RuntimeError(f"can't fork: importing SGLang started threads {threading.enumerate()}")


def read_variables_again() -> None:
    """Take over test switches that SGLang reads at import: the warm process imported it with none of them set."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


class Template:
    """A forked copy of this process that waits to become the fork server of multiprocessing's "forkserver" method."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._engine = os.getpid()
        self._pid = os.fork()
        if self._pid:
            theirs.close()
            return
        self._channel.close()
        try:
            self._serve(theirs)
        except SystemExit:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def install(self) -> None:
        """Make SGLang's engine start its processes from the template."""
        from sglang.srt.entrypoints import engine

        set_up = engine._set_envs_and_config

        def set_up_and_fork(*args: Any, **kwargs: Any) -> None:
            set_up(*args, **kwargs)
            multiprocessing.set_start_method("forkserver", force=True)

        engine._set_envs_and_config = set_up_and_fork
        multiprocessing.util.spawnv_passfds = self._become_fork_server(multiprocessing.util.spawnv_passfds)

    def _become_fork_server(self, original: Callable) -> Callable:
        def spawnv_passfds(path: Any, arguments: Any, fds: Any) -> int:
            if "multiprocessing.forkserver" not in arguments[-1]:  # the resource tracker
                return original(path, arguments, fds)
            message = pickle.dumps(dict(os.environ))
            socket.send_fds(self._channel, [len(message).to_bytes(8, "little")], list(fds))
            self._channel.sendall(message)
            self._channel.close()
            return self._pid

        return spawnv_passfds

    def _serve(self, channel: socket.socket) -> None:
        header, fds, _, _ = socket.recv_fds(channel, 8, 2)
        if not header:
            return  # the engine ended before it started a process
        message = b""
        while len(message) < int.from_bytes(header, "little"):
            message += channel.recv(1 << 20)
        channel.close()
        os.environ.clear()
        os.environ.update(pickle.loads(message))
        template, engine = os.getpid(), self._engine

        def hand_on(number: int, _frame: Any) -> None:
            if os.getpid() == template:
                os.kill(engine, number)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGQUIT, hand_on)
        listener, alive = fds
        multiprocessing.forkserver.main(listener, alive, [])


class WarmServer:
    """A warm process (see the module) behind a Unix socket; use it as a context manager.

    environment: what must be set while SGLang is imported.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-dcp-block-")
        self.address = str(Path(self._folder.name) / "warm")
        self.log = Path(self._folder.name) / "log.txt"
        command = [sys.executable, "-m", "sglang_dcp_block.testing.warm", self.address]
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
            )

    def __enter__(self) -> WarmServer:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the warm process failed:\n{self.log.read_text()}")
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()  # end of its stdin ends it
        self._folder.cleanup()

    def start(self, module: str, arguments: list[str], environment: dict[str, str], log: Path) -> WarmProcess:
        """Fork a process that calls ``main(*arguments)`` of a module and writes its output to ``log``."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        stream = connection.makefile("rw")
        stream.write(json.dumps([module, arguments, environment, str(log)]) + "\n")
        stream.flush()
        return WarmProcess(connection, stream)


class WarmProcess:
    """The part of subprocess.Popen that the engine runner uses."""

    def __init__(self, connection: socket.socket, stream: Any) -> None:
        self._connection, self._stream = connection, stream
        self.pid = int(stream.readline())
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            # Not a socket timeout: a stream that timed out once refuses further reads.
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0)
            self._status = int(self._stream.readline() or "-1")
        return self._status

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Hang up: the process is killed, as it is when this session dies."""
        self._stream.close()
        self._connection.close()


def _handle(connection: socket.socket) -> None:
    """In a fork of the warm process: fork the engine's process, report its pid, then its exit status."""
    stream = connection.makefile("rw")
    module, arguments, environment, log = json.loads(stream.readline())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            connection.close()
            os.environ.clear()
            os.environ.update(environment)
            try:
                importlib.import_module(module).main(*arguments)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os._exit(1)
    stream.write(f"{pid}\n")
    stream.flush()
    status = None
    while status is None:
        gone, _, _ = select.select([connection], [], [], 0.1)  # readable: the test session ended
        if gone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        ended, code = os.waitpid(pid, 0 if gone else os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    with contextlib.suppress(OSError):
        stream.write(f"{status}\n")
        stream.flush()


def _serve_engines(address: str) -> None:
    import_sglang()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are reaped by the kernel
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _handle(connection)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    _serve_engines(sys.argv[1])
