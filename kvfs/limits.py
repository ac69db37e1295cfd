"""Every named limit of kvfs, each with its reason.

Responsibility: the only place where a bound is written down. Configuration may lower the ones that it
names, never raise them past what is said here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# --- names -----------------------------------------------------------------------------------------------
MAX_BUCKET_NAME_BYTES: Final = 63
"""S3's limit for bucket names; a bucket is a top-level directory of the mount."""
MAX_KEY_BYTES: Final = 1024
"""S3's limit for keys, in UTF-8 bytes."""
MAX_COMPONENT_BYTES: Final = 255
"""NAME_MAX of Linux; keys with longer components exist for S3 only."""
MAX_BUCKETS: Final = 10_000
"""A listing of the mount's root is held in memory."""
MAX_RENAME_KEYS: Final = 10_000
"""A directory rename is one transaction on the service's event loop; above this it is EXDEV."""
MAX_NAMESPACE_BYTES: Final = 64 * KIB
"""A namespace description is hashed and kept whole."""
MAX_BLOCK_TOKENS: Final = 1 << 16
"""Tokens of one block; engines use 16 to 512."""
MAX_SHARDS: Final = 1 << 16
"""Tensor or pipeline shards of one model."""
MAX_HASH_TOKENS: Final = 1 << 24
"""Tokens in one call for prefix hashes: 40 ms with SHA extensions."""
MAX_EXTRA_BYTES: Final = 64 * KIB
"""Bytes beside the tokens that one prefix hash covers, such as the hash of an image."""
MAX_REMOVED_NAMES: Final = 64
"""Removed by one request of a session, which is one step of the event loop: 10 ms; the longest keys fit in a frame."""
MAX_LIST_ENTRIES: Final = 1_000
"""One page of a listing, as in S3's ListObjectsV2: bounds the time that one call holds the event loop."""
MAX_USER_METADATA_BYTES: Final = 64 * KIB
"""User metadata in a name's row, as for one extended attribute (S3 itself ends at 2 KiB)."""
DEFAULT_NAME_MAP_BYTES: Final = 4 * MIB
"""First size of the name index's file, allocated whole: about 15,000 names; it doubles when full..."""
MAX_NAME_MAP_STEP_BYTES: Final = 64 * MIB
"""...by no more than this at a time, so that a large index is not half empty."""
NAME_RESERVE_BYTES: Final = 1 * MIB
"""Allocated behind the map for removals: on a full filesystem one has to write pages before it frees any."""
MAX_NAME_MAP_BYTES: Final = 64 * GIB
"""The map of the name index never grows past this; a full index answers ENOSPC."""
MAX_META_KEY_BYTES: Final = 64
"""Keys of the service's own values beside the names; they are constants in the code."""
OBJECT_ID_RANGE: Final = 1 << 16
"""Object ids are reserved from the index in ranges of this many, so that an id costs no transaction."""

# --- DRAM tier -------------------------------------------------------------------------------------------
MAX_SLOTS: Final = 1 << 20
"""Slot headers are 128 bytes each in the shared table: 128 MiB at this count."""
DEFAULT_SLOTS: Final = 1 << 17
"""Enough for 100,000 slots; 16 MiB of headers, sparse until used."""
MIN_DRAM_BYTES: Final = 16 * MIB
"""Below this the table and the headroom leave no room for objects."""
MIN_SLOTS: Final = 64
"""A table of fewer slots saves nothing: 64 headers are 8 KiB."""
DRAM_SHARE_OF_AVAILABLE: Final = 4
"""The default capacity is the available memory divided by this: engines need the rest."""
OBJECT_SHARE_OF_DRAM: Final = 4
"""The largest object is the capacity divided by this, so that one object never empties the tier."""
DRAFT_SHARE_OF_SLOTS: Final = 2
"""One uid's drafts take no more than the slots divided by this, as its bytes do of the capacity: others can write."""
MAX_HELD_SLOTS: Final = 4_096
"""Unlinked slots whose bytes somebody still holds; each keeps one descriptor of the service open."""
CHECKSUM_QUEUE: Final = 8_192
"""Sealed slots that wait for the background checksum; beyond it they are offered again at a seal or sweep."""
CHECKSUM_PAUSE_WAIT_S: Final = 0.05
"""How long a probe waits for the checksum thread to close the slot (20 us when it is scheduled)."""
KEEP_WAIT_S: Final = 3.0
"""How long a stop that keeps the tier waits for checksums: within STOP_WAIT_S, and 20 GB of hashing."""
TABLE_ENTRIES_PER_SLOT: Final = 2
"""Index entries per slot: a table whose slots are all used is half full, so a miss costs 2.5 probes."""
NVME_BYTES_PER_ENTRY: Final = 64 * KIB
"""The table has an entry for each so many bytes of the NVMe tier (a block of 16 tokens of a small model)..."""
TABLE_SHARE_OF_DRAM: Final = 32
"""...unless these take more than the DRAM capacity divided by this. What a start finds always has one."""
ENTRIES_AT_ONCE: Final = 256
"""What only NVMe has leaves a full table by so many: looking for the oldest takes 10 ms among a million."""
TABLE_READER_WAIT_S: Final = 0.1
"""How long a reader of the table waits for a writer that stopped in mid-change (KVFS_READER_WAIT_NS)."""

