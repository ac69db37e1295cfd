"""Limits of HTTP connections and S3, each with its reason."""

from typing import Final

from kvfs.limits.units import GIB, KIB, MIB

# --- gateway: connections --------------------------------------------------------------------------------
MAX_HEAD_BYTES: Final = 32 * KIB
"""Request line and headers together: a key of 1,024 bytes escaped, 2 KiB of metadata, a session token and room."""
MAX_HEADERS: Final = 128
"""Header fields of one request; S3's clients send about twenty."""
MAX_CHUNK_LINE_BYTES: Final = 256
"""The line before a chunk: a signature in aws-chunked takes 97; extensions of HTTP's own chunks are not needed."""
MAX_TRAILER_BYTES: Final = 8 * KIB
"""The trailer section after the last chunk; S3's own trailers are in the payload."""
RECEIVE_BYTES: Final = 256 * KIB
"""Bytes of one read of a socket: the buffer stays in the second-level cache between read, digest and write."""
REMEMBERED_METADATA_BYTES: Final = 2 * KIB
"""Metadata up to this is decoded once, and its headers made once, for 4,096 objects of a gateway process."""
REMEMBERED_OBJECTS: Final = 4_096
"""Objects whose answers' headers a gateway process keeps ready for reads without Python: up to 16 MiB."""
READS_TURN_S: Final = 0.001
"""How long reads are answered without Python before the event loop looks at everything else."""
GATEWAY_BATCH: Final = 32
"""Seals, or opens, of a gateway in one message: a fraction of a millisecond of the service's loop."""
GATEWAY_ROOM_WAIT_S: Final = 20.0
"""How long a body waits for room that other bodies take; then it is refused with SlowDown: clients wait 60 s."""
GATEWAY_ROOM_POLL_S: Final = 0.01
"""How often the first waiting body looks for room: a body of 1 MiB ends about as often."""
FIRST_ROOM_BYTES: Final = 1 * MIB
"""The first room of a body, and of a spare draft; it doubles as it fills: an announced length takes no room."""
OWNER_ROOM_PERCENT: Final = 75
"""The share of a gateway process's room for one owner's bodies."""
ROOM_TURN_S: Final = 60.0
"""While others wait, a body must fill its room within this, the time that clients wait for an answer."""
ENOUGH_RATE_BYTES_S: Final = 1 * MIB
"""A body that comes this fast keeps its room while others wait: a gigabyte in a quarter of an hour."""
ROOM_GRACE_S: Final = 5.0
"""A body's first seconds do not count for its speed: a round trip, and TCP's start."""
ROOM_HURRY_S: Final = 0.05
"""The pause between two bodies that are ended for waiting ones: by then the first one's room is free."""
MAX_TRANSFERS: Final = 128
"""Objects larger than DRAM takes that a gateway process moves at once: each has a session, of MAX_SESSIONS in all."""
GATEWAY_GROW_POLL_S: Final = 0.02
"""How often a body that waits for more room looks for it."""
GATEWAY_SPARE_DRAFTS: Final = 8
"""Drafts that a gateway process under load has granted ahead of use."""
SPARE_OBJECT_BYTES: Final = 16 * MIB
"""A tier whose largest object is smaller is too small for spare drafts: eight take a 64th of it at this size."""
SPARE_RATE: Final = 16
"""Writes in SPARE_INTERVAL_S from which spare drafts pay."""
SPARE_INTERVAL_S: Final = 0.5
INLINE_DIGEST_BYTES: Final = 128 * KIB
"""Bodies up to this are digested as they come: an MD5 of it takes 150 us, a thread's start and end about 80."""
MAX_UPLOADS: Final = 10_000
"""Multipart uploads of one owner under way: records are listed and sorted in memory, 20 MB with the longest keys."""
UPLOADS_LOOK_S: Final = 1.0
"""The least time between two counts of an owner's uploads: 10,000 records take 50 ms."""
EXPIRE_INTERVAL_S: Final = 600.0
"""How often a gateway looks for expired uploads, and for what a kill has left of others."""
COPY_TURN_BYTES: Final = 64 * MIB
"""Bytes copied by one job of a worker thread, which cannot be cancelled: 30 ms."""
WORKER_START_WAIT_S: Final = 20.0
"""How long a gateway worker may take to start."""
WORKER_RESTART_MIN_S: Final = 0.2
WORKER_RESTART_MAX_S: Final = 15.0
"""Pauses before a gateway worker that ended is started again, doubling."""
MAX_GATEWAY_WORKERS: Final = 64
"""Processes that share a port: one per core at most."""
MAX_MARKER_BODY_BYTES: Final = 32 * KIB
"""Body of a key that ends in '/', which is kept with the name: user metadata has 64 KiB."""
GATEWAY_RECONNECT_WAIT_S: Final = 2.0
"""How long a request waits for a service that is gone, before it is answered with 503."""
GATEWAY_RECONNECT_MIN_S: Final = 0.05
GATEWAY_RECONNECT_MAX_S: Final = 1.0
"""Pauses between the gateway's attempts to reach its service, doubling."""
GATEWAY_TOUCH_INTERVAL_S: Final = 0.25
"""How often a gateway reports hits that it read without the service, MAX_BATCH at once; more are not counted."""
MAX_GATEWAY_CONNECTIONS: Final = 4_096
"""Connections of one gateway process, unless configured otherwise: each has a buffer of MAX_HEAD_BYTES."""
ADDRESS_PERCENT: Final = 75
"""An address's share of a gateway process's connections: a proxy may be the only client, others have a quarter."""
PLACES_AT_ONCE_SHARE: Final = 64
"""Silent connections of strangers are closed by this share of all at once: to choose takes a millisecond."""
PLACES_POLL_S: Final = 0.05
"""How often a full server looks for a connection whose request has ended."""
GATEWAY_BACKLOG: Final = 1_024
"""Connections that the kernel queues before they are accepted."""
DRAIN_WAIT_S: Final = 8.0
"""How long a gateway that stops waits for the requests in flight: less than STOP_WAIT_S."""
HEAD_TIMEOUT_S: Final = 15.0
"""From the first byte of a request to the end of its headers."""
FIRST_BYTE_S: Final = 15.0
"""How long a new connection may be quiet before its first request."""
KEEP_ALIVE_S: Final = 75.0
"""How long a connection may be quiet between two requests: clients' pools keep theirs for about a minute."""
BODY_STALL_S: Final = 20.0
"""How long a peer may send, or take, nothing inside a body (S3 itself ends such requests after 20 s)."""
MIN_BODY_RATE_BYTES_S: Final = 256
"""The least average speed of a body after BODY_GRACE_S: a trickle holds a draft or a lease."""
BODY_GRACE_S: Final = 60.0
MAX_DRAIN_BYTES: Final = 256 * KIB
"""The rest of a refused request's body is read away up to this, so that the connection can be used again."""
LINGER_S: Final = 2.0
"""How long a closed connection is still read: a reset would take the answer from the client."""
SWEEP_INTERVAL_S: Final = 1.0
"""How late the end of a wait on a client may be noticed."""
SMALL_BODY_BYTES: Final = 64 * KIB
"""Bodies up to this are sent in one write with their headers; a copy of more costs more than a second call."""
SEND_CHUNK_BYTES: Final = 4 * MIB
"""Bytes sent from a slot at once: bounds the event loop's time for one reader."""
TLS_RECORDS_BYTES: Final = 256 * KIB
"""Bytes read and encrypted at once for a TLS connection."""

