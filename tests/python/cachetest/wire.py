"""The wire, spoken by hand: frames, a raw connection, a daemon that lies."""

import array
import json
import os
import socket
import struct
import threading

HEADER = struct.Struct("<4sBBBBII")
MAGIC = b"MDLC"
VERSION = 1
HELLO, OPEN, RELEASE, DESCRIPTORS, PROGRESS, LIST, STATUS, WHY, EVICT, PIN = range(1, 11)
REPLY, ERROR, EVENT = 1, 2, 4


def frame(kind, body=b"", *, request=1, flags=0, version=VERSION, magic=MAGIC, length=None, fds=0):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    size = len(body) if length is None else length
    return HEADER.pack(magic, version, kind, flags, fds, request, size) + body


class Raw:
    """A connection whose bytes the test chooses."""

    def __init__(self, path, hello=True, seconds=10):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(seconds)
        self.socket.connect(path)
        if hello:
            kind, flags, body, _ = self.ask(HELLO, {"min_version": 1, "max_version": 1})
            assert kind == HELLO and flags == REPLY, (kind, flags, body)

    def send(self, data, descriptors=()):
        control = []
        if descriptors:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sent = self.socket.sendmsg([data], control)
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def receive(self):
        """(type, flags, body, descriptors) of the next frame; None when the peer hung up."""
        return receive_frame(self.socket)

    def ask(self, kind, body=b"{}", **header):
        self.send(frame(kind, body, **header))
        return self.receive()

    def hung_up(self):
        """Waits until the daemon closed this connection; frames before that are ignored."""
        while True:
            try:
                if self.receive() is None:
                    return True
            except (ConnectionResetError, BrokenPipeError):
                return True

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def receive_frame(connection):
    head, descriptors = b"", []
    while len(head) < HEADER.size:
        data, control, _, _ = connection.recvmsg(HEADER.size - len(head), 4096)
        for _level, _kind, payload in control:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) // 4 * 4])
            descriptors += numbers
        if not data:
            return None
        head += data
    _, _, kind, flags, _, _, size = HEADER.unpack(head)
    body = b""
    while len(body) < size:
        data = connection.recv(size - len(body))
        if not data:
            return None
        body += data
    return kind, flags, json.loads(body or b"{}"), descriptors


class FakeDaemon:
    """Accepts clients and answers each request with what `answer(type, body)` returns.

    `answer` gives a dict (a reply), None (no reply) or bytes (sent as they are). Hello is answered
    truthfully: this process is the daemon.
    """

    def __init__(self, path, answer, namespace=None):
        self.path = str(path)
        self._answer = answer
        self._namespace = os.stat("/proc/self/ns/pid").st_ino if namespace is None else namespace
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self.requests = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection):
        with connection:
            while True:
                head = connection.recv(HEADER.size, socket.MSG_PEEK | socket.MSG_WAITALL)
                if len(head) < HEADER.size:
                    return
                request = HEADER.unpack(head)[5]
                kind, flags, body, descriptors = receive_frame(connection)
                for descriptor in descriptors:
                    os.close(descriptor)
                self.requests.append((kind, body))
                reply = self._hello() if kind == HELLO else self._answer(kind, body)
                if isinstance(reply, dict):
                    reply = frame(kind, reply, request=request, flags=REPLY)
                if reply is not None and not flags & EVENT:
                    connection.sendall(reply)

    def _hello(self):
        return {
            "version": VERSION,
            "daemon_version": "0.1.0",
            "daemon_pid": os.getpid(),
            "pid_namespace": self._namespace,
        }

    def close(self):
        self._listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
