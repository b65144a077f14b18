"""Exceptions: one class per status of the C library that callers tell apart.

Numbers and names of the statuses come from the library; here they only select a class.
"""

from __future__ import annotations

from typing import Dict, Type


class Error(Exception):
    """A request failed. The message is whole: it names the file, tensor, path or limit.

    `code` is the number of the status, `status` its stable name ("no_room"), `errno` that of the
    system call behind it, or None. `detail` is what the loader of a Python call sent with it.
    """

    def __init__(
        self, message: str, code: int = 0, status: str = "", errno: int = 0, detail: bytes = b""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.errno = errno or None
        self.detail = detail

    def __reduce__(self):  # OSError's own would drop what the class adds
        return type(self), (str(self), self.code, self.status, self.errno or 0, self.detail)


class InvalidArgumentError(Error, ValueError):
    """The caller passed something no daemon could accept."""


class NotFoundError(Error, FileNotFoundError):
    """No such model, tensor or file."""


class DeadlineError(Error, TimeoutError):
    """The caller's deadline passed."""


class UnavailableError(Error, ConnectionError):
    """No daemon answers, or it is shutting down."""


class PermissionDeniedError(Error, PermissionError):
    """This user may not do this."""


class NoRoomError(Error, MemoryError):
    """The memory budget cannot hold the model; the message has both numbers."""


class BadFileError(Error, ValueError):
    """The model file is malformed."""


class UnsupportedError(Error, NotImplementedError):
    """A format, dtype or option that the library, or the installed torch, does not know."""


class FileChangedError(Error):
    """The file changed while it was being read."""


class LoaderFailedError(Error):
    """The loader process died or was killed."""


class InUseError(Error):
    """Leases or a pin forbid it."""


class CancelledError(Error):
    """The request was withdrawn before it finished."""


CLASSES: Dict[str, Type[Error]] = {
    "invalid_argument": InvalidArgumentError,
    "not_found": NotFoundError,
    "timeout": DeadlineError,
    "unavailable": UnavailableError,
    "permission": PermissionDeniedError,
    "no_room": NoRoomError,
    "bad_file": BadFileError,
    "unsupported": UnsupportedError,
    "file_changed": FileChangedError,
    "loader_failed": LoaderFailedError,
    "in_use": InUseError,
    "cancelled": CancelledError,
}
