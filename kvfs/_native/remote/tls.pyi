"""TLS 1.3 between machines of a cluster, each with a certificate that their authority has signed."""

from os import PathLike

from typing_extensions import CapsuleType, disjoint_base

@disjoint_base
class Context:
    """What this machine shows, and whom it believes."""

    def __init__(
        self,
        certificate: str | PathLike[str],
        key: str | PathLike[str],
        authorities: str | PathLike[str],
        key_bytes: int = ...,
    ) -> None:
        """Read three PEM files. After `key_bytes` of data a session takes new keys. Raises ConfigError that names the
        file."""

    @property
    def ends_s(self) -> int:
        """Return until when the certificate counts, in seconds since 1970; 0 where it does not say."""

    def session(self, socket: int, serves: bool) -> Session:
        """Return a session over a connected socket, which stays the caller's and has to outlive it."""

@disjoint_base
class Session:
    """One connection, whose handshake is first. What returns None is to be called again once the socket is ready."""

    def __init__(self, context: Context, socket: int, serves: bool) -> None: ...
    def handshake(self) -> bool:
        """Return whether both sides have shown their certificates. Raises NotPermitted of a certificate that is not of
        the authority or is none, ProtocolError, OSError."""

    def send(self, data: bytes) -> int | None:
        """Send some bytes, and return how many. Raises OSError, ProtocolError."""

    def receive(self, most: int) -> bytes | None:
        """Return bytes that came, none at the end of the stream. Raises OSError, ProtocolError."""

    @property
    def wants_room(self) -> bool:
        """Return whether the socket has to take bytes first; else some have to come."""

    @property
    def capsule(self) -> CapsuleType:
        """Return the session as `Stream` and `Server.open` take it."""

    def take(self) -> None:
        """Leave the session to who has taken it."""