# --- NVMe tier -------------------------------------------------------------------------------------------
MAX_EXTENT_BYTES: Final = 4 * MIB
"""One DATA record's payload: what a small read of a large object has to verify."""
EXTENT_SHARE_OF_SEGMENT: Final = 8
"""An extent is at most the segment divided by this, so that segments fill well."""
MIN_NVME_BYTES: Final = 8 * MIB
"""Eight of the smallest segments."""
NVME_SHARE_OF_FREE: Final = 4
"""The default capacity is the free space of the data directory's filesystem divided by this..."""
MAX_DEFAULT_NVME_BYTES: Final = 64 * GIB
"""...and not more than this: who wants more says so."""
MIN_SEGMENT_BYTES: Final = 1 * MIB
MAX_SEGMENT_BYTES: Final = 1 * GIB
"""Space comes back by segment: one this large is read and rewritten in about a second."""
SEGMENTS_WANTED: Final = 64
"""The default segment is the capacity divided by this, so that reclaim frees 1.5 percent at a time."""
MIN_SEGMENTS: Final = 8
"""Below this the reserve would be most of the tier."""
MAX_SEGMENTS: Final = 1 << 16
"""Each keeps a descriptor open."""
RESERVED_SEGMENTS: Final = 2
"""Free segments that only reclaim may take: it needs one to write what it keeps, the other if the device fails that."""
REAPPEND_SHARE: Final = 4
"""Of a reclaimed segment at most this fraction is rewritten because it is hot: write amplification stays below 4/3."""
DURABLE_PERCENT: Final = 90
"""Of the tier's usable segments durable objects may fill this much: reclaim gains a tenth of what it moves."""
MAX_TOMBSTONE_IDS: Final = 4_096
"""Deletions in one record: 32 KiB."""
MIN_ENDINGS_BYTES: Final = 256 * 1024
"""Each of the two files that repeat what has ended: 64 pages, so that a small tier seldom rewrites them..."""
ENDINGS_SHARE_OF_NVME: Final = 4_096
"""...the capacity divided by this: 126 objects replaced in each 16 MiB of the log..."""
MAX_ENDINGS_BYTES: Final = 32 * MIB
"""...and at most a million endings, which are 32 MB of memory. Half a file may be endings that still count."""
MAX_LOG_QUEUE: Final = 1 << 17
"""Records that wait to be written, some 60 MB of memory. While that many do, what would queue more is refused: durable
writes, renames, attributes, directories, buckets. Removals are not: there are as many as there are objects."""
SCAN_BYTES: Final = 4 * MIB
"""Read at once when a segment without a footer is scanned."""
UNSYNCED_RECORDS: Final = 8_192
"""The log is synced at least after so many records..."""
SYNC_INTERVAL_S: Final = 1.0
"""...and so long after a record was written, even if nobody waits for it."""
GHOST_KEYS: Final = 1 << 18
"""Keys that the ghost queue of write admission remembers: about 30 MB."""
RETURNED_KEYS: Final = 1 << 14
"""Objects from below NVMe whose next read is waited for before they are written: 2 MB."""
WRITE_BEHIND_RECORDS: Final = 256
"""Records of the log that writing behind keeps queued: 256 MiB of 1 MiB objects, a fraction of a second."""
WRITE_BEHIND_POLL_S: Final = 0.01
"""How often writing behind looks whether a checksum is there, or the log has room."""
SEGMENT_OFFSET_BITS: Final = 32
"""Of a table entry's `location`: the offset in the segment, whose number is above."""
MAX_PROMOTIONS: Final = 16
"""Objects that are read back into DRAM at once: each is a draft there."""
READ_AROUND_BYTES: Final = 256 * MIB
"""Memory beside DRAM for reads of what finds no slot there; half of it for one uid."""
READ_AROUND_WAIT_S: Final = 2.0
"""So long such a read waits for others to end; then it is Busy, and may be repeated."""
READ_AGAIN_PAUSE_S: Final = 0.05
"""Between two requests of a client for blocks of which the service answers at once that there is no room."""
READ_AROUND_POLL_S: Final = 0.002
"""The kernel tells of a reader that lets go only when it is asked: 2.5 us a copy."""
DEFAULT_SCRUB_BYTES_S: Final = 16 * MIB
"""What the scrub verifies in a second unless told otherwise: a terabyte in 17 hours, 0.5 percent of a drive."""
MAX_SCRUB_BYTES_S: Final = 4 * GIB
"""Above this the rate bounds nothing: one extent at a time is slower."""
SCRUB_INTERVAL_S: Final = 3600.0
"""A pass of the scrub begins at least this long after the one before: a small store is not read all the time."""
FSCK_SEGMENTS: Final = 4
"""Segments that a check reads at once, each with a pooled buffer: one NVMe drive is at its bandwidth."""
READ_ATTEMPTS: Final = 3
"""How often a start asks a device for the same bytes of a segment before it does without the objects in it."""
OBJECT_SHARE_OF_NVME: Final = 2
"""The largest object is the NVMe capacity divided by this, so that one file never empties the tier."""
LARGE_DIRTY_EXTENTS: Final = 16
"""Extents of files being written that wait in memory: 64 MiB of 4 MiB each; then writers wait for the device."""
LARGE_CACHED_EXTENTS: Final = 16
"""Extents kept for those who read objects larger than DRAM takes: 64 MiB, so that a small read is no 4 MiB read."""
LARGE_READS: Final = 8
"""Extents read for them at once; fewer than are kept, so that there is always one to give up."""
DEVICE_RETRY_S: Final = 0.25
"""How long the log waits after the device failed before it tries again."""

