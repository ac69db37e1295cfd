"""Limits of names, tiers and devices, each with its reason."""

from typing import Final

from kvfs.limits.units import GIB, KIB, MIB

# --- names -----------------------------------------------------------------------------------------------
MAX_BUCKET_NAME_BYTES: Final = 63
"""S3's limit for bucket names; a bucket is a top-level directory of the mount."""
MAX_KEY_BYTES: Final = 1024
"""S3's limit for keys, in UTF-8 bytes."""
MAX_COMPONENT_BYTES: Final = 255
"""NAME_MAX of Linux; keys with longer components exist for S3 only."""
MAX_BUCKETS: Final = 10_000
"""Listings of the mount's root are held in memory."""
MAX_LINK_TARGET_BYTES: Final = 4095
"""PATH_MAX of Linux, less the NUL: the target of a symbolic link, which is part of its name's row."""
MAX_RENAME_KEYS: Final = 10_000
"""A directory rename is one transaction on the service's event loop; one of more keys is EXDEV."""
MAX_NAMESPACE_BYTES: Final = 64 * KIB
"""A namespace description is hashed and kept whole."""
MAX_BLOCK_TOKENS: Final = 1 << 16
"""Tokens of one block; engines use 16 to 512."""
MAX_SHARDS: Final = 1 << 16
"""Tensor or pipeline shards of one model."""
MAX_HASH_TOKENS: Final = 1 << 24
"""Tokens in one call for prefix hashes: 40 ms with SHA extensions."""
MAX_EXTRA_BYTES: Final = 64 * KIB
"""Bytes besides the tokens that one prefix hash covers, such as the hash of an image."""
MAX_REMOVED_NAMES: Final = 64
"""Names in one request to remove, which is one step of the event loop: 10 ms; the longest keys fit in a frame."""
MAX_LIST_ENTRIES: Final = 1_000
"""One page of a listing, as in S3's ListObjectsV2: bounds the time that one call holds the event loop."""
MAX_USER_METADATA_BYTES: Final = 64 * KIB
"""User metadata in a name's row, as in one extended attribute (S3's own limit is 2 KiB)."""
DEFAULT_NAME_MAP_BYTES: Final = 4 * MIB
"""First size of the name index's file, allocated whole: about 15,000 names. A full file doubles."""
MAX_NAME_MAP_STEP_BYTES: Final = 64 * MIB
"""A full index file grows by no more than this at a time, so that a large one is not half empty."""
NAME_RESERVE_BYTES: Final = 1 * MIB
"""Allocated behind the map for removals, which write pages before they free any, on a full filesystem too."""
MAX_NAME_MAP_BYTES: Final = 64 * GIB
"""The largest map of the name index; a full index answers ENOSPC."""
MAX_META_KEY_BYTES: Final = 64
"""Keys of the service's own values beside the names, all constants."""
OBJECT_ID_RANGE: Final = 1 << 16
"""Object ids are reserved from the index in ranges of this many, so that an id costs no transaction."""

