"""What a call read from disk: recorded while it runs, compared before its result is given again.

Records are plain lists that fit into JSON:

    {"files": [[path, device, inode, size, mtime_ns, ctime_ns], ...],
     "absent": [path, ...],                          looked for, not there
     "folders": [[path, device, inode, size, mtime_ns, ctime_ns, digest of the names], ...],
     "packages": [[path of a library folder, ..., [[path, ...], ...]], ...]}

A folder whose times changed is compared by its names, a library folder by the packages that were used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import sysconfig
import threading
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from modelcache._key_functions import of_library

Identity = List[int]
Records = Dict[str, List[Any]]

_NOBODYS = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/lib/", "/usr/share/", "/lib/")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _identity(status: os.stat_result) -> Identity:
    return [
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]


def _names(folder: str) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    return hashlib.blake2b("\0".join(names).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


# ---- comparing ----------------------------------------------------------------------------------


def check(records: Records) -> Optional[str]:
    """What is not as it was, in words; None when all is."""
    status = os.stat
    for path, *identity in records["files"]:
        try:
            now = status(path)
        except OSError as failure:
            return f"{path} cannot be read any more ({failure.strerror})"
        if identity != _identity(now):
            return f"{path} changed ({_change(identity, _identity(now))})"
    for path in records["absent"]:
        try:
            status(path)
        except OSError:
            continue
        return f"{path} was not there"
    for path, *identity, names in records["folders"]:
        if not _same_folder(path, identity, names):
            return f"the files in {path} are others"
    return _check_packages(records["packages"])


def _change(before: Identity, now: Identity) -> str:
    if before[2] != now[2]:
        return f"{before[2]} bytes before, {now[2]} now"
    if before[:2] != now[:2]:
        return "another file"
    return "its times"


def _same_folder(path: str, identity: Identity, names: str) -> bool:
    try:
        return identity == _identity(os.stat(path)) or names == _names(path)
    except OSError:
        return False


def _check_packages(packages: List[Any]) -> Optional[str]:
    for folder, *identity, used in packages:
        try:
            if identity == _identity(os.stat(folder)):
                continue
            for path, *inner in used:
                if inner != _identity(os.stat(path)):
                    return f"version: {os.path.basename(os.path.dirname(path))} was installed again"
        except OSError as failure:
            where = failure.filename or folder
            return f"version: {os.path.basename(os.path.dirname(where))} is not installed any more"
    return None


# ---- recording ----------------------------------------------------------------------------------


class Recorder:
    """Sees every file that this process opens or looks for between `with` and its end.

    `paths` are arguments of the call: a file is recorded whatever reads it, a folder with the names in
    it and in those of its folders that are used. Python's own opening and looking is seen as it
    happens; the readers in Rust and C++ by functions in their place.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        self._arguments = [os.path.abspath(path) for path in paths]
        self._found: Dict[str, Optional[Identity]] = {}  # by absolute path; None: it was not there
        self._folders: Dict[str, Identity] = {}
        self._written: Set[str] = set()
        self._lock = threading.RLock()

    def __enter__(self) -> "Recorder":
        for path in self._arguments:
            self.saw(path)
        _listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)

    # ---- what is seen ---------------------------------------------------------------------------

    def saw(self, path: Any) -> None:
        """A file was opened or looked for. Its identity is taken now, before it is read."""
        absolute = _absolute(path)
        if absolute is None or absolute in self._found:
            return
        try:
            status = _stat(absolute)
        except OSError:
            self._found.setdefault(absolute, None)
            return
        if stat.S_ISREG(status.st_mode):
            self._found.setdefault(absolute, _identity(status))
        elif stat.S_ISDIR(status.st_mode) and self._is_of_argument(absolute):
            self._folders.setdefault(absolute, _identity(status))

    def wrote(self, path: Any) -> None:
        absolute = _absolute(path)
        if absolute is not None and absolute not in self._found:
            self._written.add(absolute)

    def listed(self, path: Any) -> None:
        absolute = _absolute("." if path is None else path)
        if absolute is not None and not absolute.startswith(_NOBODYS):
            try:
                self._folders.setdefault(absolute, _identity(_stat(absolute)))
            except OSError:
                return

    def _is_of_argument(self, path: str) -> bool:
        return any(path == top or path.startswith(os.path.join(top, "")) for top in self._arguments)

    # ---- what is kept ---------------------------------------------------------------------------

    def records(self) -> Records:
        """What to compare before the result is given to another process."""
        for path in _user_modules():
            self.saw(path)
        files: List[Any] = []
        absent: List[str] = []
        folders = dict(self._folders)
        for path, identity in sorted(self._found.items()):
            if path in self._written or self._is_nobodys(path):
                continue
            if identity is None:
                absent.append(path)
                continue
            files.append([path, *identity])
            folder = os.path.dirname(path)
            if folder not in folders and self._is_of_argument(folder):
                folders[folder] = _identity(_stat(folder))
        named = [[path, *folders[path], _names(path)] for path in sorted(folders)]
        return {"files": files, "absent": absent, "folders": named, "packages": _packages()}

    def _is_nobodys(self, path: str) -> bool:
        if path in self._arguments:
            return False
        return path.startswith(_NOBODYS) or of_library(path) or "/__pycache__/" in path