# --- devices ---------------------------------------------------------------------------------------------
DEVICE_BUFFER_BYTES: Final = 8 * MIB + 64 * KIB
"""One pooled buffer: two extents of 4 MiB, and their record headers."""
DEVICE_BUFFERS: Final = 8
"""Pooled buffers of one device: 65 MiB, pinned where io_uring registers them."""
DEVICE_DEPTH: Final = 32
"""Operations in flight on one device; one NVMe drive reaches its bandwidth at a depth of 8 with 1 MiB each."""
MAX_DEVICE_IO_BYTES: Final = 1 * GIB
"""One read or write of a device; Linux moves at most 2 GiB less a page in one call."""
DEVICE_ALIGNMENT_BYTES: Final = 4_096
"""Offsets, lengths and addresses of direct I/O: a multiple of every logical block size in use."""
DEVICE_CLOSE_WAIT_S: Final = 10.0
"""How long closing a device waits for the operations in flight before it cancels them."""
DEVICE_CANCEL_WAIT_S: Final = 1.0
"""How long a device waits for what it cancelled; what the kernel then still holds is left behind."""

# --- sessions --------------------------------------------------------------------------------------------
MAX_SESSIONS: Final = 1_024
"""Each session holds a descriptor and a bounded receive buffer."""
MAX_FRAME_BYTES: Final = 1 * MIB
"""One message of a session, either way; a longer length prefix closes the connection."""
MAX_BATCH: Final = 1_024
"""Entries in one batch message: 1,000 blocks are a 512k-token prompt."""
MAX_FDS_PER_MESSAGE: Final = 128
"""Below the kernel's SCM_MAX_FD (253)."""
MAX_DRAFTS_PER_SESSION: Final = 1_024
"""Drafts granted and neither sealed nor aborted."""
SESSION_IDLE_WRITE_TIMEOUT_S: Final = 10.0
"""A peer that does not drain its socket for this long is cut off."""
MAX_SOCKET_PATH_BYTES: Final = 107
"""sun_path of Linux's sockaddr_un, less the closing NUL."""
MAX_SESSIONS_PER_UID: Final = 256
"""So that one user cannot take every session; the service's own user and root are not counted."""
MAX_CONTROL_BYTES: Final = 128 * KIB
"""A JSON request: a namespace description of MAX_NAMESPACE_BYTES, escaped; parsed on the event loop."""
MAX_CLIENT_NAME_BYTES: Final = 128
"""What a client calls itself, for logs and status."""
MAX_ERROR_MESSAGE_BYTES: Final = 4 * KIB
"""An error's message in an answer: two escaped names and a sentence."""
MAX_NAMESPACE_HANDLES: Final = 256
"""Namespaces open in one session: an engine uses one per model, shard geometry and adapter."""
MAX_LARGE_PIECE_BYTES: Final = 4 * MIB
"""What a session reads at once of an object larger than DRAM takes: one extent, put into a draft of its own."""
SESSION_TURN_S: Final = 0.002
"""A batch gives the event loop a turn after this long, so that one session does not hold up the others."""
SESSION_CHUNK_BYTES: Final = 64 * KIB
"""Most that one receive call brings; a session's buffer grows to a whole frame only as bytes come."""
SESSION_BACKLOG: Final = 128
"""Connections that the kernel queues before they are accepted."""
SESSION_HELLO_TIMEOUT_S: Final = 5.0
"""A connection that has not said HELLO by then is closed."""
SESSION_FRAME_TIMEOUT_S: Final = 10.0
"""A frame that has begun must be complete by then: its buffer is the service's memory."""
CLIENT_TIMEOUT_S: Final = 30.0
"""How long the synchronous client waits for one answer, unless told otherwise."""
CLIENT_UNREPORTED_HITS: Final = 8_192
"""Hits that a client has not told the service of: eight batches; past it they are forgotten."""
UNHEARD_SEALS: Final = 4_096
"""Blocks sealed natively that the event loop has not heard of: some 0.3 s of its time; past it, it seals itself."""
SEALER_IDS: Final = 8_192
"""Object ids that native seals are given at a time, and again when half of them are used."""
CLIENT_SPARE_DRAFTS: Final = 32
"""Drafts that a client which puts blocks is granted ahead: the service grants 16 in the time of some 30 puts."""
CLIENT_SPARE_IDLE_S: Final = 5.0
"""A client that has put nothing for so long gives its spare drafts back."""
CLIENT_CLOSE_WAIT_S: Final = 1.0
"""So long a close waits for a thread that connects, which then closes what it gets at its own deadline."""
CLIENT_REPORT_S: Final = 0.5
"""How often a client tells the service of its hits: soon enough for eviction, seldom enough to cost nothing."""
CLIENT_THREADS: Final = 4
"""Threads of one client that futures run on: four copies at once meet a machine's memory bandwidth."""
CLIENT_FUTURES: Final = 1_024
"""Calls of one client that wait for a thread or run on one."""

