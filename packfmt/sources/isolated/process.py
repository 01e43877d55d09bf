"""File formats whose parsers are C libraries are read in a child process: a hostile file then costs an error only.

The child has a limit on its address space, writes no files, and is ended when it makes no progress. It sends records as
plain bytes (see ``frames``); a crash in it becomes a ``SourceError`` that names the file. Ctrl-C, an early end of the
iteration and the death of either side leave no process behind: the parent kills the child when it is done, and the
child ends when its pipe does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from packfmt.errors import SourceError
from packfmt.sources.isolated.child import GO
from packfmt.sources.isolated.frames import FrameError, read_frame

try:
    import fcntl
    import select
except ImportError:  # not Unix: the child still isolates crashes, without limits
    fcntl = select = None  # type: ignore[assignment]

__all__ = ["IsolatedReader"]

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, named in fcntl from Python 3.10 on Linux only
_SLOW = "no frame came in time"
_GRACE = 5.0  # seconds the parent waits beyond the child's own limit

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from packfmt.sources.isolated.child import main; main()"
)


class IsolatedReader:
    """One child process that reads one source.

    Args:
        reader: a key of ``child.READERS``.
        request: JSON-able, for the reader's ``start``.
        path: what is being read, for messages.
        memory: limit on the child's address space, bytes.
        timeout: seconds the child may take to its next frame.

    Not thread-safe. Not picklable. Close it, or leave the with-block.
    """

    def __init__(self, reader: str, request: dict[str, Any], *, path: str, memory: int, timeout: float) -> None:
        self._path = path
        self._memory = memory
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _end, with the process that writes it)
        self._process = _launch(self._errors)
        self._finish = weakref.finalize(self, _end, self._process, self._errors, os.getpid())
        order = {"reader": reader, "memory": memory, "timeout": timeout, "request": request}
        self._send(json.dumps(order).encode("ascii") + b"\n")

    def plan(self) -> dict[str, Any]:
        """The plan: what was recognised.

        Raises:
            SourceError: the child refused the file, crashed, or took too long.
        """
        frame = self._next()
        if frame is None or not isinstance(frame[0].get("plan"), dict):
            raise self._failure("no plan came")
        plan: dict[str, Any] = frame[0]["plan"]
        return plan

    def frames(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """The frames after the plan, the one with ``end`` last; once only.

        Raises:
            SourceError: as ``plan``.
        """
        self._send(GO)
        while True:
            frame = self._next()
            if frame is None:
                raise self._failure("the records stopped short")
            yield frame
            if "end" in frame[0]:
                return

    def close(self) -> None:
        """End the child, if it still runs. Calling it twice is allowed."""
        self._finish()

    def __enter__(self) -> IsolatedReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def readinto(self, buffer: memoryview, /) -> int | None:
        """For ``read_frame``: read from the child, no longer than the time limit."""
        pipe = self._process.stdout
        if pipe is None:
            raise FrameError("the child has no pipe")
        if select is not None:
            waiting = select.poll()
            waiting.register(pipe.fileno(), select.POLLIN)
            if not waiting.poll((self._timeout + _GRACE) * 1000):
                self._process.kill()
                self._process.wait()
                raise FrameError(_SLOW)
        return pipe.readinto(buffer)  # type: ignore[attr-defined, no-any-return]

    def _next(self) -> tuple[dict[str, Any], memoryview] | None:
        try:
            frame = read_frame(self)
        except (FrameError, OSError) as error:
            raise self._failure(str(error)) from error
        if frame is not None and "error" in frame[0]:
            self.close()
            raise SourceError(f"{self._path}: {frame[0]['error']}")
        return frame

    def _send(self, line: bytes) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the child's death shows in the next read
                pipe.write(line)
                pipe.flush()

    def _failure(self, what: str) -> SourceError:
        """The error for a child that ended without saying why."""
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            code = None
        self._errors.seek(0)
        said = self._errors.read(65536).decode("utf-8", "replace").strip().splitlines()
        self.close()
        return SourceError(f"{self._path}: {_ending(code, what, self._memory, self._timeout)}{_quote(said)}")


def _quote(lines: list[str]) -> str:
    return f" (the reader said: {lines[-1][:300]})" if lines else ""


def _ending(code: int | None, what: str, memory: int, timeout: float) -> str:
    alarm = getattr(signal, "SIGALRM", None)
    if what == _SLOW or (code is not None and alarm is not None and -code == alarm):
        return f"reading made no progress for {timeout:g} s and was ended: the file is damaged, or its disk too slow"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return (
                f"the library that reads it crashed ({signal.Signals(-code).name}): the file is damaged or cut short, "
                f"or needs more than {memory >> 20} MiB. Copy it afresh from its origin"
            )
    return f"the process that reads it failed: {what}; exit code {code}"


def _launch(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # Isolated mode, and without site: neither the working directory nor the user's folder adds to the path, and nothing
    # runs that hangs on the start of Python. The child searches where this process does, and the package's own folder
    # last, for installations that are found by a hook.
    search = [entry for entry in sys.path if entry] + [str(Path(__file__).resolve().parents[3])]
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    environment["HDF5_PLUGIN_PRELOAD"] = "::"  # HDF5's way to say: load no plug-in from wherever a path points
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, json.dumps(search)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        env=environment,
        start_new_session=True,  # so that Ctrl-C reaches the parent alone, which then ends the child
    )
    if fcntl is not None and process.stdout is not None:
        with contextlib.suppress(OSError):  # a small pipe is slower, not wrong
            fcntl.fcntl(process.stdout.fileno(), _SET_PIPE_SIZE, _PIPE_BYTES)
    return process


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], owner: int) -> None:
    """Kill and reap the child; in the process that started it only, not in a fork of that one."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            pipe.close()