def _absolute(path: Any) -> Optional[str]:
    if isinstance(path, int):  # a descriptor
        return None
    try:
        return os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError):
        return None


def _user_modules() -> List[str]:
    """Source files that are imported and of no installed package: their versions are their times."""
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
    result = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and not of_library(file):
            if not file.startswith(own) and os.path.isabs(file):
                result.append(file)
    return result


def _packages() -> List[Any]:
    """The installed packages that are imported, by the file that has the version of each."""
    imported = {name.partition(".")[0].lower() for name in list(sys.modules)}
    result = []
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    for folder in sorted(folders):
        try:
            status = _stat(folder)
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        used = []
        for name in names:
            package = name.partition("-")[0].lower().replace(".", "_")
            if name.endswith(".dist-info") and _OTHER_NAMES.get(package, package) in imported:
                path = os.path.join(folder, name, "METADATA")
                try:
                    used.append([path, *_identity(_stat(path))])
                except OSError:
                    continue
        result.append([folder, *_identity(status), used])
    return result


_OTHER_NAMES = {"open_clip_torch": "open_clip", "pillow": "pil", "pyyaml": "yaml", "scikit_learn": "sklearn"}


# ---- listening ----------------------------------------------------------------------------------


_active: List[Recorder] = []
_stat = os.stat
_hooked = False
_busy = threading.local()


def _listen(recorder: Recorder) -> None:
    global _hooked
    _active.append(recorder)
    _replace_readers()
    if not _hooked:  # a hook cannot be taken back
        _hooked = True
        sys.addaudithook(_audit)
        os.stat = _watched_stat  # type: ignore[assignment]
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if _stat in able:
                able.add(_watched_stat)


def _audit(event: str, arguments: Tuple[Any, ...]) -> None:
    if not _active or getattr(_busy, "now", False):
        return
    if event == "open":
        path, mode, flags = arguments
        if isinstance(flags, int) and flags & _WRITING:
            _tell(Recorder.wrote, path)
        else:
            _tell(Recorder.saw, path)
    elif event in ("os.listdir", "os.scandir"):
        _tell(Recorder.listed, arguments[0])


def _tell(what: Callable[[Recorder, Any], None], path: Any) -> None:
    _busy.now = True
    try:
        for recorder in _active:
            what(recorder, path)
    finally:
        _busy.now = False


def _watched_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
    if _active and not kwargs.get("dir_fd") and not getattr(_busy, "now", False):
        _tell(Recorder.saw, path)
    return _stat(path, *args, **kwargs)


def _replace_readers() -> None:
    """Puts functions that tell the recorder in the place of readers that open files themselves."""
    with contextlib.suppress(ImportError):
        import safetensors  # now: whoever imports it later gets the reader that tells

    safetensors = sys.modules.get("safetensors")
    if safetensors is not None and not hasattr(safetensors.safe_open, "__wrapped__"):
        _replace_everywhere(safetensors.safe_open, _telling(safetensors.safe_open, 1))
    tokenizers = sys.modules.get("tokenizers")
    if tokenizers is not None and not hasattr(tokenizers.Tokenizer.from_file, "__wrapped__"):
        tokenizers.Tokenizer.from_file = staticmethod(_telling(tokenizers.Tokenizer.from_file))
        for kind in (tokenizers.models.BPE, tokenizers.models.WordPiece, tokenizers.models.WordLevel):
            kind.from_file = staticmethod(_telling(kind.from_file))
            kind.read_file = staticmethod(_telling(kind.read_file))


def _telling(reader: Callable[..., Any], paths: int = 2) -> Callable[..., Any]:
    """A reader whose first `paths` arguments are files that it opens."""

    def read(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values())[:paths]:
            if _active and isinstance(value, (str, bytes, os.PathLike)):
                _tell(Recorder.saw, value)
        return reader(*args, **kwargs)

    read.__wrapped__ = reader  # type: ignore[attr-defined]
    return read


def _replace_everywhere(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name, value in list(names.items()):
                if value is old:
                    names[name] = new
