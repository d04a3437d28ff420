"""One connection to a Valkey server that moves values between the socket and the caller's memory, and copies none.

RESP2, as far as GET, MGET, SET, DEL and the handshake need it. A command and its values leave in one `sendmsg`;
a value is received where it belongs, behind the first bytes that came with the reply's head. The socket blocks
in the kernel under SO_SNDTIMEO and SO_RCVTIMEO, so a thread enters and leaves Python a few times a call, however many
values and segments it takes: another thread that computes in Python costs it a few waits for the interpreter, not
hundreds, and loses as few turns of it.

Silence is what times out, not size (`silence.py`): a slow link makes slow calls and no failures; how long a call may take
all the same, whoever calls says (`deadline`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from glm_connectors.valkey_store.clients import ABSENT, MISFIT
from glm_connectors.valkey_store.silence import Silence, dial

_LINE = 4096  # bytes of a reply's line at most; Valkey's error messages are shorter
_NIL = b"$-1\r\n"
_TAKEN = b"+OK\r\n"  # the shortest answer to a SET: an error's is longer
_PARTS = 1000  # of one sendmsg or recvmsg_into; Linux takes 1024
_NAME = b"glm_connectors"
_LOOK = int(socket.MSG_PEEK) | int(socket.MSG_DONTWAIT)
_FRESH = 1.0  # seconds after an answer in which a connection is taken to be as it was
_HOLES = 1.0  # seconds after a hole in which values are received one by one
# Load balancers, NATs and firewalls forget a silent connection after minutes, Linux would ask after two hours. Seconds,
# seconds, times.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class RefusedError(Exception):
    """The server's error reply, in its words. The connection is as good as before."""


class OutOfStepError(ConnectionError):
    """What came is no reply to what was asked: the connection is of no use any more."""


