"""Waiting for a cold load: progress reports, and Ctrl-C while the library waits."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Callable, Dict, Optional, Union

from modelcache import _ffi

Progress = Union[None, bool, Callable[[int, int], Any]]


class _Bar:
    """One line on standard error, shown for loads that take longer than half a second."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if not total or time.monotonic() - self._start < 0.5:
            return
        self._shown = True
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\rmodelcache: [{bar}] {done / 2**20:.0f} of {total / 2**20:.0f} MiB")
        sys.stderr.flush()

    def close(self) -> None:
        if self._shown:
            sys.stderr.write("\n")


class ProgressWatch:
    """Carries a progress function through C: what it raises cancels the load and is kept.

    The library is given PROGRESS with `user`, which finds this object.
    """

    def __init__(self, progress: Progress) -> None:
        if progress is None:
            progress = os.environ.get("MODELCACHE_PROGRESS", "0") not in ("", "0")
        self._raised: Optional[BaseException] = None
        self._bar = _Bar() if progress is True else None
        self._report = self._bar if progress is True else progress
        self.user = id(self)

    def run(self, call: Callable[[], Optional[BaseException]]) -> Optional[BaseException]:
        """Runs `call`, which waits inside the library and gives its failure, if any.

        Gives that, or what a progress function or Ctrl-C raised meanwhile.
        """
        _waiting[self.user] = self
        previous = sys.unraisablehook
        # Python runs signal handlers in the main thread, at the entry of the function that C calls:
        # what they raise there (KeyboardInterrupt) cannot be caught inside it, only here.
        hooked = threading.current_thread() is threading.main_thread()
        if hooked:
            sys.unraisablehook = hook = self._hook(previous)
        try:
            failure = call()
            return self._raised or failure
        finally:
            if hooked and sys.unraisablehook is hook:
                sys.unraisablehook = previous
            if self._bar is not None:
                self._bar.close()
            del _waiting[self.user]
            self._raised = None  # its traceback refers to self

    def _hook(self, previous: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def keep(unraisable: Any) -> None:
            if unraisable.object is _report:
                self._raised = unraisable.exc_value  # so the next progress call gives up
            else:
                previous(unraisable)

        return keep

    def report(self, done: int, total: int) -> int:
        """What the library is answered: 0, or 1 to give up the load."""
        try:
            if self._raised is None and callable(self._report):
                self._report(done, total)
        except BaseException as raised:
            self._raised = raised
        return 0 if self._raised is None else 1


_waiting: Dict[int, ProgressWatch] = {}


def _report(user: int, done: int, total: int) -> int:
    watch = _waiting.get(user)
    return 1 if watch is None else watch.report(done, total)


# One for all, since each costs more than a warm open. Always installed: it is where Python
# sees Ctrl-C while the library waits.
PROGRESS = _ffi.ProgressFunction(_report)