# --- KV events -------------------------------------------------------------------------------------------
EVENT_INTERVAL_S: Final = 0.01
"""How long changes are gathered into one batch of KV events."""
MAX_EVENT_HASHES: Final = 1_024
"""Blocks in one batch: about 20 KiB."""
MAX_EVENT_BYTES: Final = 16 * MIB
"""One batch: engines send the tokens too, 5 bytes each, of whole prompts at once."""
EVENT_QUEUE_BATCHES: Final = 10_000
"""Batches that ZeroMQ keeps for one peer; a subscriber that is slower finds a gap."""
MAX_REPLAY_BATCHES: Final = 10_000
"""Batches of the recent past that can be replayed, vLLM's own default..."""
MAX_REPLAY_BYTES: Final = 64 * MIB
"""...and their bytes: three million blocks."""
REPLAY_WAIT_S: Final = 10.0
"""How long an engine may take to replay what was missed before its blocks are forgotten instead."""
MAX_ENGINE_STREAMS: Final = 1_024
"""Engines, or data-parallel ranks of engines, whose events are followed."""
MAX_ENGINE_BLOCKS: Final = 1 << 20
"""Blocks of one engine that are remembered, about 100 bytes each: 16 million tokens of GPU memory in blocks of 16."""
MAX_HELD_BATCHES: Final = 10_000
"""Batches of one engine that wait for a replay; the oldest are given up."""

# --- connectors ------------------------------------------------------------------------------------------
CONNECTOR_TIMEOUT_S: Final = 5.0
"""How long a connector waits for the service where nobody waits for it: loads in the background, its start."""
CONNECTOR_MATCH_S: Final = 0.05
"""How long an engine's scheduler may wait for a look-up; only users outside of the service's group wait at all."""
CONNECTOR_SAVE_S: Final = 0.5
"""How long a step of an engine may wait for drafts; the service that does not answer is then left alone for..."""
CONNECTOR_RETRY_S: Final = 1.0
"""...as long as it takes to answer a connection, tried this often."""
CONNECTOR_COPY_S: Final = 60.0
"""A layer that is not copied by then never will be: its load waits at most CONNECTOR_TIMEOUT_S for the service."""
CONNECTOR_STORE_BLOCKS: Final = 256
"""Blocks that an engine worker copies out at once, step by step until all are: those being copied, waiting and sealed
are three times as many drafts, and a session has MAX_DRAFTS_PER_SESSION."""
CONNECTOR_LOADS: Final = 256
"""Loads of requests that wait or run in one engine worker; more are misses."""
CONNECTOR_THREADS: Final = 4
"""Threads of a connector that copies for an engine that has none of its own."""
CONNECTOR_LOCKS: Final = 4_096
"""Blocks that LMCache may lock at once, each a mapping: vm.max_map_count is 65,530."""
WEIGHTS_SAMPLES: Final = 64
"""Places in each file of weights that are read to tell them from others..."""
WEIGHTS_SAMPLE_BYTES: Final = 4 * KIB
"""...and what is read at each."""
WEIGHTS_MEMORY_LINES: Final = 1 << 14
"""Places of 64 bytes at which the weights in memory are looked at, over all tensors: 1 MiB. Each is a miss of the
processor's caches and of its TLB, so all take some milliseconds, once per step that loads or stores."""
WEIGHTS_DEVICE_CHECK_S: Final = 1.0
"""How often weights in a device's memory are looked at: a read of each tensor there, and a wait for the device."""
MAX_ADAPTERS: Final = 4_096
"""Adapters whose files an engine's connector remembers; with more, requests of further ones are not kept."""

# --- waits -----------------------------------------------------------------------------------------------
PUBLISH_WAIT_S: Final = 0.5
"""How long another door waits for a flushed draft whose RELEASE is still on its way (it follows close()). Then it is
Busy."""
STOP_WAIT_S: Final = 10.0
"""How long a clean stop waits for the requests in flight."""
FINISH_WAIT_S: Final = 4.0
"""Part of it in which the log is written and closed; what is then left stays in DRAM, or was a cache's."""
LAST_CALLS_WAIT_S: Final = 2.0
"""How long a stop, once the mount is gone, waits for the device where calls that had come want it."""
DETACH_WAIT_S: Final = 1.0
"""How long a hard stop waits for the kernel to take the mount away before the process leaves without."""
ANSWER_WAIT_S: Final = 2.0
"""How long a mount may take to answer statfs before it counts as one that nobody serves."""
KILLED_WAIT_S: Final = 5.0
"""How long a start waits for a killed service, whose requests it has just aborted, to let go of the data."""
MAINTAIN_INTERVAL_S: Final = 1.0
"""Upkeep of the store runs at least this often; a seal brings it forward."""
MAINTAIN_PAUSE_S: Final = 0.02
"""Least time between two runs of upkeep, so that a burst of seals is one run."""

