"""What the leader of several hosts tells those who follow it: frames, in order, over ZMQ.

The sockets are encrypted, and open to those alone who have the keys: the leader makes them anew at every
start, and hosts get them by `hosts.link`. Both sides beat, and notice who is gone. No jax.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from hex_llm.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

BEAT_S = 0.5
SILENT_S = 10.0  # after which a host is taken for gone; one whose process has ended is missed at once
MAX_FRAME = 1 << 30  # an adapter's weights; ZMQ hangs up on who announces more
MAX_GREETING = 4096  # bytes, those of the handshake too
LINGER_MS = 1000
HERE = b"here"
END = b""

Socket = zmq.Socket[bytes]
Keys = tuple[bytes, bytes]  # public, secret


class Invitation(msgspec.Struct, array_like=True):
    address: str
    beats_address: str
    leader_key: bytes
    follower_key: Keys  # one for all


class Leader:
    """Sends what it is given to all others."""

    def __init__(self, host: str, num_followers: int) -> None:
        self._names = [_name(1 + i) for i in range(num_followers)]
        keys, follower_key = zmq.curve_keypair(), zmq.curve_keypair()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._guard = guarded(self._context, follower_key[0])
        self._socket, self._beats = (self._listening(keys) for _ in range(2))
        address, beats_address = bound(self._socket, host), bound(self._beats, host)
        asked = Invitation(address, beats_address, keys[0], follower_key)
        self.invitation = msgspec.msgpack.encode(asked)
        self._watch = Watch(self._beats, self._names)

    def _listening(self, keys: Keys) -> Socket:
        socket = self._context.socket(zmq.ROUTER)
        configure(socket, MAX_GREETING)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # what is sent to a host that is gone fails
        encrypt_server(socket, keys)
        return socket

    def await_followers(self, timeout_s: float) -> None:
        for socket in (self._socket, self._beats):
            missing = set(self._names)
            while missing:
                if not socket.poll(int(timeout_s * 1000)):
                    raise ConfigError(
                        f"{len(missing)} of the other hosts did not connect within {timeout_s:.0f} s"
                    )
                missing.discard(socket.recv_multipart()[0])

    def on_loss(self, call: Callable[[], None]) -> None:
        """`call`, in another thread, when one of the others is gone."""
        self._watch.start(call)

    def send(self, frame: bytes) -> None:
        for name in self._names:
            try:
                self._socket.send_multipart((name, frame), copy=len(frame) < 1 << 16)
            except zmq.ZMQError as error:
                raise ModelError(f"host {name.decode()} of this replica is gone: {error}") from error

    def close(self) -> None:
        """Tells the others that this is the end."""
        self._watch.stop()
        self.send(END)
        self._socket.close(LINGER_MS)
        self._beats.close(0)
        self._guard.stop()
        self._context.term()


class Follower:
    """Gets what the leader sends, from its socket; END: the leader has ended."""

    def __init__(self, invitation: bytes, index: int) -> None:
        asked = msgspec.msgpack.decode(invitation, type=Invitation)
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket, self._beats = (self._socket_to(asked, index) for _ in range(2))
        self._watch = Watch(self._beats, [b""])
        self.socket.connect(asked.address)
        self._beats.connect(asked.beats_address)
        for socket in (self.socket, self._beats):
            socket.send(HERE)

    def _socket_to(self, asked: Invitation, index: int) -> Socket:
        socket = self._context.socket(zmq.DEALER)
        configure(socket, MAX_FRAME)
        socket.setsockopt(zmq.IDENTITY, _name(index))
        encrypt_client(socket, asked.leader_key, asked.follower_key)
        return socket

    def on_loss(self, call: Callable[[], None]) -> None:
        """`call`, in another thread, when the leader is gone."""
        self._watch.start(call)

    def close(self) -> None:
        self._watch.stop()
        self.socket.close(0)
        self._beats.close(0)
        self._context.term()


def guarded(context: zmq.Context[Socket], client_key: bytes) -> ThreadAuthenticator:
    """Only who has this key may connect to the context's encrypted sockets, from now on; to be stopped."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(credentials_provider=Allowed(client_key))
    return guard


def encrypt_server(socket: Socket, own: Keys) -> None:
    socket.curve_server, (socket.curve_publickey, socket.curve_secretkey) = True, own


def encrypt_client(socket: Socket, server_key: bytes, own: Keys) -> None:
    socket.curve_serverkey, (socket.curve_publickey, socket.curve_secretkey) = server_key, own


class Allowed:
    """Who may connect: ZMQ's credentials provider."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class Watch:
    """A thread that beats to the peers of a socket, by these names, and misses their beats."""

    def __init__(self, socket: Socket, names: list[bytes]) -> None:
        self._socket, self._names, self._stopped = socket, names, threading.Event()
        self._ended = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(call,), name="hosts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.disable_monitor()
        self._ended.close(0)

    def _run(self, call: Callable[[], None]) -> None:
        silent_s, looked = dict.fromkeys(self._names, 0.0), time.monotonic()
        while not self._stopped.wait(BEAT_S):
            now = time.monotonic()
            # Who was stopped himself does not blame others for that time.
            passed, looked = min(now - looked, 2 * BEAT_S), now
            silent_s = {name: silent + passed for name, silent in silent_s.items()}
            while self._socket.poll(0):
                silent_s[b"".join(self._socket.recv_multipart()[:-1])] = 0.0
            if not self._beat() or max(silent_s.values()) > SILENT_S:
                call()
                return

    def _beat(self) -> bool:
        """False: a peer's process has ended. Of the leader's, which strangers may knock at, sending tells."""
        try:
            for name in self._names:
                self._socket.send_multipart([name, HERE] if name else [HERE])
        except zmq.ZMQError:
            return False
        return bool(self._names[0]) or not self._ended.poll(0)


def configure(socket: Socket, max_frame: int) -> None:
    socket.set(zmq.MAXMSGSIZE, max_frame)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.IPV6, 1)


def bound(socket: Socket, host: str) -> str:
    """Where others reach it."""
    port = socket.bind_to_random_port("tcp://*")
    return f"tcp://[{host.strip('[]')}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _name(index: int) -> bytes:
    return str(index).encode()
