"""`python -m modelcache.loader`: makes one call for the daemon and leaves its result in an arena.

Started by the daemon, as the user's own interpreter, with the job at descriptor 3.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Tuple

if TYPE_CHECKING:
    from modelcache._entry import Entry
    from modelcache._fill import Job
    from modelcache._serialise import Dumped

JOB_DESCRIPTOR = 3

_UNCACHEABLE = "unsupported"  # remembered by the daemon: it is not tried again
_FAILED = "loader_failed"


class NeedsScript(AttributeError):
    """The call looks for something in the caller's script, which is not here."""


class _Script(types.ModuleType):
    """Stands for the caller's `__main__`. Running that once more would do all it does once more."""

    missing: List[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _Script.missing.append(name)
        raise NeedsScript(f"module '__main__' has no attribute {name!r}")


def main() -> int:
    from modelcache._fill import Job

    os.environ["MODELCACHE_DISABLE"] = "1"  # what the call loads in turn is a part of its result
    job = Job.receive(JOB_DESCRIPTOR)
    try:
        run(job)
    except Exception as failure:  # noqa: BLE001 - whoever waits must hear of it
        job.fail(_FAILED, f"the loader failed: {_text(failure)}")
        return 1
    return 0


def run(job: "Job") -> None:
    """Ends the job with a commit or with a failure that says why."""
    from modelcache import _payload, _serialise_quirks

    call = _payload.decode(job.payload())
    _payload.enter(call.context)
    _serialise_quirks.prepare_loader()
    os.environ["MODELCACHE_DISABLE"] = "1"
    _stand_for_script(call.context["script"])
    references = _References(call.references)
    try:
        function, args, kwargs = _payload.open_call(call, references.objects())
    except Exception as failure:  # noqa: BLE001 - whatever the classes of the arguments raise
        job.fail(_UNCACHEABLE, f"the call cannot be made by a loader: {_text(failure)}")
        return
    arguments = _Arguments(references.opened, _payload.argument_objects(args, kwargs))
    started = time.monotonic()
    try:
        with _recorder(_payload.argument_paths(args, kwargs)) as recorder:
            result = function(*args, **kwargs)
    except BaseException as failure:  # noqa: BLE001 - it is the caller's
        _fail(job, failure)
        return
    call.description["seconds"] = time.monotonic() - started
    call.description["files"] = recorder.records()
    _keep(job, result, arguments, call.description)


def _fail(job: "Job", failure: BaseException) -> None:
    from modelcache import _payload

    if _Script.missing:
        job.fail(_UNCACHEABLE, f"the call needs {_Script.missing[0]!r} of the script that makes it")
        return
    job.fail(_FAILED, _text(failure), _payload.encode_failure(failure))


def _keep(job: "Job", result: Any, arguments: "_Arguments", description: Dict[str, Any]) -> None:
    from modelcache import _serialise, _serialise_names, _verify

    try:
        arguments.check()
        dumped = _serialise.dump(result, arguments.names, arguments.parts)
        again = _serialise.load_back(dumped, arguments.objects)
        _verify.verify(result, again)
    except _serialise.Uncacheable as failure:
        job.fail(_UNCACHEABLE, str(failure))
        return
    del again
    _commit(job, dumped, _serialise_names.tensors(result, dumped), description)


def _commit(job: "Job", dumped: "Dumped", tensors: List[Any], description: Dict[str, Any]) -> None:
    import torch

    stream = torch.frombuffer(bytearray(dumped.stream), dtype=torch.uint8)
    storages = [(storage.data_ptr(), storage.nbytes()) for storage in dumped.storages]
    description["stream"] = len(storages)
    storages.append((stream.data_ptr(), stream.numel()))
    job.commit(storages, tensors, {"python": description})


# ---- what the call was given --------------------------------------------------------------------


class _References:
    """The arguments that came out of the cache, opened here."""

    def __init__(self, references: Mapping[str, Tuple[str, str]]) -> None:
        self._wanted = references
        self._entries: List["Entry"] = []
        self.opened: Dict[str, Any] = {}

    def objects(self) -> Dict[str, Any]:
        if self._wanted:
            from modelcache import Client, _entry, _serialise

            with Client(autostart=False) as client:
                for name, (key, model_id) in self._wanted.items():
                    entry = _entry.find(client, key)
                    if entry is None or entry.model_id != model_id:
                        raise LookupError(f"{name} is no longer in the cache")
                    self._entries.append(entry)
                    self.opened[name] = _serialise.load_entry(entry)
        return self.opened


class _Arguments:
    """The objects of a call's arguments: named in its result, and the same after it as before."""

    def __init__(self, references: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        from modelcache import _serialise

        self.objects = {**others, **references}
        self.names = {id(value): name for name, value in self.objects.items()}
        self.parts: Dict[int, str] = {}
        self._before: Dict[str, Any] = {}
        for name, value in self.objects.items():
            with contextlib.suppress(_serialise.Uncacheable):
                structure = _serialise.structure(value)
                self._before[name] = structure[:2]
                for part in structure.parts:
                    self.parts.setdefault(part, name)

    def check(self) -> None:
        """Raises Uncacheable when the call changed one: the caller's would not change."""
        from modelcache import _serialise

        for name, before in self._before.items():
            if _serialise.structure(self.objects[name])[:2] != before:
                raise _serialise.Uncacheable("", f"the call changes its {name}")


# ---- surroundings -------------------------------------------------------------------------------


def _stand_for_script(path: Any) -> None:
    script = _Script("__main__")
    if path is not None:
        script.__file__ = path
    script.__dict__["_modelcache_loader"] = sys.modules["__main__"]  # keeps what runs here
    sys.modules["__main__"] = script


def _recorder(paths: List[str]) -> Any:
    from modelcache._files import Recorder

    return Recorder(paths)


def _text(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


def start() -> None:
    """Serves one job and ends the process, without freeing every object one by one."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    start()