# --- log lines -------------------------------------------------------------------------------------------
LOG_LINES: Final = 20
"""Lines of one cause that are shown in a minute; the rest is counted. Peers and devices cause thousands a second."""
LOG_INTERVAL_S: Final = 60.0
"""That minute, from the first line of the cause."""
MAX_LOG_CAUSES: Final = 1_024
"""Causes counted apart, some 500 bytes each: statements that log, times the peers that they name as the cause."""

# --- mount -----------------------------------------------------------------------------------------------
MAX_WRITE_BYTES: Final = 1 * MIB
"""FUSE max_write: 256 pages, the default of fs.fuse.max_pages_limit."""
MAX_FUSE_THREADS: Final = 8
"""Of the native loop, made as they are needed, each with buffers of 2 MiB: one request less than that may wait for the
bytes of files before all others have to wait for one of them."""
MAX_FUSE_REQUESTS: Final = 64
"""Requests that Python handles at once; the kernel's own background limit is 12 by default."""
MAX_NODES: Final = 1 << 24
"""Nodeids carry a 24-bit index."""
KERNEL_CACHE_S: Final = 60
"""How long the kernel may keep names and attributes; what changes is invalidated long before."""
MAX_LEARNED_NAMES: Final = 256
"""A directory with more names is not read to know which are free: one page of a listing, 2 ms of the event loop."""
MAX_DOUBTED_NAMES: Final = 1 << 18
"""Names that exist and the kernel has forgotten, kept natively so that all others are known to be free: 30 MB."""
SPARE_DRAFTS: Final = 16
"""Empty slots held ready for CREATE while files are being created: a burst that Python takes 4 ms to follow."""
SLOTS_PER_SPARE_DRAFT: Final = 64
"""A tier with few slots keeps them for objects."""
MAX_OPEN_LISTINGS: Final = 4_096
"""Directory handles, each with its place in a listing."""
MAX_DIRECTORY_TIMES: Final = 65_536
"""Directories whose last change is remembered in memory, some 300 bytes each; older ones are written to their rows."""
MAX_OPEN_PROMISES: Final = 256
"""Threads that were told to look a name up again and have not come back: each is in an open(2) that lost a race."""
OPEN_PROMISE_S: Final = 5.0
"""How long what such a thread looked up is kept for it; it comes back at once, unless it is stopped or killed."""

