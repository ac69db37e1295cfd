"""Limits of sessions, engines' connectors, the mount and waits, each with its reason."""

from typing import Final

from kvfs.limits.units import GIB, KIB, MIB

# --- sessions --------------------------------------------------------------------------------------------
MAX_SESSIONS: Final = 1_024
"""Each session holds a descriptor and a bounded receive buffer."""
MAX_FRAME_BYTES: Final = 1 * MIB
"""One message of a session, either way; a longer length prefix closes the connection."""
MAX_BATCH: Final = 1_024
"""Entries in one batch message: 1,000 blocks are a 512k-token prompt."""
MAX_CLOSING_DESCRIPTORS: Final = 16
"""Descriptors from clients that wait to be closed beside the service's thread, which no file system of theirs stops."""
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
"""After this long a batch gives the event loop a turn, so that one session does not delay the others."""
SESSION_CHUNK_BYTES: Final = 64 * KIB
"""Bytes of one receive call; a session's buffer grows to a whole frame only as bytes come."""
SESSION_BACKLOG: Final = 128
"""Connections that the kernel queues before they are accepted."""
SESSION_HELLO_TIMEOUT_S: Final = 5.0
"""A connection without a HELLO by then is closed."""
SESSION_FRAME_TIMEOUT_S: Final = 10.0
"""A frame that has begun must be complete by then: its buffer is the service's memory."""
CLIENT_TIMEOUT_S: Final = 30.0
"""How long the synchronous client waits for one answer, unless configured otherwise."""
CLIENT_UNREPORTED_HITS: Final = 8_192
"""Hits that wait to be reported to the service: eight batches; further ones are not counted."""
UNHEARD_SEALS: Final = 4_096
"""Blocks sealed natively that the event loop has not taken in: 0.3 s of its time; past it, it seals blocks itself."""
SEALER_IDS: Final = 8_192
"""Object ids that native seals are given at a time, and again when half of them are used."""
CLIENT_SPARE_DRAFTS: Final = 64
"""Drafts granted ahead to a client that puts blocks: as many as one packet seals, or two batches of 32, so that a batch
does not wait for the grants of the one before."""
CLIENT_SPARE_IDLE_S: Final = 5.0
"""A client that has put nothing for so long aborts its spare drafts."""
CLIENT_CLOSE_WAIT_S: Final = 1.0
"""How long a close waits for a thread that connects, which then closes its own connection."""
CLIENT_LOOK_S: Final = 600.0
"""How long who asks what is mounted at an address joins an earlier look, which a service that hangs keeps a thread in:
144 threads in a day of an engine that tries every few seconds."""
CLIENT_REPORT_S: Final = 0.5
"""How often a client reports its hits, for eviction."""
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
MAX_EVENT_BATCHES: Final = 10_000
"""Batches kept for a slow subscriber, for replays (vLLM's default), and of an engine during its replay."""
MAX_REPLAY_BYTES: Final = 64 * MIB
"""Bytes of the batches kept for replays: three million blocks."""
MAX_MANIFEST_REQUESTS: Final = 64
"""Subscribers that one manifest answers; of more, those who asked first ask again."""
MANIFEST_INTERVAL_S: Final = 5.0
"""Pause between two manifests: one of a million blocks is 1,000 batches."""
MANIFEST_WAIT_S: Final = 30.0
"""How long a manifest is waited for."""
REPLAY_WAIT_S: Final = 10.0
"""How long an engine's replay may take; then its blocks are invalidated instead."""
MAX_ENGINE_STREAMS: Final = 1_024
"""Engines, or data-parallel ranks of engines, whose events are followed."""
MAX_ENGINE_BLOCKS: Final = 1 << 20
"""Blocks of one engine that are remembered, about 100 bytes each: 16 million tokens of GPU memory in blocks of 16. One
of several groups of layers counts once for each."""

