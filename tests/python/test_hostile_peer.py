"""Broken peers end their own connection; the daemon goes on serving everybody else."""

import json
import os
import random
import struct

import pytest

from cachetest import wire
from cachetest.daemon import memory_of, open_descriptors
from cachetest.files import GOOD
from cachetest.waiting import eventually
from cachetest.wire import Raw, frame

HELLO = {"min_version": 1, "max_version": 1}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


def open_body(path, **more):
    return {"files": [{"name": path.name, "path": str(path)}], **more}


UNREADABLE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "magic of another": frame(wire.HELLO, HELLO, magic=b"MDLD"),
    "16 MiB and one": frame(wire.HELLO, b"", length=2**24 + 1),
    "4 GiB": frame(wire.HELLO, b"", length=2**32 - 1),
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("hello", [False, True], ids=["first", "after hello"])
def test_unreadable_frame_ends_its_connection(daemon, data, hello):
    with Raw(daemon.socket) as other, Raw(daemon.socket, hello=hello) as peer:
        peer.send(data)
        assert peer.hung_up()
        assert other.ask(wire.STATUS)[1] == wire.REPLY


@pytest.mark.parametrize("size", [1, 8, 15, 16, 20])
def test_half_a_frame_then_a_hang_up(daemon, size):
    clients = daemon.status()["clients"]
    peer = Raw(daemon.socket, hello=False)
    peer.send(frame(wire.HELLO, HELLO)[:size])
    peer.close()
    eventually(lambda: daemon.status()["clients"] == clients, what="the end of the connection")


def test_half_a_frame_delays_nobody(daemon):
    with Raw(daemon.socket, hello=False) as slow, Raw(daemon.socket) as other:
        data = frame(wire.HELLO, HELLO)
        slow.send(data[:10])
        assert other.ask(wire.STATUS)[1] == wire.REPLY
        slow.send(data[10:])
        assert slow.receive()[1] == wire.REPLY


def test_frame_in_single_bytes(daemon):
    with Raw(daemon.socket, hello=False) as peer:
        for byte in frame(wire.HELLO, HELLO) + frame(wire.STATUS, {}, request=7):
            peer.send(bytes([byte]))
        assert peer.receive()[0] == wire.HELLO
        assert peer.receive()[2]["daemon_pid"] == daemon.pid


def test_many_requests_in_one_write_are_all_answered(daemon):
    with Raw(daemon.socket) as peer:
        peer.send(b"".join(frame(wire.STATUS, {}, request=n) for n in range(300)))
        for _ in range(300):
            assert peer.receive()[1] == wire.REPLY


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 10000,
        b'{"min_version":-1}',
        b'{"min_version":1}',
        b'{"min_version":1,"max_version":99999999999999999999}',
    ],
)
def test_hello_of_the_wrong_form(daemon, body):
    with Raw(daemon.socket, hello=False) as peer:
        kind, flags, reply, _ = peer.ask(wire.HELLO, body)
        assert (kind, flags) == (wire.HELLO, wire.REPLY | wire.ERROR)
        assert reply["code"] == 5 and reply["message"]


def test_no_common_version(daemon):
    with Raw(daemon.socket, hello=False) as peer:
        _, flags, reply, _ = peer.ask(wire.HELLO, {"min_version": 7, "max_version": 9})
        assert flags & wire.ERROR and reply["code"] == 6
        assert "7" in reply["message"] and "1" in reply["message"]
        assert peer.hung_up()


def test_frame_of_an_older_version_ends_the_connection(daemon):
    with Raw(daemon.socket) as peer:
        peer.send(frame(wire.STATUS, {}, version=0))
        assert peer.hung_up()


@pytest.mark.parametrize("version", [0, 9])
def test_hello_is_answered_whatever_its_frames_version(daemon, version):
    """So that the peer can say why they do not understand each other."""
    with Raw(daemon.socket, hello=False) as peer:
        _, _, reply, _ = peer.ask(wire.HELLO, {"min_version": 7, "max_version": 9}, version=version)
        assert reply["code"] == 6


def test_request_before_hello(daemon):
    with Raw(daemon.socket, hello=False) as peer:
        _, flags, reply, _ = peer.ask(wire.STATUS)
        assert flags & wire.ERROR and reply["code"] == 5


def test_unknown_type_is_answered_and_the_connection_stays(daemon):
    with Raw(daemon.socket) as peer:
        for kind in (15, 31, 99, 255):
            _, flags, reply, _ = peer.ask(kind)
            assert flags & wire.ERROR and reply["code"] == 11, (kind, reply)
        assert peer.ask(wire.STATUS)[1] == wire.REPLY


@pytest.mark.parametrize("kind", [32, 33, 34, 35, 36, 37, 38])
def test_messages_of_the_loader_channel_are_not_for_clients(daemon, kind):
    with Raw(daemon.socket) as peer:
        _, flags, reply, _ = peer.ask(kind, {"kind": 1, "arenas": [], "model_id": "0" * 32})
        assert flags & wire.ERROR and reply["code"] in (5, 11)
        assert peer.ask(wire.STATUS)[1] == wire.REPLY


WRONG_BODIES = {
    "open nothing": (wire.OPEN, {}),
    "open files as text": (wire.OPEN, {"files": "x"}),
    "open without descriptors": (wire.OPEN, {"files": [{"name": "a", "path": "/a"}]}),
    "open both": (wire.OPEN, {"files": [{"name": "a", "path": "/a"}], "model": "x"}),
    "open timeout negative": (wire.OPEN, {"model": "x", "timeout_ms": -1}),
    "open unknown format": (wire.OPEN, {"model": "x", "format": 7}),
    "open absent model": (wire.OPEN, {"model": "x"}),
    "descriptors of no lease": (wire.DESCRIPTORS, {"lease": 99, "first": 0, "count": 1}),
    "descriptors far out": (wire.DESCRIPTORS, {"lease": 1, "first": 2**32 - 1, "count": 2**32 - 1}),
    "evict a number": (wire.EVICT, {"model": 5}),
    "evict nothing": (wire.EVICT, {}),
    "evict a long name": (wire.EVICT, {"model": "x" * 100000}),
    "pin without a side": (wire.PIN, {"model": "x"}),
    "why an empty name": (wire.WHY, {"model": ""}),
    "not an object": (wire.EVICT, ["x"]),
}