# --- gateway: connections --------------------------------------------------------------------------------
MAX_HEAD_BYTES: Final = 32 * KIB
"""Request line and headers together: a key of 1,024 bytes escaped, 2 KiB of metadata, a session token and room."""
MAX_HEADERS: Final = 128
"""Header fields of one request; S3's clients send about twenty."""
MAX_CHUNK_LINE_BYTES: Final = 256
"""The line before a chunk of Transfer-Encoding: chunked; nobody needs its extensions."""
MAX_TRAILER_BYTES: Final = 8 * KIB
"""The trailer section after the last chunk; S3's own trailers are inside the payload."""
RECEIVE_BYTES: Final = 256 * KIB
"""Read from a socket at once: a buffer that stays in the second-level cache between reading, digest and writing."""
REMEMBERED_METADATA_BYTES: Final = 2 * KIB
"""Metadata up to this is decoded once, and its headers are made once, for 4,096 objects of a gateway process."""
REMEMBERED_OBJECTS: Final = 4_096
"""Objects whose answers' headers a gateway process keeps ready for reads without Python: up to 16 MiB."""
READS_TURN_S: Final = 0.001
"""How long reads are answered without Python before the event loop looks at everything else."""
GATEWAY_BATCH: Final = 32
"""Seals, or opens, of a gateway in one message: a fraction of a millisecond of the service's loop."""
GATEWAY_ROOM_WAIT_S: Final = 20.0
"""How long a body waits for room that others' bodies take, before it is refused with SlowDown: clients wait 60 s."""
GATEWAY_ROOM_POLL_S: Final = 0.01
"""Between two looks of the first that waits: the room of one body of 1 MiB comes back about so often."""
FIRST_ROOM_BYTES: Final = 1 * MIB
"""Room that a body of a gateway has at first; it doubles as it fills, so that what was only announced takes none."""
OWNER_ROOM_PERCENT: Final = 75
"""Of a gateway process's room for bodies, one owner's take at most so much..."""
ROOM_TURN_S: Final = 60.0
"""...and while others wait, a body must fill its room in so long, as long as clients wait for an answer..."""
ENOUGH_RATE_BYTES_S: Final = 1 * MIB
"""...or come this fast: a slow line, and a gigabyte in a quarter of an hour..."""
ROOM_GRACE_S: Final = 5.0
"""...but not in its first seconds: a round trip, and TCP's start."""
ROOM_HURRY_S: Final = 0.05
"""Between two bodies that are given up for those who wait: what the first one had has come back by then."""
MAX_TRANSFERS: Final = 128
"""Objects larger than DRAM takes that a gateway process moves at once: each has a session, of MAX_SESSIONS in all."""
GATEWAY_GROW_POLL_S: Final = 0.02
"""Between two looks of a body that waits for more room."""
SPARE_DRAFT_BYTES: Final = FIRST_ROOM_BYTES
"""Room that a spare draft of a gateway is promised; larger bodies ask for their own."""
GATEWAY_SPARE_DRAFTS: Final = 8
"""Drafts that a gateway process under load has granted ahead of use."""
SPARE_OBJECT_BYTES: Final = 16 * MIB
"""Where objects may not be so large, the tier is too small for spares: eight are a 64th of it at this size's least."""
SPARE_RATE: Final = 16
"""Writes in SPARE_INTERVAL_S from which spares pay."""
SPARE_INTERVAL_S: Final = 0.5
INLINE_DIGEST_BYTES: Final = 128 * KIB
"""Bodies up to this are digested as they come: an MD5 of it takes 150 us, a thread's start and end about 80."""
MAX_UPLOADS: Final = 10_000
"""Multipart uploads of one owner under way: records are listed and sorted in memory, 20 MB with the longest keys."""
UPLOADS_LOOK_S: Final = 1.0
"""Between two looks at the records of uploads because an owner seems to have too many: 10,000 take 50 ms."""
EXPIRE_INTERVAL_S: Final = 600.0
"""How often a gateway looks for expired uploads."""
ORPHAN_AGE_S: Final = 3_600.0
"""A part without a record is removed after this: one that is being uploaded may outlive its upload by a request."""
COPY_TURN_BYTES: Final = 64 * MIB
"""Copied by one job of a worker thread, which cannot be cancelled: 30 ms."""
WORKER_START_WAIT_S: Final = 20.0
"""How long a gateway worker may take until it answers."""
WORKER_RESTART_MIN_S: Final = 0.2
WORKER_RESTART_MAX_S: Final = 15.0
"""Pauses before a gateway worker that ended is started again, doubling."""
MAX_GATEWAY_WORKERS: Final = 64
"""Processes that share a port: one per core at most."""
MAX_MARKER_BODY_BYTES: Final = 32 * KIB
"""Body of a key that ends in '/': it is kept with the name, whose user metadata has 64 KiB."""
GATEWAY_RECONNECT_WAIT_S: Final = 2.0
"""How long a request waits for a service that is gone, before it is told to come again (503)."""
GATEWAY_RECONNECT_MIN_S: Final = 0.05
GATEWAY_RECONNECT_MAX_S: Final = 1.0
"""Pauses between the gateway's attempts to reach its service, doubling."""
GATEWAY_TOUCH_INTERVAL_S: Final = 0.25
"""How often a gateway reports hits that it read without the service, MAX_BATCH at once; more are not counted."""
MAX_GATEWAY_CONNECTIONS: Final = 4_096
"""Connections of one gateway process, unless told otherwise: each has a buffer of MAX_HEAD_BYTES."""
ADDRESS_PERCENT: Final = 75
"""Of a gateway process's connections, so many are an address's share: a proxy may be the only client, and a quarter is
left for whoever else there is."""
PLACES_AT_ONCE_SHARE: Final = 64
"""When all connections are taken, the silent ones of strangers go by so many of all at once: choosing takes a
millisecond among 4,096."""
PLACES_POLL_S: Final = 0.05
"""How often it is looked whether a request has ended, while there is one on every connection."""
PLACES_LOG_S: Final = 60.0
"""Between two lines of the log on connections that are all taken."""
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
"""How long a peer may send, or take, nothing in the middle of a body (S3 itself ends such requests after 20 s)."""
MIN_BODY_RATE_BYTES_S: Final = 256
"""A body must move at least so fast on average, once BODY_GRACE_S are over: a trickle holds a draft or a lease."""
BODY_GRACE_S: Final = 60.0
MAX_DRAIN_BYTES: Final = 256 * KIB
"""What is left of a refused request's body is read away up to this, so that the connection can be used again."""
LINGER_S: Final = 2.0
"""How long a closed connection's input is still read: a reset would take the answer from the client."""
SWEEP_INTERVAL_S: Final = 1.0
"""How late the end of a wait on a client may be noticed."""
SMALL_BODY_BYTES: Final = 64 * KIB
"""Bodies up to this leave in one write with their headers; above it a copy costs more than a second call."""
SEND_CHUNK_BYTES: Final = 4 * MIB
"""Sent at once from a slot: what one slow reader keeps of the event loop's time."""
TLS_RECORDS_BYTES: Final = 256 * KIB
"""Read and encrypted at once for a TLS connection."""