# --- watching --------------------------------------------------------------------------------------------
MAX_WATCHERS: Final = 32
"""Streams of events of one process: half of an admin port's connections, the rest are scrapers' and probes'."""
WATCH_INTERVAL_S: Final = 1.0
"""How often watchers are shown what runs: a look takes about a millisecond, and nobody reads faster."""
WATCH_WINDOW_S: Final = 10.0
"""What rates and quantiles that are shown are about: long enough for rare operations, short enough to see a change."""
WATCH_HEARTBEAT_S: Final = 5.0
"""How long a stream is silent while a look takes long."""
WATCH_LOOK_S: Final = 2.0
"""How long a service may take to answer a look before it is shown as one that does not."""
WATCHER_EVENTS: Final = 4
"""Events that wait for a watcher that does not read, before it is dropped: seconds, as each is a whole picture."""
MAX_WATCH_EVENT_BYTES: Final = 4 * MIB
"""One event as `kvfs top` reads it: 256 instances, 512 streams and 200 decisions take 200 KiB."""
WATCHER_SOCKET_BYTES: Final = 256 * KIB
"""What the kernel keeps for such a watcher: the kernel's own choice grows to 4 MiB."""
MAX_PROBLEMS: Final = 20
"""Problems that are named; further ones are counted: hundreds of instances fail together."""
MAX_PANEL_ROWS: Final = 256
"""Rows of one table that is shown; further ones are counted."""