# --- other machines --------------------------------------------------------------------------------------
MAX_PEERS: Final = 16
"""Machines that one service asks without a directory, each with streams of its own."""
MAX_REMOTE_CONNECTIONS: Final = 256
"""Connections that other machines read over, a thread each: three times as many as MAX_PEERS open at first, and half as
many again as they open at most."""
MAX_REMOTE_GREETINGS: Final = 16
"""Connections whose peer has not proved the secret yet; further ones wait in the backlog."""
REMOTE_GREETING_S: Final = 2.0
"""How long a connection and both proofs may take."""
MIN_CLUSTER_SECRET_BYTES: Final = 32
"""As many bytes as HMAC-SHA256 has: a shorter secret is guessed from one connection."""
MAX_CLUSTER_SECRET_BYTES: Final = 4_096
"""A file of secrets is no log by mistake."""
REMOTE_TLS_KEY_BYTES: Final = 64 * GIB
"""What one key of a TLS session encrypts: AES-GCM's is good for 2^24.5 records (RFC 8446, 5.5), which are 388 GB."""
REMOTE_STREAMS: Final = 4
"""Connections to a peer that bytes come over at first: two meet a 25 GbE link, one more core each."""
MAX_REMOTE_STREAMS: Final = 8
"""The most that are tried: where each has a rate of its own, as over long distances or through several links."""
REMOTE_STREAM_WINDOW_BYTES: Final = 128 * MIB
"""What a rate is measured over, at least: two bursts of reads that are as large as they may be."""
REMOTE_STREAM_WINDOW_S: Final = 0.1
"""And how long at least: other work on either end weighs less then."""
REMOTE_STREAMS_PAUSE_S: Final = 60.0
"""How long a peer is asked for none beside REMOTE_STREAMS once it took none: others' reads have ended by then, and
their streams after REMOTE_IDLE_S."""
MAX_FABRIC_ADDRESS_BYTES: Final = 16_384
"""Where a peer's UCX is, as that says: 70 bytes for each device and protocol, and some. In `ucx_core.h`, too."""
REMOTE_PROBE_S: Final = 1.0
"""How long UCX may take for the first bytes of a peer: connecting takes it some round trips."""
REMOTE_WITHOUT_FABRIC_S: Final = 600.0
"""How long a machine is not asked for UCX that it is not reached by, or whose kvfs is too old to be asked and ends the
connection: each such question takes up to REMOTE_PROBE_S."""
REMOTE_IDLE_S: Final = 30.0
"""How long a link for bytes is kept that nothing comes over: to open one takes three round trips, and MAX_CLUSTER_NODES
machines that have read from one would keep more than MAX_REMOTE_CONNECTIONS."""
REMOTE_SERVED_IDLE_S: Final = 120.0
"""When the serving end ends such a connection: well after its asker, so that no read is on its way then."""
REMOTE_READ_BLOCKS: Final = 16
"""Blocks of one READ: with REMOTE_STREAMS of them a batch of 64 is under way at once."""
MAX_REMOTE_READS: Final = 64
"""READs of one fetch from one machine, as many as have REMOTE_READ_BLOCKS of MAX_FETCH_BLOCKS: each is a task, and one
of MAX_REMOTE_WAITING."""
MAX_REMOTE_BYTES: Final = 64 * MIB
"""Bytes asked of one peer and not here yet; what is not urgent waits at half of it. A larger block goes alone."""
MAX_REMOTE_WAITING: Final = 1_024
"""Reads that wait for their turn at one peer; further ones are misses."""
DEFAULT_REMOTE_MATCH_S: Final = 0.02
"""How long all peers may take to say what they have; who is later counts as having nothing. A round trip within a data
centre takes 0.1 ms, one past a busy event loop 5."""
MAX_REMOTE_MATCH_S: Final = 5.0
"""The longest such wait that may be configured: a request for blocks waits as long for a peer that hangs."""
REMOTE_READ_S: Final = 5.0
"""How long one READ may take: 64 MiB at 100 Mbit/s."""
REMOTE_HEDGE_SHARE: Final = 0.05
"""Of the bytes that are read, how many may be asked of another holder as well, since a read takes longer than so many
others of that peer: a cluster that is slow as a whole reads that much more, and not twice as much."""
REMOTE_HEDGE_FLOOR_S: Final = 0.02
"""No read that is quicker is asked twice: as long as MATCH may take, DEFAULT_REMOTE_MATCH_S, which a caller accepts."""
REMOTE_LATENCIES: Final = 64
"""Times of reads that are kept of a peer, for each octave of bytes: three of them are beyond REMOTE_HEDGE_SHARE."""
REMOTE_LEAST_LATENCIES: Final = 20
"""Fewer say nothing about the slowest REMOTE_HEDGE_SHARE: one of so many is beyond it."""
REMOTE_SILENCE_S: Final = 1.0
"""How long a peer's machine may take to acknowledge a request; one that lost its power or cable is noticed by then."""
REMOTE_FETCH_S: Final = 20.0
"""How long a fetch goes on, through all peers; a client waits CLIENT_TIMEOUT_S for it."""
REMOTE_BACKOFF_S: Final = 0.5
"""How long a peer that failed is not asked, doubled with each failure and spread by half."""
MAX_REMOTE_BACKOFF_S: Final = 30.0
"""The longest such pause: a machine that comes back is used again within it."""
MAX_REMOTE_LIFTS: Final = 64
"""Blocks that peers wait for while they come from NVMe; further ones are busy."""
REMOTE_LIFT_WAIT_S: Final = 1.0
"""How long a peer's request waits for its blocks to come from NVMe, all together, and each of them for the drive: who
hears by then what is not there has most of REMOTE_READ_S left, and asks another peer."""
REMOTE_UNREPORTED_HITS: Final = 8_192
"""Blocks served that eviction has not heard of: of 256 KiB, 4 GiB/s for REMOTE_HITS_S; further ones are not counted."""
REMOTE_HITS_S: Final = 0.5
"""How often blocks that other machines read count as hits, for eviction: as often as clients report theirs."""
MAX_CLUSTER_NODES: Final = 64
"""Machines in one directory: each keeps links to those that it reads from, and each beat lists all."""
DIRECTORY_LEASE_S: Final = 10.0
"""How long a machine that is not heard of stays a member: ten beats, so that a pause of the server ends no lease."""
DIRECTORY_BEAT_S: Final = 1.0
"""Between two beats: how long others take to see a machine that came, and how soon an emptied directory is seen."""
DIRECTORY_CALL_S: Final = 1.0
"""How long the server may take for anything but a lookup, which takes match_wait_s; then its connection is closed."""
DIRECTORY_BACKOFF_S: Final = 0.2
"""How long a server that failed is not asked, doubled with each failure and spread by half."""
MAX_DIRECTORY_BACKOFF_S: Final = 5.0
"""The longest such pause: a directory that comes back is used again within it."""
DIRECTORY_PARTS: Final = 8
"""Of a directory on a Redis Cluster: so many servers can share it. A look-up is a call for each."""
DIRECTORY_LOOK_S: Final = 30.0
"""How often the servers of a Redis Cluster are asked which slots they have while all is well."""
MAX_DIRECTORY_SERVERS: Final = 64
"""Servers of a Redis Cluster with slots: each has a connection."""
MAX_DIRECTORY_LOOKUPS: Final = 64
"""Lookups under way at once; further ones are misses."""
MAX_DIRECTORY_CHANGES: Final = 1 << 16
"""Changes that wait to be written (16 MB of memory): seconds of a store's seals. Past it a manifest heals."""
DIRECTORY_BATCH: Final = 512
"""Changes of one write: the server answers nobody else meanwhile, for 0.5 ms."""
DIRECTORY_LINGER_S: Final = 0.005
"""How long a change waits for others to be written with."""
DIRECTORY_PART_BLOCKS: Final = 1_024
"""Blocks of all machines that a part of a manifest looks at: some 1 ms of the server."""
DIRECTORY_MANIFEST_S: Final = 600.0
"""Between manifests without a cause: they take out machines that ended for good."""
MAX_DIRECTORY_HOLDERS: Final = 16
"""Holders kept of a block, the latest ones: more make nothing faster, and two bytes each keep the hashes compact."""
DIRECTORY_RELEASE_S: Final = 0.2
"""How long a stop waits for the end of the machine's lease; without it the lease runs out."""
MAX_FETCH_BLOCKS: Final = 1_024
"""Blocks of one fetch: a MATCH."""
PULL_BLOCKS: Final = 64
"""Blocks that one machine asks another to fetch at once: so many that four streams are busy between two such pulls."""
PULL_BYTES: Final = 32 * MIB
"""Their bytes: the half of MAX_REMOTE_BYTES that reads take which are not urgent. A larger block goes alone."""
MAX_PULL_BLOCKS: Final = 1_024
"""Blocks of a pull that a machine takes, as of a MATCH."""
MAX_PULL_ADDRESS_BYTES: Final = 272
"""The address in a pull: a host name of 253 characters and a port."""
MAX_PULL_REASON_BYTES: Final = 1_024
"""Why blocks of a pull are missing, as text."""
REMOTE_PULLS: Final = 4
"""Pulls of other machines that are carried out at a time; further ones wait, REMOTE_FETCH_S at most."""
REMOTE_PULL_S: Final = 45.0
"""How long a pull may take: REMOTE_FETCH_S for its turn, as long for the fetch, and the way there and back."""
PULL_TRIES: Final = 3
"""How often a machine is asked for the blocks of one batch: some go away meanwhile, and a wait may run out."""
PULL_PAUSE_S: Final = 0.5
"""Between tries that brought nothing, as long as a peer is not asked after its first failure."""
DRAIN_WALKS: Final = 8
"""Walks through all blocks of a drain, until one finds nothing alone: each brings what came or went in the last one."""
DRAIN_PARENTS: Final = 1 << 16
"""Blocks of which a drain remembers where they went, so that those behind them go there, too."""
MOVE_REMOVALS: Final = 16
"""Blocks that a move removes before others have their turn: some 50 us each with an NVMe tier."""
TASK_LOOKS: Final = 256
"""Blocks of the store that a task looks at before others have their turn."""
TASK_FOLLOW_S: Final = 0.25
"""Between two looks of a command that follows a task: each is a request for the service's whole status."""
MAX_TASK_FAILURES: Final = 16
"""Reasons that the status of a task names; others are counted together."""
MAX_TASK_REASON: Final = 1_024
"""Characters of one of them, which may name several machines: the status of both tasks stays small beside a frame."""

