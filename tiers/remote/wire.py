"""How two machines greet each other, as bytes: each proves the cluster's secret before it says anything else.

Responsibility: the four messages of a greeting and their proofs. What follows them is `kvfs/_native/remote/wire.h`'s or
`tiers.remote.pull_wire`'s; docs/formats.md has all.

Invariants: a proof covers the version, the purpose, both nonces, both ids and the role of its maker, so that it serves
in no other connection and is never its peer's own. Bytes of a peer are checked before they count. Concurrency: pure
functions.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from struct import Struct
from typing import Final

from kvfs.errors import FormatMismatch, NotPermitted, ProtocolError

MAGIC: Final = b"kvfs-rem"
VERSION: Final = 1
BLOCKS, PULLS, FABRIC = 0, 1, 2
"""What a connection is for: requests for blocks (`kvfs/_native/remote/wire.h`), pulls (`tiers.remote.pull_wire`), or
requests for blocks whose bytes go by a fabric (`tiers.remote.connections.fabric`) if both sides have one."""
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
STORE_ID_BYTES: Final = 16
_HELLO: Final = Struct("<8sII16s32s")
HELLO_BYTES: Final = _HELLO.size
WELCOME_BYTES: Final = STORE_ID_BYTES + PROOF_BYTES
_TLS_HANDSHAKE: Final = b"\x16\x03"


@dataclass(frozen=True, slots=True)
class Hello:
    """Greets, as the machine that asks."""

    store_id: bytes
    nonce: bytes
    purpose: int = BLOCKS

    def encode(self) -> bytes:
        """Encode the greeting."""
        return _HELLO.pack(MAGIC, VERSION, self.purpose, self.store_id, self.nonce)


def decode_hello(data: bytes) -> Hello:
    """Return the first message. Raises ProtocolError, FormatMismatch of another version."""
    if len(data) != HELLO_BYTES:
        raise ProtocolError(f"a greeting of {len(data)} bytes instead of {HELLO_BYTES}")
    magic, version, purpose, store_id, nonce = _HELLO.unpack(data)
    if data[:2] == _TLS_HANDSHAKE:
        raise ProtocolError("it speaks TLS: [cluster] certificate, key and authorities are not set here")
    if magic != MAGIC:
        raise ProtocolError("no greeting of a kvfs machine")
    if version != VERSION or purpose not in (BLOCKS, PULLS, FABRIC):
        spoken = f"{version}" if version != VERSION else f"{version}, for purpose {purpose},"
        raise FormatMismatch(f"it speaks version {spoken} of the remote protocol, this service {VERSION}")
    return Hello(store_id, nonce, purpose)


@dataclass(frozen=True, slots=True)
class Proofs:
    """Makes and checks the proofs of one connection; the asker's is checked before the server's is made."""

    secret: bytes
    hello: Hello
    server_nonce: bytes

    def of_asker(self) -> bytes:
        """Return the proof by which the machine that asks shows that it has the secret."""
        return self._proof(b"asks", b"")

    def check_asker(self, proof: bytes) -> None:
        """Raise NotPermitted unless the asker knows the secret."""
        _check(proof, self.of_asker())

    def welcome(self, store_id: bytes) -> bytes:
        """Return the server's id and its proof."""
        return store_id + self._proof(b"serves", store_id)

    def check_welcome(self, data: bytes) -> bytes:
        """Return the server's id. Raises ProtocolError, NotPermitted."""
        if len(data) != WELCOME_BYTES:
            raise ProtocolError(f"a welcome of {len(data)} bytes instead of {WELCOME_BYTES}")
        store_id = data[:STORE_ID_BYTES]
        _check(data[STORE_ID_BYTES:], self._proof(b"serves", store_id))
        return store_id

    def _proof(self, role: bytes, server_id: bytes) -> bytes:
        said = b"\0".join([MAGIC, role]) + self.hello.encode() + self.server_nonce + server_id
        return hmac.digest(self.secret, said, "sha256")


def _check(proof: bytes, right: bytes) -> None:
    if not hmac.compare_digest(proof, right):
        raise NotPermitted("it does not know the cluster's secret")
