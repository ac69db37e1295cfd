"""Limits of traces and scheduling, each with its reason."""

from typing import Final

from kvfs.limits.units import KIB, MIB

# --- traces ----------------------------------------------------------------------------------------------
MAX_TRACE_LINE_BYTES: Final = 1 * MIB
"""One request of a trace: MAX_TRACE_REQUEST_BLOCKS ids of 20 digits and more beside them."""
MAX_TRACE_REQUEST_BLOCKS: Final = 1 << 15
"""Blocks of one request: MAX_HASH_TOKENS in blocks of 512 tokens."""
MAX_TRACE_OUTPUT_TOKENS: Final = 1 << 20
"""Tokens of one answer: the simulation decodes each, and no model of today writes as many."""
MAX_TRACE_REFERENCES: Final = 1 << 26
"""Blocks of all requests of a trace, which is held in memory: 232 times the public conversation trace."""

# --- scheduling ------------------------------------------------------------------------------------------
MAX_DEFERRED_REQUESTS: Final = 4_096
"""Requests that wait for room on a decode instance; each is looked at several times a second."""
DEFERRED_SILENT_S: Final = 1.0
"""How long a batch is kept for a deferred request that nobody asks for: four times as long as it is told to wait."""
DEFERRED_FORGOTTEN_S: Final = 120.0
"""How long such a request keeps its place: a proxy asks for those alone that may find room, and ends them by 60 s."""