# --- connectors ------------------------------------------------------------------------------------------
CONNECTOR_TIMEOUT_S: Final = 5.0
"""How long a connector waits for the service where nobody waits for it: loads in the background, its start."""
CONNECTOR_MATCH_S: Final = 0.05
"""How long an engine's scheduler may wait for a look-up; only users outside of the service's group wait at all."""
CONNECTOR_HANDOVER_S: Final = 0.05
"""How long a request waits for the last block that its prefill engine has named: seals trail the answer by
milliseconds, and what is not there by then is sooner computed."""
CONNECTOR_FETCH_S: Final = 5.0
"""How long a request waits for blocks of another machine, as for its load: REMOTE_READ_S, or 10 GB at 16 Gbit/s."""
CONNECTOR_FETCHES: Final = 16
"""Requests of one engine that blocks are fetched for at once: a namespace has one session for them, so that more would
only wait in line."""
CONNECTOR_SAVE_S: Final = 0.5
"""How long a step of an engine may wait for drafts; then its blocks are copied into memory and stored later."""
CONNECTOR_LATE_S: Final = 30.0
"""How long a store of an engine's blocks may take that no step waits for: who gives up loses the drafts."""
CONNECTOR_LATE_BYTES: Final = 1 * GIB
"""Copies of blocks that an engine worker keeps for a store that is late; further blocks are dropped. 8,192 tokens of
128 KiB each, which is a usual step of a model of 8 billion parameters."""
CONNECTOR_RETRY_S: Final = 1.0
"""How often a connector tries to connect during an outage."""
CONNECTOR_TRIAL_BLOCKS: Final = 16
"""Blocks that are asked for, of a load that failed, to see whether lower tiers work again."""
CONNECTOR_COPY_S: Final = 60.0
"""How long a layer's copy may take: its load waits at most CONNECTOR_TIMEOUT_S for the service."""
CONNECTOR_STORE_BLOCKS: Final = 256
"""Blocks that an engine worker copies out at once: a part of a step."""
CONNECTOR_STORE_BYTES: Final = 256 * MIB
"""Bytes of these."""
CONNECTOR_STORE_PARTS: Final = 3
"""Parts that have drafts at once: one is filled, one waits, one is sealed."""
CONNECTOR_QUOTA_SHARE: Final = 8
"""They take at most this part of what the store lets one user write at once: two engines of three times as much fit."""
CONNECTOR_WINDOWS: Final = 16
"""Of a prompt's sliding windows one in so many is stored, besides the last one: a long prompt with another end is
computed from less than that many windows on, for a sixteenth of the bytes."""
CONNECTOR_LOADS: Final = 256
"""Loads of requests that wait or run in one engine worker; further ones are misses."""
CONNECTOR_STAGING_BYTES: Final = 32 * MIB
"""Blocks that are in registered memory at once, on their way to a device or from it: one buffer's."""
CONNECTOR_STAGING_BUFFERS: Final = 4
"""Buffers of an engine worker for its loads, two that fill one while another is copied, and as many for its stores; a
step that stores more registers further ones, up to CONNECTOR_LATE_BYTES (1 GiB took an H100's driver 460 ms)."""
CONNECTOR_SLOTS: Final = 1_024
"""Slots of GPU memory that a connector copies from, or to, and hashes by one launch of a kernel: as many as a session
finds at once."""
CONNECTOR_POOL_S: Final = 1.0
"""How long a load waits for the service's pool of GPU memory before it goes on without, and the pool is left."""
CONNECTOR_THREADS: Final = 4
"""Threads of a connector that copies for an engine that has none of its own."""
CONNECTOR_LOCKS: Final = 4_096
"""Blocks that LMCache may lock at once, each a mapping: vm.max_map_count is 65,530."""
CONNECTOR_SIZES: Final = 1 << 18
"""Chunks whose size LMCache's adapter knows when they are deleted, some 50 MB; its usage keeps that of older ones."""
CONNECTOR_LAYOUTS: Final = 256
"""Layouts of LMCache's objects that its adapter remembers, one for each object group of a model."""
WEIGHTS_SAMPLES: Final = 64
"""Samples of each file of weights, for their name."""
WEIGHTS_SAMPLE_BYTES: Final = 4 * KIB
"""Bytes of each sample of a file of weights."""
WEIGHTS_MEMORY_LINES: Final = 1 << 14
"""Lines of 64 bytes sampled from weights in memory: some milliseconds of cache and TLB misses."""
WEIGHTS_DEVICE_CHECK_S: Final = 1.0
"""How often weights in a device's memory are sampled: a read of each tensor, and a wait for the device."""
MAX_ADAPTERS: Final = 4_096
"""Adapters whose files an engine's connector remembers; requests of further ones are not stored."""
ADAPTER_SETTLE_S: Final = 0.02
"""How long ago an adapter's files have to be changed when it is loaded: the times of files tick every 1 to 10 ms."""