# --- DRAM tier -------------------------------------------------------------------------------------------
MAX_SLOTS: Final = 1 << 24
"""A slot takes 256 bytes of the shared table, in DRAM's capacity: 4 GiB at this count."""
DEFAULT_SLOTS: Final = 1 << 17
"""The least number of slots where nobody says one; 16 MiB of headers, sparse until used."""
DRAM_BYTES_PER_SLOT: Final = 64 * KIB
"""A larger tier has a slot for each of these, a block of 16 tokens of a small model: 1/256 of it is table then."""
MIN_DRAM_BYTES: Final = 16 * MIB
"""In less, the table and the headroom take all room."""
MIN_SLOTS: Final = 64
"""Fewer slots save nothing: 64 headers are 8 KiB."""
DRAM_SHARE_OF_AVAILABLE: Final = 4
"""The default capacity is the available memory divided by this: engines need the rest."""
OBJECT_SHARE_OF_DRAM: Final = 4
"""The largest object is the capacity divided by this, so that one object never empties the tier."""
KEPT_PAGES_SHARE_OF_DRAM: Final = 16
"""Free slots keep pages of at most this share of the tier: half of the room that eviction keeps free in a small one, so
that writers who do not ask the service, on the mount, still find the other half."""
MAX_KEPT_PAGES_BYTES: Final = 512 * MIB
"""Pages that free slots keep in a large tier, half of its room likewise: 128 blocks of 4 MiB, 50 ms of writing."""
MIN_KEPT_SLOT_BYTES: Final = 16 * KIB
"""A smaller slot is emptied: fresh pages for it cost no more than the look at what it has."""
FILLED_SLOTS: Final = 2 * 64
"""Free slots that are filled with zeros ahead of a writer's demand: his spare drafts, twice."""
FILL_AT_ONCE_BYTES: Final = 16 * MIB
"""Bytes that are filled by one call of a thread: 40 ms of memory that a host takes as it is touched; a stop waits."""
FILL_WORTH_BYTES_S: Final = 2 * GIB
"""Where pages are allocated and zeroed faster than this, filling ahead saves a writer less than it costs the machine:
warm memory gives 8 to 15 GB/s, memory that the host has taken back 0.1 to 0.5."""
MAX_KEPT_SIZES: Final = 8
"""Sizes of which free slots keep pages, those that writers asked for last: a model has one size of blocks or two."""
DRAFT_SHARE_OF_SLOTS: Final = 2
"""Slots and bytes of one uid's drafts are at most the slots and the capacity divided by this: others can write."""
MAX_HELD_SLOTS: Final = 4_096
"""Unlinked slots whose bytes somebody still holds; each keeps one descriptor of the service open."""
CHECKSUM_QUEUE: Final = 8_192
"""Sealed slots that wait for the checksum thread; those that find no place are queued at a later seal or sweep."""
CHECKSUM_PAUSE_WAIT_S: Final = 0.05
"""How long a probe waits for the checksum thread to close the slot (20 us where the thread runs)."""
KEEP_WAIT_S: Final = 3.0
"""How long a stop that keeps the tier waits for checksums: part of STOP_WAIT_S, and 20 GB of hashing."""
VERIFY_LATER_BYTES: Final = 16 * MIB
"""The largest block, or object of a cache, that is verified while a service serves: one takes the event loop 3 ms."""
VERIFY_SLOTS_AT_ONCE: Final = 1_024
"""Slots that are hashed in the background before the event loop has a turn to take in 1 ms of results."""
VERIFY_BYTES_AT_ONCE: Final = 64 * MIB
"""Bytes that are hashed in the background at once: a stop waits for them, 10 ms."""
VERIFY_RETRY_S: Final = 0.25
"""How long the background waits after memory or descriptors were short."""
TABLE_ENTRIES_PER_SLOT: Final = 2
"""Index entries per slot: a table whose slots are all used is half full, so a miss costs 2.5 probes."""
NVME_BYTES_PER_ENTRY: Final = 64 * KIB
"""Bytes of the NVMe tier for each entry of the table: a block of 16 tokens of a small model."""
TABLE_SHARE_OF_DRAM: Final = 32
"""The entries for NVMe take at most the DRAM capacity divided by this; objects of an earlier start always have one."""
ENTRIES_AT_ONCE: Final = 256
"""Objects on NVMe only that leave a full table at once: to find the oldest among a million takes 10 ms."""
STORED_IN_USE: Final = 4_096
"""Objects of the NVMe tier that are kept as Python's before those that nobody uses become rows, six times smaller."""
TABLE_READER_WAIT_S: Final = 0.1
"""How long a reader of the table waits for a writer that stopped inside a change (KVFS_READER_WAIT_NS)."""