class Connection:
    """Commands and their replies in step. Of one thread.

    After any exception but RefusedError it is out of step, and is to be closed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        username: str,
        password: str,
        database: int,
        connect_timeout: float,
        timeout: float,
    ) -> None:
        """Connects and signs in. OSError, RefusedError.

        connect_timeout: seconds for all addresses of `host` together, and again for signing in at the one that took the
        connection. timeout: of silence, from then on.
        """
        self._socket = dial(host, port, connect_timeout)
        try:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
            self._line = bytearray(_LINE)  # bytes that came and belong to nobody yet: [start, end)
            self._start = self._end = 0
            self._calls = 0
            self._heard = False  # a byte, since the last command began
            self._answered = float("-inf")  # when a byte came last
            self._hole = float("-inf")  # when a value was not there that was expected
            self._silence = Silence(self._socket)
            self._silence.ends_after(connect_timeout)
            deadline = time.monotonic() + connect_timeout
            if username or password:  # a user may have none
                user = [username.encode()] if username else []
                self._ask([b"AUTH", *user, password.encode()], deadline)
            if database:
                self._ask([b"SELECT", b"%d" % database], deadline)
            try:
                self._ask([b"CLIENT", b"SETNAME", _NAME], deadline)
            except RefusedError as error:
                # A user may lack the right to it; whatever else it is, comes again. But who has not signed in is told so
                # here only: a value is longer than such a client may send, and ends the connection without a word.
                if str(error).startswith("NOAUTH"):
                    raise
            self._silence.ends_after(timeout)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def idle(self) -> bool:
        """Whether the server still holds its end and nothing has come unasked. Never blocks. Soon after an answer that is
        taken for granted: to ask costs a turn of the interpreter, and a command that meets the end goes out again. A
        stray reply within that time would be taken for the next one's; Valkey sends none, and values have checksums.
        """
        if self._start != self._end:
            return False
        if time.monotonic() - self._answered < _FRESH:
            return True
        try:
            self._socket.recv(1, _LOOK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end, or a stray reply

    def ended_before(self) -> bool:
        """Of one that has failed: whether it may have ended before its last call, in a silence since the one before. What
        stands between answers the first bytes after that with a reset."""
        return self._calls > 1 and not self._heard

    def get(self, names: Sequence[str], buffers: Sequence[memoryview], deadline: float) -> list[int]:
        """Values into buffers; bytes, ABSENT or MISFIT each. One command. RefusedError for its error reply.

        deadline: by time.monotonic(), here and below.
        """
        self._calls += 1
        if len(names) == 1:
            self._send([_command(b"GET", names)], deadline)
            return [self._value(buffers[0], deadline)]
        # The last one first: pages are saved from a prompt's beginning on, so where it is there, all are most likely.
        self._send([_command(b"MGET", [names[-1], *names[:-1]])], deadline)
        head = self._head(deadline)
        if head != b"*%d" % len(names):
            raise OutOfStepError(f"expected an array of {len(names)} values, found {head[:40]!r}")
        try:
            last, others = self._value(buffers[-1], deadline), buffers[:-1]
            if last == buffers[-1].nbytes and time.monotonic() - self._hole >= _HOLES:
                if self._all_fit(others, deadline):
                    return [buffer.nbytes for buffer in buffers]
                self._hole = time.monotonic()
            if last == ABSENT and self._none_there(len(others)):
                return [ABSENT] * len(names)
            return [*(self._value(buffer, deadline) for buffer in others), last]
        except (
            RefusedError
        ) as error:  # in the place of a value, as proxies answer; the other values are still to come
            raise OutOfStepError(f"an error within an array: {error}") from None

    def set(
        self, names: Sequence[str], values: Sequence[memoryview], ttl: int, deadline: float
    ) -> list[RefusedError | None]:
        """Sets values, all sent before the first answer is read: the error reply to each, or None.

        ttl: seconds that they live, 0 for ever.
        """
        expiry = b"\r\n" + _words([b"EX", b"%d" % ttl]) if ttl else b"\r\n"
        self._calls += 1
        verb = b"*%d\r\n$3\r\nSET\r\n" % (5 if ttl else 3)
        parts: list[memoryview | bytes] = []
        between = b""
        for name, value in zip(names, values, strict=True):
            key = name.encode()
            parts += [b"%s%s$%d\r\n%s\r\n$%d\r\n" % (between, verb, len(key), key, value.nbytes), value]
            between = expiry
        self._send([*parts, between], deadline)
        answers: list[RefusedError | None] = []
        self._expect(len(names) * len(_TAKEN), deadline)
        if self._line[self._start : self._end] == _TAKEN * len(names):
            self._start = self._end
            self._forget()
            return [None] * len(names)
        for _ in names:
            try:
                head = self._head(deadline)
            except RefusedError as error:
                answers.append(error.with_traceback(None))
                continue
            if head != b"+OK":
                raise OutOfStepError(f"expected the answer to a SET, found {head[:40]!r}")
            answers.append(None)
        return answers

    def delete(self, names: Sequence[str], deadline: float) -> int:
        """Deletes keys; how many there were."""
        self._calls += 1
        self._send([_command(b"DEL", names)], deadline)
        head = self._head(deadline)
        if head[:1] != b":" or not head[1:].isdigit():
            raise OutOfStepError(f"expected the answer to a DEL, found {head[:40]!r}")
        return int(head[1:])

    def _ask(self, words: list[bytes], deadline: float) -> None:
        self._send([b"*%d\r\n%s" % (len(words), _words(words))], deadline)
        head = self._head(deadline)
        if head != b"+OK":
            raise OutOfStepError(f"expected an answer to {words[0].decode()}, found {head[:40]!r}")

    # -- what goes out ---------------------------------------------------------------------------------------

    def _send(self, parts: list[memoryview | bytes], deadline: float) -> None:
        first = 0
        total = sum(map(len, parts))
        self._heard = False
        self._silence.broken()
        while first < len(parts):
            _check(deadline)
            try:
                sent = self._socket.sendmsg(parts[first : first + _PARTS])
            except BlockingIOError:
                self._silence.waited()
                continue
            self._silence.broken()
            if not first and sent == total:
                return
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = memoryview(parts[first])[sent:]

    # -- what comes in ---------------------------------------------------------------------------------------

    def _head(self, deadline: float) -> bytes:
        """A reply's first line, without its end. RefusedError for an error reply."""
        looked = self._start
        while (end := self._line.find(b"\r\n", looked, self._end)) < 0:
            looked = max(self._start, self._end - 1)
            if self._end == len(self._line):
                if not self._start:
                    raise OutOfStepError(f"a line without an end: {bytes(self._line[:40])!r}")
                looked -= self._start
                self._make_room()
            self._more(deadline)
        head = bytes(self._line[self._start : end])
        self._start = end + 2
        self._forget()
        if head[:1] == b"-":
            raise RefusedError(head[1:].decode(errors="replace"))
        return head

    def _expect(self, size: int, deadline: float) -> None:
        """Has so many bytes of replies in the line, or a line full: one call, where a server answers in pieces."""
        self._make_room()
        while self._end < min(size, _LINE):
            self._more(deadline, min(size, _LINE), socket.MSG_WAITALL)

    def _more(self, deadline: float, upto: int | None = None, flags: int = 0) -> None:
        """Bytes into the line, behind those that it has."""
        while True:
            _check(deadline)
            try:
                came = self._socket.recv_into(memoryview(self._line)[self._end : upto], 0, flags)
            except BlockingIOError:
                self._silence.waited()
                continue
            if not came:
                raise ConnectionResetError("the server closed the connection")
            self._heard = True
            self._silence.broken()
            self._answered = time.monotonic()
            self._end += came
            return

    def _make_room(self) -> None:
        """What the line has, to its front."""
        kept = self._line[self._start : self._end]
        self._start, self._end = 0, len(kept)
        self._line[: self._end] = kept

    def _value(self, buffer: memoryview, deadline: float) -> int:
        head = self._head(deadline)
        if head == b"$-1":
            return ABSENT
        if head[:1] != b"$" or not head[1:].isdigit():
            raise OutOfStepError(f"expected a value, found {head[:40]!r}")
        size = int(head[1:])
        end = bytearray(2)
        if size > buffer.nbytes:
            rest = size
            while rest:
                rest -= self._receive([memoryview(bytearray(min(rest, 1 << 20)))], deadline)
            self._receive([memoryview(end)], deadline)
        else:
            self._receive([buffer[:size], memoryview(end)], deadline)
        if end != b"\r\n":
            raise OutOfStepError(f"a value of {size} bytes is longer than it says")
        return MISFIT if size > buffer.nbytes else size

    def _receive(self, parts: list[memoryview], deadline: float) -> int:
        """Fills `parts`; how many bytes they are."""
        total = sum(map(len, parts))
        while parts:
            if not self._fill(parts, deadline):
                self._silence.waited()
        return total

    def _fill(self, parts: list[memoryview], deadline: float) -> bool:
        """One step of it: takes off `parts` what it has filled. False where nothing came in time."""
        if self._start != self._end:
            came = min(self._end - self._start, len(parts[0]))
            parts[0][:came] = self._line[self._start : self._start + came]
            self._start += came
            self._forget()
        else:
            _check(deadline)
            try:
                came, _, _, _ = self._socket.recvmsg_into(parts[:_PARTS], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                return False
            if not came:
                raise ConnectionResetError("the server closed the connection within a value")
            self._silence.broken()
        first = 0
        while first < len(parts) and came >= len(parts[first]):
            came -= len(parts[first])
            first += 1
        del parts[:first]
        if came:
            parts[0] = parts[0][came:]
        return True

    def _none_there(self, count: int) -> bool:
        """Whether what the line has is `count` values that are not there; they are taken from it then."""
        if self._line[self._start : self._end] != _NIL * count:
            return False
        self._start = self._end
        self._forget()
        return True

    def _all_fit(self, buffers: Sequence[memoryview], deadline: float) -> bool:
        """Receives values of which each is expected to fill its buffer, in one call of the kernel for all of them: with a
        call a value, each costs a turn of the interpreter. False where they are others: what came is in the line again.

        Values that are not there leave fewer bytes than expected, so a wait is short and followed by a look at what has
        come so far.
        """
        between = [b"\r\n$%d\r\n" % buffer.nbytes for buffer in buffers]
        between[0] = between[0][2:]
        between.append(b"\r\n")
        expected = b"".join(between)
        found = bytearray(len(expected))
        parts: list[memoryview] = []
        at = 0
        texts = memoryview(found)
        for text, buffer in zip(between, [*buffers, texts[:0]], strict=True):
            parts += [texts[at : at + len(text)], buffer]
            at += len(text)
        parts.pop()
        total = sum(map(len, parts))
        left = list(parts)
        while left:
            if not self._fill(left, deadline):
                self._silence.waited()
            came = total - sum(map(len, left))
            if not _begins(parts, came, expected):
                self._give_back(parts, came)
                return False
        return True

    def _give_back(self, parts: Sequence[memoryview], came: int) -> None:
        """The first `came` bytes of `parts` are to be read anew."""
        kept = bytearray()
        for part in parts:
            kept += part[: max(0, came - len(kept))]
        kept += memoryview(self._line)[self._start : self._end]
        self._start, self._end = 0, len(kept)
        kept += bytes(_LINE)
        self._line = kept

    def _forget(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._line) > _LINE:
                self._line = bytearray(_LINE)


def _begins(parts: Sequence[memoryview], came: int, expected: bytes) -> bool:
    """Whether what lies between values, every other one of `parts`, is `expected` as far as the first `came` bytes go."""
    seen = bytearray()
    for number, part in enumerate(parts):
        if came <= 0:
            break
        if number % 2 == 0:
            seen += part[:came]
        came -= len(part)
    return expected.startswith(seen)


def _check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError("timed out in all")


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in words])


def _command(verb: bytes, names: Sequence[str]) -> bytes:
    return b"*%d\r\n%s" % (1 + len(names), _words([verb, *(name.encode() for name in names)]))