# --- waits -----------------------------------------------------------------------------------------------
PUBLISH_WAIT_S: Final = 0.5
"""How long another door waits for a flushed draft whose RELEASE follows its close(); then it is Busy."""
STOP_WAIT_S: Final = 10.0
"""How long a clean stop waits for the requests in flight."""
FINISH_WAIT_S: Final = 4.0
"""The part of STOP_WAIT_S for the log; what is not written then stays in DRAM, or was a cache's."""
LAST_CALLS_WAIT_S: Final = 2.0
"""How long a stop waits for the device after the mount is gone, for the last calls."""
LAST_REQUESTS_WAIT_S: Final = 1.0
"""The part of LAST_CALLS_WAIT_S for what the kernel has queued, where somebody still uses the mount and may go on."""
DETACH_WAIT_S: Final = 1.0
"""How long a hard stop waits for the kernel to detach the mount."""
ANSWER_WAIT_S: Final = 2.0
"""How long a mount may take to answer statfs before it counts as dead."""
KILLED_WAIT_S: Final = 30.0
"""How long a start waits for a killed service, after it has aborted its requests, to release the data: its threads
of the least priority end seconds later on a busy machine (5 s were not enough beside ten others on two processors)."""
MAINTAIN_INTERVAL_S: Final = 1.0
"""Upkeep of the store runs at least this often; a seal brings it forward."""
MAINTAIN_PAUSE_S: Final = 0.02
"""Least time between two runs of upkeep, so that a burst of seals is one run."""

