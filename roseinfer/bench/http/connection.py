"""Connections to one server: non-blocking, plain or through TLS, kept open and reused."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import socket
import ssl
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

from roseinfer.bench.http.alarm import Alarm
from roseinfer.bench.http.exchange import Endpoint, Failure
from roseinfer.bench.termination import LONGEST_WAIT_S

MOST_READY: Final = 128
"""Connections read in one go. More would let the first wait long until it is understood."""

READ_BYTES: Final = 64 * 1024
FIND_S: Final = 5.0
"""Patience with each address of a host that has several."""

_OF_THE_SERVER: Final = {
    errno.ECONNREFUSED: Failure.REFUSED,
    errno.ECONNRESET: Failure.RESET,
    errno.ECONNABORTED: Failure.RESET,
    errno.EPIPE: Failure.RESET,
}
_OF_THE_CLIENT: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)

_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

clock: Final = time.perf_counter


class Breakage(NamedTuple):
    """An error of the system, without the traceback that would keep half the client alive."""

    failure: Failure
    error: str


def breakage_of(error: OSError) -> Breakage:
    """Tells whose doing it is."""
    if isinstance(error, ssl.SSLEOFError):
        failure = Failure.CLOSED
    elif isinstance(error, ssl.SSLError):
        failure = Failure.TLS
    elif isinstance(error, socket.gaierror):
        failure = Failure.RESOLVE
    elif error.errno in _OF_THE_CLIENT:
        failure = Failure.CLIENT_LIMIT
    else:
        failure = _OF_THE_SERVER.get(error.errno or 0, Failure.OTHER)
    return Breakage(failure, error.strerror or str(error))


class Route(NamedTuple):
    """One address of a server, and how to speak to it: through TLS with a `tls` that expects `host`."""

    family: int
    address: Any
    host: str
    tls: ssl.SSLContext | None


def find_route(endpoint: Endpoint) -> Route:
    """Resolves the host once; of several addresses the first that accepts a connection. Raises OSError.

    TLS trusts what the system trusts, or what the environment's SSL_CERT_FILE names.
    """
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    tls = ssl.create_default_context() if endpoint.scheme == "https" else None
    routes = [Route(family, address, endpoint.host, tls) for family, _, _, _, address in found]
    for route in routes if len(routes) > 1 else ():
        try:
            with socket.socket(route.family) as probe:
                probe.settimeout(FIND_S)
                probe.connect(route.address)
                return route
        except OSError:
            continue
    return routes[0]


class Connection:
    """A socket on its way to a server, or there. Its methods may raise OSError, and none waits.

    `exchanges` is how many were begun on it. Bytes that the system does not take at once go out with `advance`. An
    error of sending is kept until `receive` has taken what the server may have said before it.
    """

    __slots__ = ("_error", "_handed_bytes", "_has_ended", "_is_there", "_out", "_route", "_socket", "exchanges", "fd",
                 "is_closed", "is_open", "wants_write")  # fmt: skip

    def __init__(self, route: Route) -> None:
        self._route = route
        self._socket = socket.socket(route.family)
        self._is_there = False  # connected, though TLS may not be
        self._out = b""
        self._error: int | None = None
        self._handed_bytes = 0  # that the system took since something was received
        self._has_ended = False  # the server has closed, in order
        self.fd = self._socket.fileno()
        self.is_open = False
        self.is_closed = False
        self.wants_write = True
        self.exchanges = 0
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self._socket.connect_ex(route.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except BaseException:
            self.close()
            raise

    def advance(self) -> None:
        """Goes on connecting, then sending. To be called when it can be written or, before it is open, read."""
        if not self._is_there:
            if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            self._is_there = True
            if self._route.tls is not None:
                self._socket = self._route.tls.wrap_socket(
                    self._socket, server_hostname=self._route.host, do_handshake_on_connect=False
                )
        if not self.is_open:
            self.wants_write = False
            if isinstance(self._socket, ssl.SSLSocket):
                try:
                    self._socket.do_handshake()
                except ssl.SSLWantReadError:
                    return
                except ssl.SSLWantWriteError:
                    self.wants_write = True
                    return
            self.is_open = True
        if self._out:
            out, self._out = self._out, b""
            self.send(out)

    def send(self, data: bytes) -> None:
        """Hands `data` to the system, as much of it as that takes now.

        On its way too: to a server nearby it is often there before anybody could have told.
        """
        if self._out or not (self.is_open or (self._route.tls is None and not self._is_there)):
            self._out += data
            return
        try:
            n = self._socket.send(data)
        except _NOT_NOW:
            n = 0
        except OSError as error:
            if not self.is_open:
                raise
            self._error = error.errno
            self.wants_write = False
            return
        if n:
            self._is_there = self.is_open = True
        self._handed_bytes += n
        self._out = data[n:]
        self.wants_write = bool(self._out)

    def receive(self) -> bytes | None:
        """What has come: None for nothing, b"" once the server has closed."""
        try:
            data = self._socket.recv(READ_BYTES)
            if self._route.tls is not None:
                assert isinstance(self._socket, ssl.SSLSocket)
                while more := self._socket.pending():  # epoll does not know of what TLS holds
                    data += self._socket.recv(more)
        except _NOT_NOW:
            return None
        if data:
            self._handed_bytes = 0
        elif self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        else:
            self._has_ended = True
        return data

    @property
    def has_sent_all(self) -> bool:
        return not self._out

    @property
    def has_lost_race(self) -> bool:
        """The server had closed before a byte of what was sent last was there: it cannot have read any of it.

        A server that resets what it holds open is not meant: what it had read by then nobody knows.
        """
        if self._error is not None:
            return not self._handed_bytes
        if not self._has_ended or not self._handed_bytes:
            return False
        # What the system of the server has not acknowledged. TLS makes more bytes of them.
        (unacknowledged,) = struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCOUTQ, bytes(4)))
        return bool(unacknowledged >= self._handed_bytes)

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()


class Pool:
    """The open connections to one server. The one given back last is lent first, so that few are in use.

    In a `with` that no connection outlives. `opened` counts all that were opened, those too that failed. A host
    that is not found is left to the requests to find. Raises RunError where there can be no alarm.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.opened = 0
        self.connections: dict[int, Connection] = {}  # by file descriptor
        self._idle: list[Connection] = []
        self._spare: Connection | None = None
        self._masks: dict[int, int] = {}
        self._route: Route | None = None
        self._why_no_route = ""
        try:
            self._route = find_route(endpoint)
        except (OSError, UnicodeError) as error:
            self._why_no_route = str(error)
        self._alarm = Alarm()
        self._epoll = select.epoll()
        self._epoll.register(self._alarm.fd, select.EPOLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._alarm.close()
        self._epoll.close()

    def open_ahead(self, n: int) -> None:
        """Opens up to `n` connections and waits for them a moment. Those that fail are left to the requests to find."""
        opening = set()
        for _ in range(n):
            try:
                opening.add(self.open())
            except OSError:
                break
        until_s = clock() + FIND_S
        while opening and clock() < until_s:
            for connection in self.ready(until_s):
                try:
                    if connection.is_open and connection.receive() is not None:
                        raise ConnectionResetError  # closed already
                    connection.advance()
                except OSError:
                    opening.discard(connection)
                    self.drop(connection)
                    continue
                self.watch(connection)
                if connection.is_open and connection in opening:
                    opening.remove(connection)
                    self.give_back(connection)

    def open(self) -> Connection:
        """A new connection, on its way. Raises OSError."""
        if self._route is None:
            raise socket.gaierror(socket.EAI_NONAME, self._why_no_route)
        connection = Connection(self._route)
        self.opened += 1
        self.connections[connection.fd] = connection
        self._masks[connection.fd] = select.EPOLLIN | select.EPOLLOUT
        self._epoll.register(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        return connection

    def take(self) -> Connection | None:
        """One that is open and idle."""
        return self._idle.pop() if self._idle else None

    def open_spare(self) -> None:
        """Opens one that nobody needs yet; whoever sees it open gives it back. Raises OSError."""
        self._spare = self.open()

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    @property
    def has_spare(self) -> bool:
        """One is idle, or on its way to be."""
        spare = self._spare
        return bool(self._idle) or (spare is not None and not spare.is_open and not spare.is_closed)

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def drop(self, connection: Connection) -> None:
        """Closes it, whatever is going on there."""
        if connection.is_closed:
            return
        if connection in self._idle:
            self._idle.remove(connection)
        del self.connections[connection.fd]
        del self._masks[connection.fd]
        connection.close()  # which takes it from the epoll, too

    def watch(self, connection: Connection) -> None:
        """To be called after `advance` and `send`: waits for what it waits for now."""
        mask = select.EPOLLIN | (select.EPOLLOUT if connection.wants_write else 0)
        if self._masks[connection.fd] != mask:
            self._masks[connection.fd] = mask
            self._epoll.modify(connection.fd, mask)

    def ready(self, until_s: float) -> list[Connection]:
        """Those that can be read or written, at `until_s` (clock seconds) at the latest, or after LONGEST_WAIT_S."""
        left_s = until_s - clock()
        if 0 < left_s < LONGEST_WAIT_S:
            self._alarm.set(until_s)
        found, connections = [], self.connections
        for fd, _ in self._epoll.poll(LONGEST_WAIT_S if left_s > 0 else 0, MOST_READY):
            connection = connections.get(fd)
            if connection is not None:
                found.append(connection)
            else:
                self._alarm.clear()
        return found


@contextmanager
def many_files() -> Iterator[None]:
    """As many open files as this process may ask for: the usual 1,024 are fewer than there are connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