# --- HBM tier --------------------------------------------------------------------------------------------
HBM_SEGMENT_BYTES: Final = 128 * MIB
"""What is taken from a device, exported and returned at once: 640 of them are a device of 80 GiB."""
HBM_SLOTS: Final = 1 << 18
"""Slots of one pool: 320 KiB each of 80 GiB. Their generations are 2 MiB of memory."""
HBM_MIN_SLOT_BYTES: Final = 4 * KIB
"""The least that a slot takes: a smaller one would have more of the tables than of the device."""
HBM_HAZARDS: Final = 2_048
"""Leases that one client has at once: 32,000 tokens in blocks of 16. The service looks at all of a client's in 5 us."""
HBM_EVICTIONS: Final = 64
"""Rounds of eviction for one draft. Each evicts the draft's size at least, which is no room in slots of another size
until a segment of them is empty: the bound keeps a draft of a rare size from emptying the pool."""
HBM_CLIENTS: Final = 64
"""Processes with one pool mapped, those that have ended and are not off the device yet among them."""
HBM_TOKEN_BYTES: Final = 16
"""Of the number by which a process names a place that it has left: nobody guesses another's."""
HBM_SEGMENT_TOKEN_BYTES: Final = 32
"""By which a segment is known after a restart: sixteen drawn, and as many that only who has the store's key makes."""
HBM_KEPT_SEGMENTS: Final = 256
"""Segments that one place in a pool could hand back to a restarted service, 32 GiB: a descriptor each, and a process
usually has 1,024."""
HBM_KEPT_BLOCKS: Final = 1 << 16
"""Blocks that one place could hand back: of 20 GiB in blocks of 320 KiB, in 20 MiB of memory."""
HBM_KEEP_S: Final = 60.0
"""How long a client that lost its service keeps segments mapped: a service that is restarted is there by then, and one
that is not has no use for them."""
HBM_DRAIN_S: Final = 10.0
"""How long what an ended process might still write is not reused where nobody knows who is on the device."""
HBM_LISTINGS: Final = 16
"""Listings of a device in which a living process is looked for: one without a context is in none, and for each the
driver goes through all its clients under its lock."""
HBM_LISTING_PAUSE_S: Final = 0.5
"""Least time between two questions of who is on a device."""
HBM_LISTING_AGE_S: Final = 5.0
"""From which age on a listing says nothing, and a driver that has not answered is said to be silent."""
HBM_LISTING_RETRY_S: Final = 10.0
"""How long a driver that refused to say who is on a device is not asked again."""
HBM_LISTED: Final = 900
"""Processes in one listing. NVIDIA's open driver leaves out those above 950 without saying so."""
HBM_HANG_S: Final = 30.0
"""How long a process may stay on the device after its session: then segments it may write are taken out of use."""
MAX_HBM_DEVICES: Final = 64
"""GPUs that a configuration names: no machine is known to have as many."""
HBM_WANTED: Final = 1 << 16
"""Prefix hashes that a pool remembers as missed, so that a second miss admits them: of 20 GiB in blocks of 320 KiB, in
9 MiB of memory."""