# --- the Conductor ---------------------------------------------------------------------------------------
MAX_CONDUCTOR_INSTANCES: Final = 256
"""Instances of one Conductor: with the tiers of their stores they stay within MAX_BLOCK_SOURCES. Of engines whose
layers have several caches there are fewer: each kind of window takes a source."""
MAX_ENGINE_GROUPS: Final = 64
"""Groups of layers with a cache of their own that an engine's events speak of: Gemma 3 has six."""
MAX_BLOCK_PARTS: Final = 64
"""Blocks of a window that are as long as one of full attention, each of which looks at the others: Gemma 4 has two."""
MAX_WINDOW_TOKENS: Final = 1 << 31
"""Of a sliding window; one that is said to be longer is no window."""
MAX_BLOCK_SOURCES: Final = 1_024
"""Streams of events times tiers, each a bit of a holder mask."""
MAX_INDEXED_BLOCKS: Final = 1 << 24
"""Blocks of all sources in the Conductor's index: 256 instances of 65,536 blocks."""
MAX_NAME_BYTES: Final = 128
"""Name, model and topic of an instance; they are labels of metrics."""
MAX_URL_BYTES: Final = 1_024
MAX_CONDUCTOR_BODY_BYTES: Final = 16 * MIB
"""One body: MAX_ROUTE_TOKENS of seven digits with commas, or a batch of shorter prompts."""
MAX_SMALL_BODY_BYTES: Final = 64 * KIB
"""Bodies of everything but prompts: an instance with its namespace takes about 1 KiB."""
CONDUCTOR_BODIES_BYTES: Final = 256 * MIB
"""Bodies of all requests that are being received."""
MAX_ROUTE_TOKENS: Final = 1 << 20
"""Tokens of one prompt: the longest contexts of today's models."""
MAX_ROUTE_HASHES: Final = 1 << 16
"""Blocks of one prompt: MAX_ROUTE_TOKENS in blocks of 16."""
MAX_ROUTE_BATCH: Final = 1_024
"""Prompts of one `route_batch`: a tenth of a second of decisions."""
MAX_EXCLUDED: Final = 16
"""Instances that one request may exclude: it is retried twice."""
MAX_RESERVATIONS: Final = 1 << 16
"""Requests that are routed and not over: 256 on each of 256 instances."""
MAX_REMEMBERED_DECISIONS: Final = 1_000
"""Decisions that can be explained: seconds to minutes of traffic, 37 MB with 256 candidates each."""
MAX_STREAMED_DECISIONS: Final = 200
"""Decisions in one event for those who watch: more in a second nobody reads, and each is 200 bytes."""
MAX_ROLE_ORDERS: Final = 100
"""Orders to relabel an instance that can be explained: at one in 20 s half an hour of the fastest swings."""
PREFILL_DEADLINE_S: Final = 120.0
"""How long after its predicted first token a reservation ends where nothing was reported: its client is gone."""
DECODE_DEADLINE_S: Final = 1_800.0
"""The same from the first token on: an answer of 32,000 tokens at 20 tokens a second takes as long."""
OVERDUE_S: Final = 2.0
"""A prefill that is late by this and its own length is taken as done: its report was lost, the queue goes on."""
EXPECTED_BLOCKS_S: Final = 2.0
"""How long the blocks of a finished prefill are believed to be there before its events have come."""
PREFILL_LEG_TOKENS: Final = 512
"""With fewer tokens to compute, a decode instance prefills itself: a leg of its own costs more."""
TRUST_REMEMBERED: Final = 10
TRUST_SHORTFALLS: Final = 3
"""An instance whose answers fall short of the index so often of TRUST_REMEMBERED has its blocks left out."""
TRUST_SHARE: Final = 0.9
"""An answer falls short below this share of the predicted cached tokens: the rest may have been evicted meanwhile."""
UNREACHABLE_S: Final = 10.0
"""How long an instance that failed a request is passed over, unless its metrics answer before."""
MAX_REMEMBERED_FOLDS: Final = 4_096
"""Masks of holders whose instances a pool remembers: popular prefixes share few."""
SWEEP_STEP_S: Final = 0.001
"""Time of one tick that sweeps what cleared sources held: 2 % of a processor."""
MAX_SWEPT_SEGMENTS: Final = 64
"""Segments of the index swept in one tick, however fast: each takes 20 us and more."""
MAX_FADING: Final = 1 << 14
"""Finished prefills whose blocks are believed for EXPECTED_BLOCKS_S: 8,192 in a second."""
MAX_UNREGISTERED_TOPICS: Final = 64
"""Topics without an instance that the status names; further ones are counted together."""
FOREIGN_TOKENS: Final = 2_048
"""The context of a request that was not routed here, such as those from before a restart: only their number is seen."""
COPY_SWEEP_S: Final = 30.0
"""Between two looks for prefixes that are worth a copy: the simulator's, in which their heat halves in 300 s."""
MAX_HEAT_PROMPTS: Final = 1_024
"""Prompts whose blocks are not counted yet; past that a share of them decides."""
HEAT_PROMPTS_TICK: Final = 16
"""Prompts whose blocks are counted in one tick: 320 a second, each 10 to 50 us."""
MAX_HEAT_RUNS: Final = 16
"""Runs of one prompt that are counted, from the first on: a system prompt, a tool's, and turns."""
MAX_HOT_RUNS: Final = 4_096
"""Runs whose heat is known: with 64 blocks each 4 MiB of hashes."""
MAX_HOT_HASHES: Final = 1 << 21
"""Hashes of all of them, 32 MiB: prefixes of models with several kinds of attention are known whole."""
MAX_ORDER_BLOCKS: Final = 512
"""Blocks that are fetched at once; a longer run is several, each with an order or a part of one."""
MAX_COPIED_BLOCKS: Final = 4_096
"""Blocks ordered in one sweep: at 1 MiB each 140 MB/s, 1 % of 100 Gbit. What takes more of a prefix is not ordered."""
MAX_COPY_ORDERS: Final = 256
"""Orders that are open, of all nodes."""
MAX_COOL_ORDERS: Final = 64
"""Of those to let a copy go, beside them."""
MAX_COOLED_BLOCKS: Final = 32_768
"""Blocks of these."""
COPY_ORDER_S: Final = 90.0
"""How long an order is open: a node asks ten times in it."""
COPY_BACKOFF_S: Final = 60.0
"""How long a node that let an order expire gets none, doubled each time."""
MAX_COPY_BACKOFF_S: Final = 3_600.0
"""The longest such pause."""
ORDERS_INTERVAL_S: Final = 5.0
"""How often a node asks for its orders, doubled while it gets no answer, and spread by a quarter."""
MAX_ORDERS_INTERVAL_S: Final = 60.0
"""The longest such pause: a Conductor that comes back is asked within it."""
ORDERS_WAIT_S: Final = 5.0
"""How long the answer may take."""
MAX_ORDERS_BYTES: Final = 8 * MIB
"""The answer: MAX_COOLED_BLOCKS, and MAX_COPIED_BLOCKS of each sweep in COPY_ORDER_S, 36 characters each, are 2 MiB."""
MAX_METRICS_BYTES: Final = 4 * MIB
"""One answer of an engine's `/metrics`: vLLM's takes about 50 KiB."""
PROBE_WAIT_S: Final = 2.0
"""How long an instance's metrics may take: longer means that it answers nobody."""
PROBE_INTERVAL_S: Final = 2.0
"""How often each instance's metrics are looked at."""
SILENT_STREAM_S: Final = 30.0
"""After so long without a batch a publisher is asked for what comes next: an idle one answers, a dead one does not."""
MUTE_STREAM_S: Final = 600.0
"""How long an engine without replays may say nothing after a prefill that made blocks: engines announce blocks as they
fill them, so that by then its publisher is gone or its messages do not come here, and nobody can be asked."""
MANIFEST_TRIES: Final = 5
"""Attempts to get a manifest, with doubling pauses, or all that an engine can replay; then the blocks that come are all
that is known."""
CONDUCTOR_TICK_S: Final = 0.05
"""How often the Conductor looks at deadlines and queues."""
INSTANCES_FILE_INTERVAL_S: Final = 2.0
"""How often the file of instances is looked at."""
ENGINE_ANSWER_S: Final = 5.0
"""How long an engine may take to say what it is: three small answers, of which one that computes is a second late."""
ENGINE_ASK_INTERVAL_S: Final = 10.0
"""How often each engine is asked what it is: one that starts anew takes longer to load its weights."""
ENGINE_RETRY_S: Final = 0.5
"""The first pause after an engine did not say what it is, doubled each time up to ENGINE_ASK_INTERVAL_S."""
DNS_INTERVAL_S: Final = 10.0
"""How often the name of several engines is resolved: as often as each of them is asked what it is."""
DNS_LATE_S: Final = 5.0
"""After so long without an answer the log says so; the system's resolver gives up by itself."""
DNS_ABSENT_ANSWERS: Final = 3
"""Answers in a row that lack an address until it is gone: servers answer with some of many, and an engine that ends
leaves DNS before its requests are over."""
MAX_NAMED_ENGINES: Final = 8
"""Engines that the answer to a request for a model names, of those that have not said yet what they serve."""
MAX_ENGINE_ANSWER_BYTES: Final = 1 * MIB
"""Its list of models or of publishers: a thousand adapters of 600 bytes, or 256 ranks of 300."""
DEFAULT_BLOCK_TOKENS: Final = 16
"""Tokens of a block of an engine that does not say how large they are: vLLM's own default."""
ROUTE_BATCH_TURN: Final = 16
"""Prompts of a batch that are routed before the event loop has a turn: a few milliseconds."""
MAX_CONDUCTOR_TOKENS: Final = 64
"""Bearer tokens of a Conductor: one for each proxy in front of it, with some to change them."""