# --- S3 --------------------------------------------------------------------------------------------------
MAX_QUERY_PARAMETERS: Final = 64
"""Parameters of one S3 request; a presigned one has eight besides its own, and no operation takes twenty."""
MAX_CREDENTIALS: Final = 10_000
"""Credentials of the S3 door: a look-up table that every worker holds."""
MAX_ACCESS_KEY_BYTES: Final = 128
MIN_SECRET_KEY_BYTES: Final = 16
"""Shorter secrets are guessed from one captured signature."""
MAX_SECRET_KEY_BYTES: Final = 256
MAX_SIGNING_KEYS: Final = 1_024
"""Derived signing keys that a worker remembers, of (secret, date, region): four HMACs saved on each request."""
MAX_CLOCK_SKEW_S: Final = 900
"""How much the time of a signature may differ from the gateway's clock, as in S3."""
MAX_PRESIGN_EXPIRY_S: Final = 604_800
"""Longest life of a presigned URL: a week, as in S3."""
MAX_SIGNERS: Final = 256
"""Pairs of credential and signed headers whose parsed form a worker keeps, before any signature is checked."""
MAX_SIGNER_BYTES: Final = 4 * KIB
"""Credential and SignedHeaders together: 64 names of 60 bytes; with MAX_SIGNERS bounds the memory for strangers."""
MAX_SIGNED_HEADERS: Final = 64
"""Names in SignedHeaders; clients sign 3 to 12."""
MIN_AWS_CHUNK_BYTES: Final = 8 * KIB
"""The least length of each chunk of an aws-chunked body but the last, as in S3: bounds the framing."""
MAX_AWS_TRAILER_BYTES: Final = 4 * KIB
"""All trailers of one aws-chunked body: a checksum and a signature take 150."""
MAX_PARTS: Final = 10_000
"""Parts of one multipart upload, as in S3."""
MIN_PART_BYTES: Final = 5 * MIB
"""The least size of every part but the last, as in S3."""
MAX_SINGLE_PUT_BYTES: Final = 5 * GIB
"""One PUT or part, and one chunk of it, as in S3."""
MAX_DOCUMENT_BYTES: Final = 4 * MIB
"""DeleteObjects, CompleteMultipartUpload: 1,000 keys of 1,024 bytes, escaped, or 10,000 parts with checksums."""
MAX_SMALL_DOCUMENT_BYTES: Final = 128 * KIB
"""Every other operation with XML: 50 tags of 384 characters, each of up to six bytes where it is escaped."""
MAX_MATCH_DOCUMENT_BYTES: Final = 1_280 * KIB
"""The body of `?match`: MAX_MATCH_HASHES of 32 digits, quotes, a comma and some white space."""
MAX_DELETE_ELEMENTS: Final = 10
"""Elements of one object to delete: S3 has six, and a client may send what it adds."""
MAX_PART_ELEMENTS: Final = 14
"""Elements of one part to complete: its number, its ETag and S3's ten checksums."""
MAX_SMALL_DOCUMENT_ELEMENTS: Final = 256
"""Every other document: 50 tags have 152."""
MAX_XML_DEPTH: Final = 6
"""S3's own documents are four deep."""
MAX_XML_TEXT_CHARACTERS: Final = 8 * KIB
"""Text of one element: a key has 1,024 bytes."""
MAX_XML_TOKEN_BYTES: Final = 64 * KIB
"""One tag with its attributes, or one comment: the parser has it in memory, and all attributes at once."""
DOCUMENT_PIECE_BYTES: Final = 16 * KIB
"""Bytes of a document received at once."""
DOCUMENT_TURN_BYTES: Final = 4 * KIB
"""Bytes of a document parsed before the event loop has a turn: 1,000 elements of 4 bytes take a millisecond."""
DOCUMENTS_BYTES: Final = 64 * MIB
"""Documents in a gateway process at once, which take up to four times their bytes as text."""
OWNER_SHARE_OF_DOCUMENTS: Final = 4
"""One owner's documents take at most DOCUMENTS_BYTES divided by this; a further one is refused with SlowDown."""
MAX_DELETE_KEYS: Final = 1_000
"""Keys of one DeleteObjects, as in S3."""
MAX_LIST_BUCKETS: Final = 10_000
"""One page of ListBuckets, as in S3."""
OWNER_MEMORY_S: Final = 1.0
"""How long a gateway process keeps a bucket's owner, which another process may have changed."""
MAX_REMEMBERED_OWNERS: Final = 4_096
"""Buckets whose owners a gateway process remembers."""
MAX_MATCH_HASHES: Final = 1 << 15
"""Prefix hashes in one `?match`: 512k tokens in blocks of 16."""
MAX_TAGS: Final = 10
"""Tags of one object, as in S3."""
MAX_BUCKET_TAGS: Final = 50
"""Tags of one bucket, as in S3."""
MAX_TAG_KEY_CHARACTERS: Final = 128
MAX_TAG_VALUE_CHARACTERS: Final = 256
MAX_S3_USER_METADATA_BYTES: Final = 2 * KIB
"""Names and values of x-amz-meta-* headers of one object, as in S3."""
MAX_SYSTEM_METADATA_BYTES: Final = 8 * KIB
"""Content-Type and the other kept headers of one object: S3 bounds them by its header section only."""
SLOW_ANSWER_S: Final = 10.0
"""When the answer to a long copy or completed upload begins, and the time between its bytes: clients wait 60 s."""
MAX_ETAG_CONDITIONS: Final = 64
"""ETags in one If-Match or If-None-Match."""