# --- traces ----------------------------------------------------------------------------------------------
MAX_TRACE_LINE_BYTES: Final = 1 * MIB
"""One request of a trace: MAX_TRACE_REQUEST_BLOCKS ids of 20 digits and more beside them."""
MAX_TRACE_REQUEST_BLOCKS: Final = 1 << 15
"""Blocks of one request: MAX_HASH_TOKENS in blocks of 512 tokens."""
MAX_TRACE_REFERENCES: Final = 1 << 26
"""Blocks of all requests of a trace, which is held in memory: 232 times the public conversation trace."""

# --- scheduling ------------------------------------------------------------------------------------------
MAX_DEFERRED_REQUESTS: Final = 4_096
"""Requests that wait for room on a decode instance; each is looked at several times a second."""

# --- S3 --------------------------------------------------------------------------------------------------
MAX_QUERY_PARAMETERS: Final = 64
"""Of one S3 request; a presigned one has eight besides its own, and no operation takes twenty."""
MAX_CREDENTIALS: Final = 10_000
"""Credentials of the S3 door: a look-up table that every worker holds."""
MAX_ACCESS_KEY_BYTES: Final = 128
MIN_SECRET_KEY_BYTES: Final = 16
"""Shorter secrets are guessed from one captured signature."""
MAX_SECRET_KEY_BYTES: Final = 256
MAX_SIGNING_KEYS: Final = 1_024
"""Derived signing keys that a worker remembers, of (secret, date, region): four HMACs saved on each request."""
MAX_CLOCK_SKEW_S: Final = 900
"""How far the time of a signature may be from the gateway's clock, as S3 has it."""
MAX_PRESIGN_EXPIRY_S: Final = 604_800
"""Longest life of a presigned URL: a week, as S3 has it."""
MAX_SIGNERS: Final = 256
"""Pairs of credential and signed headers that a worker remembers as taken apart, before any signature is checked."""
MAX_SIGNER_BYTES: Final = 4 * KIB
"""Credential and SignedHeaders together: 64 names of 60 bytes; with MAX_SIGNERS it bounds what strangers can fill."""
MAX_SIGNED_HEADERS: Final = 64
"""Names in SignedHeaders; clients sign 3 to 12."""
MIN_AWS_CHUNK_BYTES: Final = 8 * KIB
"""Of an aws-chunked body, each chunk but the last is at least this long, as S3 has it: bounds the framing."""
MAX_AWS_CHUNK_BYTES: Final = 5 * GIB
"""No chunk is longer than the largest body of one request."""
MAX_AWS_CHUNK_LINE_BYTES: Final = 256
"""A chunk's header: 16 hex digits, `;chunk-signature=` and 64 hex digits take 97."""
MAX_AWS_TRAILER_BYTES: Final = 4 * KIB
"""All trailers of one aws-chunked body: a checksum and a signature take 150."""
MAX_PARTS: Final = 10_000
"""Of one multipart upload, as S3 has it."""
MIN_PART_BYTES: Final = 5 * MIB
"""Every part but the last, as S3 has it."""
MAX_SINGLE_PUT_BYTES: Final = 5 * GIB
"""One PUT or part, as S3 has it."""
MAX_DOCUMENT_BYTES: Final = 4 * MIB
"""Of DeleteObjects and CompleteMultipartUpload: 1,000 keys of 1,024 bytes, escaped, or 10,000 parts with checksums."""
MAX_SMALL_DOCUMENT_BYTES: Final = 128 * KIB
"""Of every other operation with XML: 50 tags of 384 characters, each of up to six bytes where it is escaped."""
MAX_MATCH_DOCUMENT_BYTES: Final = 1_280 * KIB
"""Of `?match`: MAX_MATCH_HASHES of 32 digits, quotes, a comma and some white space."""
MAX_DELETE_ELEMENTS: Final = 10
"""Elements of one object to delete: S3 has six, and a client may send what it adds."""
MAX_PART_ELEMENTS: Final = 14
"""Elements of one part to complete: its number, its ETag and S3's ten checksums."""
MAX_SMALL_DOCUMENT_ELEMENTS: Final = 256
"""Of every other document: 50 tags have 152."""
MAX_XML_DEPTH: Final = 6
"""S3's own documents are four deep."""
MAX_XML_TEXT_CHARACTERS: Final = 8 * KIB
"""Text of one element: a key has 1,024 bytes."""
MAX_XML_TOKEN_BYTES: Final = 64 * KIB
"""One tag with its attributes, or one comment: the parser has it in memory, and all attributes at once."""
DOCUMENT_PIECE_BYTES: Final = 16 * KIB
"""Received at once of a document, and..."""
DOCUMENT_TURN_BYTES: Final = 4 * KIB
"""...read before others have their turn: 1,000 elements of 4 bytes take a millisecond."""
DOCUMENTS_BYTES: Final = 64 * MIB
"""Documents that a gateway process has in hand, which take up to four times their bytes as text..."""
OWNER_SHARE_OF_DOCUMENTS: Final = 4
"""...and an owner at most this divided by that; a document beyond is told to come again (SlowDown)."""
MAX_DELETE_KEYS: Final = 1_000
"""Of one DeleteObjects, as S3 has it."""
MAX_LIST_BUCKETS: Final = 10_000
"""One page of ListBuckets, as S3 has it."""
OWNER_MEMORY_S: Final = 1.0
"""For how long a gateway process takes the owner of a bucket for granted: spares a look at the index with each request,
and bounds how long a bucket that was removed and made again elsewhere still counts as the old owner's."""
MAX_REMEMBERED_OWNERS: Final = 4_096
"""Buckets whose owners a gateway process remembers."""
MAX_MATCH_HASHES: Final = 1 << 15
"""Prefix hashes in one `?match`: 512k tokens in blocks of 16."""
MAX_TAGS: Final = 10
"""Of one object, as S3 has it; a key has at most 128 characters and a value 256."""
MAX_BUCKET_TAGS: Final = 50
"""Of one bucket, as S3 has it."""
MAX_TAG_KEY_CHARACTERS: Final = 128
MAX_TAG_VALUE_CHARACTERS: Final = 256
MAX_S3_USER_METADATA_BYTES: Final = 2 * KIB
"""Names and values of x-amz-meta-* headers of one object, as S3 has it."""
MAX_SYSTEM_METADATA_BYTES: Final = 8 * KIB
"""Content-Type and the other kept headers of one object: S3 bounds them by its header section only."""
SLOW_ANSWER_S: Final = 10.0
"""After so long the answer to a copy or a completed upload is begun, and a byte follows as often: clients wait 60 s."""
MAX_ETAG_CONDITIONS: Final = 64
"""ETags in one If-Match or If-None-Match."""