# --- proxy -----------------------------------------------------------------------------------------------
MAX_PROXY_ENGINES: Final = 1_024
"""Engines behind one proxy: each has a task that watches it, and looking for the least loaded passes over all."""
MAX_PROXY_TOKENS: Final = 1_024
"""Bearer tokens of clients; a longer list belongs into what authenticates in front of it."""
MAX_PROXY_REQUESTS: Final = 4_096
"""Requests that a proxy has in flight, one for each connection that it may have."""
MAX_PROXY_BODY_BYTES: Final = 32 * MIB
"""One request: a million tokens of text take 5 MB, and images in base64 a few more each."""
MAX_PROXY_WAITERS: Final = 1_024
"""Requests that wait for room in a batch: a quarter of those in flight, so that they keep nobody out who has room."""
PROXY_DEFERRED_S: Final = 60.0
"""How long such a request waits, where its first token has no limit: a refused one is told to come back by then."""
MAX_PROXY_ROOMS: Final = 1_024
"""Prompts of one request to SGLang's engines, each with a room: more than the batch of one engine."""
MAX_PROXY_ANSWER_BYTES: Final = 64 * MIB
"""One answer that is not streamed, which is kept until it is whole: a request may be retried as long."""
PROXY_MEMORY_BYTES: Final = 1_024 * MIB
"""Bodies and answers in a proxy at once; a further one is refused with 503."""
PROXY_BODY_PIECE_BYTES: Final = 256 * KIB
"""Bytes of a body received at once, from clients and from engines."""
MAX_EVENT_BYTES: Final = 1 * MIB
"""One event of a streamed answer, which is kept until it is whole: a token with 20 alternatives takes 4 KB."""
ENGINE_CONNECTIONS: Final = 1_024
"""Connections to one engine, each with a request: four times the batch that vLLM has by default."""
ENGINE_WAITERS: Final = 1_024
"""Requests that wait for a connection to one engine; a further one goes to another engine."""
ENGINE_WAIT_S: Final = 5.0
"""How long a request waits for a connection to one engine before it goes to another."""
ENGINE_IDLE_S: Final = 4.0
"""How long an unused connection to an engine is kept: uvicorn, which engines serve with, closes it after 5 s."""
ENGINE_CONNECT_S: Final = 1.0
"""How long a connection to an engine may take: engines that died are to be out within 2 s."""
ENGINE_FIRST_BYTE_S: Final = 600.0
"""The longest wait for the first byte of an answer: OpenAI's own client waits as long."""
ENGINE_SILENCE_S: Final = 120.0
"""The longest silence within an answer: a request that the engine preempted waits for others to end."""
ENGINE_END_S: Final = 1.0
"""How long an engine may take to end a stream after its last event, for the connection to be used again."""
HEALTH_INTERVAL_S: Final = 0.4
"""How long an engine with requests may be silent before it is probed: with the probe, under 2 s."""
HEALTH_TIMEOUT_S: Final = 1.0
"""How long an engine that sends nothing else may take to answer a probe."""
HEALTH_ASK_INTERVAL_S: Final = 0.5
"""How long a Conductor waits before it asks an instance again whether it is there; with HEALTH_TIMEOUT_S, under 2 s."""
HEALTH_LOOK_S: Final = 0.1
"""How often a Conductor looks who owes that answer: one look more or less is all that it is wrong by."""
HEALTH_HEARD_S: Final = 1.4
"""How long an instance counts as alive after a proxy said that bytes of its answers came: with HEALTH_INTERVAL_S, after
which it says so, and a look, under 2 s."""
HEALTH_BUSY_S: Final = 30.0
"""How long one that sends bytes may owe an answer: it would take no request in that time, if it took one at all."""
HEALTH_LATE_S: Final = 0.5
"""A failure during which looks are missing for so long says nothing: the Conductor stood still, not the instance."""
HEALTH_WAIT_S: Final = 5.0
"""After so long it asks on a new connection: a stopped engine collects few, and a lost connection is noticed."""
MAX_HEALTH_BYTES: Final = 64 * KIB
"""One answer at `/health`: engines send nothing, or a line."""
HEALTH_IDLE_S: Final = 5.0
"""How often an engine without requests is probed."""
PROXY_RETRIES: Final = 2
"""How often a request goes to another engine: one that kills engines shall not reach all of them."""
PROXY_LINGER_S: Final = 1.0
"""How long the decode leg of a client that is gone may take from the end of its prefill leg, where the engine that
prefilled keeps the blocks for it: the decode engine has the request by then, and gives them up as it is closed."""
MODEL_LIST_WAIT_S: Final = 2.0
"""How long an engine may take to list its models for a client: it has the list in memory."""
MODEL_LISTS_ASKED: Final = 32
"""Engines asked at once for their models: a client's list costs one request to each engine."""
MODEL_LIST_S: Final = 30.0
"""How often an engine that no Conductor labels is asked for its models, which adapters join and leave."""
CONDUCTOR_WAIT_S: Final = 0.05
"""How long a request waits for a Conductor elsewhere: it decides in a tenth of a millisecond, and load decides else."""
CONDUCTOR_LATE_S: Final = 10.0
"""How long a route that nobody waits for any more is read, to cancel it: longer, and its deadline ends it."""
CONDUCTOR_ROUTES: Final = 1_024
"""Routes under way, late ones among them; a further request goes by load."""
CONDUCTOR_LOOK_S: Final = 2.0
"""How often a Conductor elsewhere is asked for its instances."""
CONDUCTOR_SENDERS: Final = 4
"""Connections for reports to a Conductor: those of one request go out one after the other."""
CONDUCTOR_REPORTS: Final = 2_048
"""Reports that wait for one of them: with all four, those of 2,700 requests."""
TOKENIZE_TIMEOUT_S: Final = 2.0
"""How long an engine may take to tokenize (1.6 ms per 1,000 tokens); without tokens a request goes by load."""
TOKEN_CACHE_BYTES: Final = 64 * MIB
"""Prompts and their tokens that a proxy remembers: 500 conversations of 32,000 tokens."""
TOKENIZE_AFTERWARDS: Final = 64
"""Prompts that are tokenized for the next request of their conversation, after their own was routed."""
TOKENIZE_BYTES: Final = 4 * MIB
"""Longer prompts are routed by load: an engine takes 2 s for a million tokens."""