# --- NVMe tier -------------------------------------------------------------------------------------------
MAX_EXTENT_BYTES: Final = 4 * MIB
"""Payload of one DATA record, which a small read of a large object verifies whole."""
EXTENT_SHARE_OF_SEGMENT: Final = 8
"""An extent is at most the segment divided by this, so that segments fill well."""
MIN_NVME_BYTES: Final = 8 * MIB
"""Eight of the smallest segments."""
NVME_SHARE_OF_FREE: Final = 4
"""The default capacity is the free space of the data directory's filesystem divided by this."""
MAX_DEFAULT_NVME_BYTES: Final = 4 * GIB
"""The largest default capacity of the NVMe tier. It is taken whole at the start: who tries kvfs misses no more."""
MIN_SEGMENT_BYTES: Final = 1 * MIB
MAX_SEGMENT_BYTES: Final = 1 * GIB
"""Reclaim frees whole segments: one this large is read and rewritten in about a second."""
SEGMENTS_WANTED: Final = 64
"""The default segment is the capacity divided by this, so that reclaim frees 1.5 percent at a time."""
MIN_SEGMENTS: Final = 8
"""With fewer, the reserve would be most of the tier."""
MAX_SEGMENTS: Final = 1 << 16
"""Each segment keeps a descriptor open."""
MAX_NUMA_NODES: Final = 1_024
"""As many as the kernel is built for at most (CONFIG_NODES_SHIFT=10)."""
MAX_NVME_DEVICES: Final = 16
"""Block devices of one tier: each has 65,536 numbers for its segments, of which there are MAX_SEGMENTS in all."""
RESERVED_SEGMENTS: Final = 2
"""Free segments for reclaim alone: it writes what it keeps to one, to the other where the device fails that."""
REAPPEND_SHARE: Final = 4
"""At most a segment divided by this is rewritten because it is hot: write amplification stays below 4/3."""
DURABLE_PERCENT: Final = 90
"""Durable objects may fill this part of the tier's usable segments: reclaim gains a tenth of what it moves."""
MAX_TOMBSTONE_IDS: Final = 4_096
"""Deletions in one record: 32 KiB."""
MIN_ENDINGS_BYTES: Final = 256 * 1024
"""The least size of each of the two endings files: 64 pages, so that a small tier seldom rewrites them."""
ENDINGS_SHARE_OF_NVME: Final = 64
"""The size of an endings file is the capacity divided by this: half of it has an ending of 32 bytes for every object
that the tier can hold, each of which takes 4 KiB of the log."""
MAX_ENDINGS_BYTES: Final = 32 * MIB
"""The largest endings file: a million endings, 32 MB of memory. Half a file may be endings that still count."""
MAX_LOG_QUEUE: Final = 1 << 17
"""Records that wait to be written, some 60 MB; past it only removals are queued, at most one for each object."""
SCAN_BYTES: Final = 4 * MIB
"""Bytes that a scan of a segment without a footer reads at once."""
UNSYNCED_RECORDS: Final = 8_192
"""The log is synced at the latest after this many records."""
SYNC_INTERVAL_S: Final = 1.0
"""The log is synced at the latest this long after a record was written, even if nobody waits for it."""
GHOST_KEYS: Final = 1 << 18
"""Keys that the ghost queue of write admission remembers: about 30 MB."""
RETURNED_KEYS: Final = 1 << 14
"""Objects from a lower tier that NVMe takes only at their next read, remembered until then: 2 MB."""
WRITE_BEHIND_RECORDS: Final = 256
"""Records that writing behind keeps queued in the log: 256 MiB of 1 MiB objects, a fraction of a second."""
WRITE_BEHIND_POLL_S: Final = 0.01
"""How often writing behind looks for a checksum, or for room in the log."""
SEGMENT_OFFSET_BITS: Final = 32
"""Bits of a table entry's `location` for the offset in the segment, whose number is above."""
MAX_PROMOTIONS: Final = 16
"""Objects that are read back into DRAM at once: each is a draft there."""
HELD_LOOKS: Final = 4
"""Once eviction has found everything in DRAM in use, reads of lower tiers pass it by for so many times as long as that
took, 8 ms where 512 objects are held: to look takes a fifth of the service's thread at most."""
READ_AROUND_BYTES: Final = 256 * MIB
"""Memory beside DRAM for reads of objects that find no slot there; half of it for one uid."""
READ_AROUND_WAIT_S: Final = 2.0
"""How long a read beside DRAM waits for others to end; then it is Busy, and may be repeated."""
READ_AGAIN_PAUSE_S: Final = 0.05
"""A client's pause between two requests for blocks that find no room."""
READ_AROUND_POLL_S: Final = 0.002
"""How often copies beside DRAM are probed for readers: the kernel does not notify; 2.5 us a copy."""
DEFAULT_SCRUB_BYTES_S: Final = 16 * MIB
"""The default speed of the scrub: a terabyte in 17 hours, 0.5 percent of a drive's bandwidth."""
MAX_SCRUB_BYTES_S: Final = 4 * GIB
"""Above this the rate bounds nothing: one extent at a time is slower."""
SCRUB_INTERVAL_S: Final = 3600.0
"""The least time between the starts of two passes of the scrub: a small store is not read all the time."""
FSCK_SEGMENTS: Final = 4
"""Segments that a check reads at once, each with a pooled buffer: one NVMe drive is at its bandwidth."""
READ_ATTEMPTS: Final = 3
"""How often a start reads the same bytes of a segment before it drops the objects in it."""
OBJECT_SHARE_OF_NVME: Final = 2
"""The largest object is the NVMe capacity divided by this, so that one file never empties the tier."""
LARGE_DIRTY_EXTENTS: Final = 16
"""Extents of files being written that wait in memory: 64 MiB of 4 MiB each; then writers wait for the device."""
LARGE_CACHED_EXTENTS: Final = 16
"""Extents cached for readers of objects larger than DRAM takes: 64 MiB, so that a small read is no 4 MiB read."""
LARGE_READS: Final = 8
"""Extents of large objects read at once; fewer than are kept, so that one can always be evicted."""
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
NVME_READ_S: Final = 3.0
"""How long a read may take before the drive counts as away: a drive at its full depth answers within a second, and a
client's own deadline (CLIENT_TIMEOUT_S) is beyond. The longest that a hanging drive costs a reader."""
NVME_WRITE_S: Final = 10.0
"""How long a write or sync may take, and how long durable writers wait for a drive that is away: longer than the pause
of a path that fails over, shorter than the drivers' own timeout (`nvme_core.io_timeout`, 30 s)."""
DEVICE_ALIGNMENT_BYTES: Final = 4_096
"""Offsets, lengths and addresses of direct I/O: a multiple of every logical block size in use."""
DEVICE_CLOSE_WAIT_S: Final = 10.0
"""How long closing a device waits for the operations in flight before it cancels them."""
DEVICE_CANCEL_WAIT_S: Final = 1.0
"""How long a device waits for cancelled operations; buffers that the kernel then still holds are not freed."""

