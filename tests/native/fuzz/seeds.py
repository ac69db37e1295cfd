"""Seeds of the fuzz targets, into a folder each: `python tests/native/fuzz/seeds.py FOLDER`."""

import struct
import sys
from pathlib import Path

import xxhash

SIGNED = (
    "Host: bucket.example\r\nx-amz-date: 20260102T030405Z\r\nx-amz-content-sha256: UNSIGNED-PAYLOAD\r\n"
    "Authorization: AWS4-HMAC-SHA256 Credential=KEY/20260102/us-east-1/s3/aws4_request, "
    "SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=" + "0f" * 32 + "\r\n"
)
HEADS = {
    "get": f"GET /bucket/a%20key HTTP/1.1\r\n{SIGNED}\r\n",
    "head": f"HEAD /bucket/dir/key HTTP/1.1\r\n{SIGNED}x-amz-checksum-mode: ENABLED\r\nUser-Agent: x\r\n\r\n",
    "put": f"PUT /bucket/key HTTP/1.1\r\n{SIGNED}Content-Length: 17\r\nExpect: 100-continue\r\n"
    "x-amz-checksum-crc64nvme: AAAAAAAAAAA=\r\nx-amz-sdk-checksum-algorithm: CRC64NVME\r\n\r\n",
}

ROOT, SEALED, DRAFT = 1, 2, 3
LISTING = 5
NATIVE = 1 << 63
REQUESTS = {
    "init": [(26, ROOT, struct.pack("<5I", 7, 45, 1 << 17, 1 << 30, 0) + bytes(44))],
    "lookup": [(1, ROOT, b"sealed\0"), (1, ROOT, b"none\0"), (2, SEALED, struct.pack("<Q", 1))],
    "forget": [(1, ROOT, b"draft\0"), (42, 0, struct.pack("<II2Q", 1, 0, DRAFT, 1))],
    "attributes": [(3, DRAFT, bytes(16)), (3, SEALED, bytes(16)), (22, ROOT, bytes(8) + b"user.x\0")],
    "open": [
        (14, SEALED, bytes(8)),
        (15, SEALED, struct.pack("<QQIIQII", NATIVE | SEALED, 1, 99, 0, 0, 0, 0)),
        (25, SEALED, struct.pack("<QIIQ", NATIVE | SEALED, 0, 0, 9)),
        (18, SEALED, struct.pack("<QIIQ", NATIVE | SEALED, 0, 0, 9)),
    ],
    "write": [
        (16, DRAFT, struct.pack("<QQIIQII", 1, 3, 5, 0, 0, 0, 0) + b"bytes"),
        (43, DRAFT, struct.pack("<QQQII", 1, 0, 9, 0, 0)),
        (46, DRAFT, struct.pack("<QQII", 1, 0, 3, 0)),
    ],
    "create": [(35, ROOT, struct.pack("<4I", 1, 0o100644, 0, 0) + b"made\0")],
    "rename": [
        (12, ROOT, struct.pack("<Q", ROOT) + b"draft\0moved\0"),
        (45, ROOT, struct.pack("<QII", ROOT, 1, 0) + b"moved\0sealed\0"),
        (10, ROOT, b"sealed\0"),
    ],
    "locks": [
        (opcode, SEALED, struct.pack("<QQQQIIII", 1, owner, 0, 9, kind, 7, flags, 0))
        for opcode, owner, kind, flags in (
            (32, 1, 1, 0),
            (31, 2, 1, 0),
            (33, 2, 1, 0),
            (32, 1, 2, 0),
            (32, 3, 1, 1),
        )
    ],
    "interrupt": [
        (33, SEALED, struct.pack("<QQQQIIII", 1, 1, 0, 9, 1, 7, 0, 0)),
        (36, 0, struct.pack("<Q", 6)),
    ],
    "listing": [(44, ROOT, struct.pack("<QQIIQII", LISTING, 0, 4096, 0, 0, 0, 0))],
}


def request(number: int, opcode: int, nodeid: int, body: bytes) -> bytes:
    """A request with its length in front."""
    size = 40 + len(body)
    header = struct.pack("<IIQQIIIHH", size, opcode, 4 * number + 2, nodeid, 0, 0, 1, 0, 0)
    return struct.pack("<H", size) + header + body


def item(index: int, status: int, data: bytes) -> bytes:
    """An answer to a READ of three blocks."""
    checksum = xxhash.xxh3_64_intdigest(data)
    head = struct.pack("<IIQIIQQ24x", 0x5449564B, status, 1, index, 2, len(data), checksum)
    return head + (data if status == 0 else b"")


def request_of_a_machine(kind: int, count: int, each: int) -> bytes:
    return struct.pack("<IHHIIQ16s", 0x5152564B, kind, 1, count, 100, 1, b"a namespace's id") + bytes(
        count * each
    )


MACHINES = {
    "found": item(0, 0, b"x" * 512) + item(1, 0, b"") + item(2, 0, b"five."),
    "pieces": item(0, 4, bytes(1_200_000)) + item(1, 4, bytes(1)) + item(2, 4, bytes(1 << 18)),
    "late pieces": item(0, 4, b"\1" * 600_000) + item(1, 1, b"") + item(2, 0, b"five\1"),
    "misses": item(0, 1, b"") + item(1, 2, bytes(513)) + item(2, 3, b""),
    "matched": struct.pack("<IIQ3Q", 0x414D564B, 3, 1, 1, 2, 3),
    "read": request_of_a_machine(1, 3, 24),
    "match": request_of_a_machine(2, 3, 16),
}


def main() -> None:
    for folder in ("head", "requests", "remote"):
        (Path(sys.argv[1]) / folder).mkdir(parents=True, exist_ok=True)
    for name, head in HEADS.items():
        (Path(sys.argv[1]) / "head" / name).write_bytes(head.encode())
    for name, said in MACHINES.items():
        (Path(sys.argv[1]) / "remote" / name).write_bytes(said)
    for name, requests in REQUESTS.items():
        packed = b"".join(request(n + 1, *parts) for n, parts in enumerate(requests))
        for first in (b"\0", b"\1"):
            (Path(sys.argv[1]) / "requests" / f"{name}-{first[0]}").write_bytes(first + packed)


main()
