"""The fixed records of the session protocol's bodies, and their flags (docs/sessions.md is the specification).

Invariants: integers are little-endian, records are multiples of eight bytes with natural alignment, so that native
code reads them in place. Concurrency: constants.
"""

import struct
from typing import Final

BATCH: Final = struct.Struct("<II")
HELLO: Final = struct.Struct("<8sII")
HELLO_ANSWER: Final = struct.Struct("<8sII16s")
HINT: Final = struct.Struct("<Q")
DRAFT: Final = struct.Struct("<II")
BLOCK_SEAL: Final = struct.Struct("<II16s16sIIQ")
NAME_SEAL: Final = struct.Struct("<IIIIqQHHI")
NAME: Final = struct.Struct("<HHI")
EXTENT: Final = struct.Struct("<iIIIQ")
RESULT: Final = struct.Struct("<iIQ")
COUNT: Final = struct.Struct("<II")
STATUS: Final = struct.Struct("<iHH")

HAS_CHECKSUM: Final = 1
REPLACE: Final = 2
HAS_MTIME: Final = 4
HAS_EXPECTED: Final = 8
NEEDS_MARKER: Final = 16
MAY_OPEN: Final = 1
KEPT: Final = 1
ALIGNMENT: Final = 8