# --- cold tier -------------------------------------------------------------------------------------------
DEFAULT_COLD_BYTES: Final = KIB * GIB
"""1 TiB: a bucket has no end of its own, and its owner pays for each byte."""
MAX_COLD_PREFIX_BYTES: Final = 512
"""Names under it have up to 160 bytes, and S3's end at 1,024."""
MIN_COLD_BYTES: Final = 16 * MIB
OBJECT_SHARE_OF_COLD: Final = 4
"""The largest object is the capacity divided by this, so that one object never empties the tier."""
MAX_COLD_OBJECT_BYTES: Final = 4 * GIB
"""Objects go up in one PUT, which S3 ends at 5 GiB; DRAM takes objects of a quarter of its size."""
COLD_BUFFER_BYTES: Final = 64 * MIB
"""An object that has left DRAM is read from NVMe into memory for its upload if it is no larger than this."""
COLD_UPLOADS: Final = 4
"""Objects on their way up at once: a single stream to S3 carries 50 to 100 MB/s."""
COLD_FETCHES: Final = 8
"""Objects on their way down at once."""
COLD_THREADS: Final = 16
"""Worker threads, and connections: those above, and deletions, listings and looks at the endpoint beside them."""
COLD_QUEUE: Final = 1 << 16
"""Objects that wait to be uploaded: 10 MB. One that finds no place comes back with its next read."""
COLD_CONNECT_S: Final = 2.0
"""Until a connection to the endpoint stands."""
DEFAULT_COLD_TIMEOUT_S: Final = 5.0
"""The longest silence within an answer."""
MAX_COLD_TIMEOUT_S: Final = 60.0
COLD_ATTEMPTS: Final = 2
"""Tries of one request: an engine waits for a block, and computing it is always possible."""
COLD_FETCH_S: Final = 30.0
"""No promotion from the tier takes longer, its wait for a turn included; then it is a miss."""
COLD_CHECK_S: Final = 30.0
"""An endpoint that answers is looked at this often, so that no engine has to find out that it died."""
COLD_BACKOFF_S: Final = 1.0
"""After a failure the endpoint is left alone so long, and twice as long after each further one..."""
MAX_COLD_BACKOFF_S: Final = 60.0
"""...but not longer than this."""
COLD_COMPARE_S: Final = 86_400.0
"""How often a listing of the bucket is held against the index: 1,000 requests for a million objects."""
COLD_LIST_BATCH: Final = 1_000
"""Names in one answer, as S3 has it."""
COLD_DELETE_BATCH: Final = 1_000
"""Names in one DeleteObjects, as S3 has it."""
COLD_READ_BYTES: Final = 1 * MIB
"""Of an answer at once, so that a look at the clock comes in between."""
COLD_DELETIONS_AHEAD: Final = 4_000
"""A comparison with the bucket's listing finds no more to delete before some of it is deleted."""
COLD_NAMES_AT_ONCE: Final = 100
"""Names that a comparison goes through before others have their turn: some milliseconds."""
MAX_COLD_OWNER_BYTES: Final = 4 * KIB
"""Of the object that says whose the prefix is."""
MAX_BUCKET_ROW_BYTES: Final = MAX_NAMESPACE_BYTES + KIB
"""An encoded bucket, as the tier keeps it beside the blocks of the bucket."""