# --- log lines -------------------------------------------------------------------------------------------
LOG_LINES: Final = 20
"""Lines of one cause shown in a minute; the rest is counted. Peers and devices cause thousands a second."""
LOG_INTERVAL_S: Final = 60.0
"""The interval in which lines of one cause are counted, from the first line."""
MAX_LOG_CAUSES: Final = 1_024
"""Causes counted apart, some 500 bytes each: logging statements times the peers that they name."""

# --- mount -----------------------------------------------------------------------------------------------
MAX_WRITE_BYTES: Final = 1 * MIB
"""FUSE max_write: 256 pages, the default of fs.fuse.max_pages_limit."""
MAX_FUSE_THREADS: Final = 8
"""Threads of the native loop, each with buffers of 2 MiB: all but one may wait for the bytes of files."""
MAX_FUSE_REQUESTS: Final = 64
"""Requests that Python handles at once; the kernel's own background limit is 12 by default."""
MAX_MOUNT_FETCHES: Final = 32
"""Look-ups that wait for blocks of other machines; further ones are misses. Half of MAX_FUSE_REQUESTS: where Python
handles every request, as many others are answered meanwhile."""
MAX_LATE_INVALIDATIONS: Final = 1_024
"""Names of one directory whose invalidation waits for such look-ups, 64 KiB; further ones hold up all others."""
MAX_NODES: Final = 1 << 24
"""Nodeids have a 24-bit index."""
KERNEL_CACHE_S: Final = 60
"""How long the kernel may keep names and attributes; changes are invalidated at once."""
MAX_LEARNED_NAMES: Final = 256
"""Names of a directory that is read for its free names: one page of a listing, 2 ms of the event loop."""
MAX_UNRESOLVED_NAMES: Final = 1 << 18
"""Existing names that the kernel does not cache, kept natively so that all others are known to be free: 30 MB."""
SPARE_DRAFTS: Final = 256
"""Empty slots held ready for CREATE where so many files are made without a pause, as of the layers of some chunks: a
burst that Python takes 60 ms to follow, 11 of them at once where another door asks for a name. As `state.h` has it."""
SPARE_DRAFTS_AT_ONCE: Final = 16
"""Those that are held ready at first, and made before Python looks for what else there is to do: 1 ms."""
DESCRIPTORS_PER_SPARE_DRAFT: Final = 16
"""Descriptors that the process may have for each spare draft: without passthrough each keeps one open."""
SLOTS_PER_SPARE_DRAFT: Final = 64
"""Slots of the tier for each spare draft: a tier with few slots keeps them for objects."""
MAX_OPEN_LISTINGS: Final = 4_096
"""Directory handles, each with its place in a listing."""
MAX_DIRECTORY_TIMES: Final = 65_536
"""Directories whose last change is kept in memory, some 300 bytes each; older ones are written to their rows."""
DIRECTORY_TIMES_AT_ONCE: Final = 256
"""Of them, how many are written at once when there are more: 2 ms of the event loop."""
MAX_STALE_RETRIES: Final = 256
"""Threads that are about to look a name up again: each is in an open(2) that lost a race."""
STALE_RETRY_S: Final = 5.0
"""How long the result of such a look-up is kept for its thread, which returns at once unless it is stopped, killed, or
gets no processor."""
STALE_RETRY_MOST_S: Final = 60.0
"""How long it is kept for one that gets none: on busy processors, threads of the idle class were seen to wait 5 s."""