@pytest.mark.parametrize("kind, body", WRONG_BODIES.values(), ids=WRONG_BODIES.keys())
def test_wrong_bodies_get_an_error_and_the_connection_stays(daemon, kind, body):
    with Raw(daemon.socket) as peer:
        _, flags, reply, _ = peer.ask(kind, body)
        if kind == wire.WHY:
            assert flags & wire.REPLY
        else:
            assert flags & wire.ERROR and reply["code"] in (1, 2, 5, 16), reply
            assert reply["message"]
        assert peer.ask(wire.STATUS)[1] == wire.REPLY


def test_release_of_what_was_never_leased_is_ignored(daemon, client, path):
    model = client.open(path)
    leases = daemon.status()["leases"]
    with Raw(daemon.socket) as peer:
        for lease in range(200):
            peer.send(frame(wire.RELEASE, {"lease": lease}, flags=wire.EVENT))
        assert peer.ask(wire.STATUS)[1] == wire.REPLY
    assert daemon.status()["leases"] == leases
    model.close()


def test_descriptors_of_the_wrong_kind(daemon, path):
    """A pipe, a socket, a folder, a device, a file opened for writing only."""
    read, write = os.pipe()
    folder = os.open(path.parent, os.O_RDONLY)
    device = os.open("/dev/zero", os.O_RDONLY)
    writing = os.open(path, os.O_WRONLY)
    try:
        for descriptor in (read, write, folder, device, writing):
            with Raw(daemon.socket) as peer:
                peer.send(frame(wire.OPEN, open_body(path), fds=1), [descriptor])
                _, flags, reply, _ = peer.receive()
                assert flags & wire.ERROR and reply["message"], reply
                assert peer.ask(wire.STATUS)[1] == wire.REPLY
    finally:
        for descriptor in (read, write, folder, device, writing):
            os.close(descriptor)


def test_descriptors_nobody_announced_do_not_stay_open(daemon, path):
    before = open_descriptors(daemon.pid)
    source = os.open(path, os.O_RDONLY)
    try:
        with Raw(daemon.socket) as peer:
            for _ in range(50):
                peer.send(frame(wire.STATUS, {}), [source] * 4)
                if peer.receive() is None:
                    break
        eventually(
            lambda: len(open_descriptors(daemon.pid)) <= len(before), what="closed descriptors"
        )
    finally:
        os.close(source)


def test_fewer_descriptors_than_announced(daemon, path):
    source = os.open(path, os.O_RDONLY)
    try:
        with Raw(daemon.socket) as peer:
            peer.send(frame(wire.OPEN, open_body(path), fds=3), [source])
            answer = peer.receive()
            assert answer is None or answer[1] & wire.ERROR
    finally:
        os.close(source)


def test_two_hundred_idle_connections(daemon, client, path):
    clients = daemon.status()["clients"]
    idle = [Raw(daemon.socket, hello=n % 2 == 0) for n in range(200)]
    assert client.open(path).raw("w").cast("f").tolist() == [1.0, 2.0]
    for peer in idle:
        peer.close()
    eventually(lambda: daemon.status()["clients"] == clients, what="the end of the connections")


def test_peer_that_never_reads(daemon, client):
    """Replies pile up for it alone, and not without bound."""
    before = memory_of(daemon.pid, "Rss")
    with Raw(daemon.socket, seconds=1) as deaf:
        data = frame(wire.LIST, {}) * 1000
        try:
            for _ in range(200):
                deaf.send(data)
        except (TimeoutError, ConnectionError):
            pass
        assert client.status()["daemon_pid"] == daemon.pid
    assert memory_of(daemon.pid, "Rss") - before < 64 * 2**20


def mutated(source, data):
    data = bytearray(data)
    for _ in range(source.randint(1, 4)):
        choice = source.random()
        at = source.randrange(len(data))
        if choice < 0.5:
            data[at] = source.randrange(256)
        elif choice < 0.7:
            del data[at : at + source.randint(1, 8)]
        elif choice < 0.9:
            data[at:at] = source.randbytes(source.randint(1, 8))
        else:
            struct.pack_into("<I", data, min(12, len(data) - 4), source.choice([0, 5, 2**31]))
        if not data:
            return b"\0"
    return bytes(data)


def test_mutated_frames_with_a_fixed_seed(daemon, path):
    source = random.Random(20240607)
    seeds = [frame(kind, body) for kind, body in WRONG_BODIES.values()]
    seeds += [frame(wire.OPEN, open_body(path)), frame(wire.STATUS, {}), frame(wire.HELLO, HELLO)]
    for round_number in range(600):
        hello = round_number % 3 != 0
        peer = Raw(daemon.socket, hello=hello)
        try:
            peer.send(b"".join(mutated(source, source.choice(seeds)) for _ in range(3)))
        except (BrokenPipeError, ConnectionResetError):
            pass
        peer.close()
    daemon.alive_probe()


def test_answers_are_json_objects(daemon):
    with Raw(daemon.socket) as peer:
        for kind in (wire.LIST, wire.STATUS, 12):
            _, flags, body, _ = peer.ask(kind)
            assert flags == wire.REPLY and isinstance(body, dict)
            json.dumps(body)