# --- cold tier -------------------------------------------------------------------------------------------
DEFAULT_COLD_BYTES: Final = KIB * GIB
"""1 TiB: a bucket has no limit of its own, and its owner pays for each byte."""
MAX_COLD_PREFIX_BYTES: Final = 512
"""Names after the prefix have up to 160 bytes, and S3's keys 1,024."""
MIN_COLD_BYTES: Final = 16 * MIB
OBJECT_SHARE_OF_COLD: Final = 4
"""The largest object is the capacity divided by this, so that one object never empties the tier."""
MAX_COLD_OBJECT_BYTES: Final = 4 * GIB
"""Objects are uploaded in one PUT, of at most 5 GiB; DRAM takes objects of a quarter of its size."""
COLD_BUFFER_BYTES: Final = 64 * MIB
"""The largest object that is read from NVMe into memory for its upload."""
COLD_UPLOADS: Final = 4
"""Uploads at once: a single stream to S3 carries 50 to 100 MB/s."""
COLD_FETCHES: Final = 8
"""Fetches at once."""
COLD_THREADS: Final = 16
"""Worker threads, and connections: for uploads, fetches, deletions, listings and checks of the endpoint."""
COLD_QUEUE: Final = 1 << 16
"""Objects that wait to be uploaded: 10 MB. One that finds no place is queued at its next read."""
COLD_CONNECT_S: Final = 2.0
"""How long a connection to the endpoint may take."""
DEFAULT_COLD_TIMEOUT_S: Final = 5.0
"""The longest silence within an answer."""
MAX_COLD_TIMEOUT_S: Final = 60.0
COLD_ATTEMPTS: Final = 2
"""Attempts of one request: an engine waits for the block, and can always compute it."""
COLD_FETCH_S: Final = 30.0
"""How long a promotion from the tier may take, with its wait for others; then it is a miss."""
COLD_CHECK_S: Final = 30.0
"""How often an endpoint that answers is checked, so that no engine waits for a dead one."""
COLD_BACKOFF_S: Final = 1.0
"""How long nothing is sent to the endpoint after a failure; it doubles with each further one."""
MAX_COLD_BACKOFF_S: Final = 60.0
"""The longest pause after failures of the endpoint."""
COLD_COMPARE_S: Final = 86_400.0
"""How often a listing of the bucket is compared with the index: 1,000 requests for a million objects."""
COLD_READ_BYTES: Final = 1 * MIB
"""Bytes of an answer read at once, so that its deadline is checked in between."""
COLD_DELETIONS_AHEAD: Final = 4_000
"""Deletions that a comparison with the bucket's listing queues; it waits until some of them are done."""
COLD_NAMES_AT_ONCE: Final = 100
"""Names that a comparison looks at before the event loop has a turn: some milliseconds."""
MAX_COLD_OWNER_BYTES: Final = 4 * KIB
"""The object that names the owner of the prefix."""
MAX_BUCKET_ROW_BYTES: Final = MAX_NAMESPACE_BYTES + KIB
"""An encoded bucket, which the tier keeps beside the bucket's blocks."""

# --- GPU memory ------------------------------------------------------------------------------------------
MAX_COPY_PIECES: Final = 1 << 20
"""Pieces of one plan of copies: 24 MiB of numbers."""
