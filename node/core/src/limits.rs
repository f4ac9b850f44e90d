//! Every bound of a node, each with its reason.
use core::time::Duration;

/// Bytes of the largest gossip datagram before sealing: a UDP payload of 1200 bytes fits any path without fragmentation (IPv6
/// guarantees packets of 1280 bytes), and the transport's seal adds 49 (`transport::gossip::PAYLOAD_BYTES_MAX`).
pub const DATAGRAM_BYTES_MAX: usize = 1151;
/// Bytes of the largest encoded advert: with its signature and two headers (65 + 3 + 2 bytes) it must fit into one datagram.
pub const ADVERT_BYTES_MAX: usize = DATAGRAM_BYTES_MAX - 70;
/// Contents named in an advert (32 bytes each): more would exceed the advert's size, and peers ask for the rest.
pub const ADVERT_HOLDINGS_MAX: usize = 8;
/// Nodes asked for the weights of one stage: more would not make the transfer faster.
pub const SOURCES_MAX: usize = 16;
/// Bytes of a node's name in its advert, truncated at a character boundary: leaves room for the other fields.
pub const ADVERT_NAME_BYTES_MAX: usize = 64;
/// Bytes of a zone's name in an advert, truncated at a character boundary: two words fit, and leave room for the name and the
/// holdings.
pub const ZONE_BYTES_MAX: usize = 32;
/// Addresses of one kind in an advert: a node has a few interfaces, and the first reachable address is used.
pub const ADVERT_ADDRS_MAX: usize = 4;
/// Devices of one node: a machine has at most eight or ten cards besides its processor, and the advert of sixteen devices of two
/// kinds fits into a datagram.
pub const DEVICES_MAX: usize = 16;
/// Bytes of the largest control message: a full push-pull of 2,000 members with adverts, or a plan with its manifest.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Members in the table: foca scans the table linearly for every packet.
pub const MEMBERS_MAX: usize = 4096;
/// Jobs that a node takes part in at the same time: each holds weights, so memory runs out long before this bound.
pub const JOBS_MAX: usize = 64;
/// Parts of one job on one node: a partition may give each node several tiles, and a node is the standby of other tiles too.
pub const PARTS_MAX: usize = 256;
/// Requests with a cache at a stage: those that run, those that ended and stay cached, and as many whose `Close` is in flight.
pub const CACHES_MAX: usize = 2 * SEQUENCES_MAX as usize + PREFIXES_MAX;
/// Halo strips that a tile retains, whatever their size: bounds the bookkeeping.
pub const HALO_ENTRIES_MAX: usize = 1 << 18;
/// Requests that run at the same time in one job, if the cache has pages for them.
pub const SEQUENCES_MAX: u32 = 64;
/// Positions in a page of the cache: the unit in which memory is charged and shared between requests. A multiple of the page
/// of every engine (32 positions on a CPU, 128 on a GPU).
pub const PAGE_POSITIONS: u32 = 128;
/// Pages that a stage may have in RAM beside those of its device: as many as [`PREFIXES_MAX`] long conversations take.
pub const RAM_PAGES_MAX: u32 = 1 << 16;
/// Draft tokens in a frame. Products of at most eight rows share a pass over the weights on every engine, and
/// [`SEQUENCES_MAX`] requests with drafts fill one chunk.
pub const DRAFTS_MAX: u8 = 7;
/// Rows without drafts that a stage computes like a decode step, whatever else waits, if a token follows them: so what a request lost
/// does not wait behind the prompts of others. No more than a prompt has beside a step anyway, because its last rows are such rows,
/// too: with eight, streams waited for them twice as long as for others.
pub const STEP_ROWS_MAX: u32 = 4;
/// Ended requests whose positions stay cached for requests that begin with the same tokens: bounds what stages report. Pages
/// run out first, except for short requests.
pub const PREFIXES_MAX: usize = 64;
/// Pipelines that serve one model: more than a coordinator can feed.
pub const REPLICAS_MAX: u32 = 16;
/// Share of the present throughput that a further pipeline has to add: a slower one would only hold memory.
pub const REPLICA_GAIN_PERCENT: u64 = 10;
/// Requests queued behind the running ones: a longer queue would only delay the rejection (HTTP 429).
pub const QUEUE_MAX: usize = 64;
/// Tokens of one request, prompt and answer together: the longest context of known models.
pub const CONTEXT_MAX: u32 = 1 << 20;
/// Positions in one prefill chunk, and in one batch of chunks: enough to saturate matrix products, and few enough that decode
/// steps of other requests wait for at most one chunk.
pub const CHUNK_POSITIONS_MAX: u32 = 512;
/// Positions of one request's chunk in the deepest pipelines: fewer rows would not amortise the weights that each forward pass
/// reads.
pub const CHUNK_POSITIONS_MIN: u32 = 16;
/// Time of the prefill rows that share batches with the decode steps of other requests, in all stages together, and in all parts of
/// the job that share a device. A decode step takes about this longer; twice this where it waits for a batch at each stage, because it
/// arrives earlier than expected. More where four rows take more time, where a quarter of a step is more, and where several requests
/// wait for their first token: this much for each, at most [`PREFILL_WEIGHT_MAX`] times.
pub const PREFILL_BESIDE: Duration = Duration::from_millis(20);
/// Time of the prefill rows of a batch on a device that also computes for another job: the tile of a simulation, or its standby,
/// waits for one batch before each of its runs.
pub const PREFILL_SHARED: Duration = Duration::from_millis(100);
/// Most requests without a first token for which [`PREFILL_BESIDE`] counts: streams still get some tokens a second. Measured with 16
/// requests of 300 tokens that arrive at once, on two stages of two cores: 1.05 to 1.1 times the time of their prefill and decoding apart.
/// It was 1.2 to 1.3 where they counted only in the ratio to the streams, and waited for steps: steps were computed for few streams each.
pub const PREFILL_WEIGHT_MAX: u32 = 4;
/// Prefill chunks in flight per request: bounds the queues of a stage, and a deeper pipeline waits for some of the chunks.
pub const CHUNKS_IN_FLIGHT_MAX: u32 = 64;
/// Frames that a stage parks for requests without a slot or an `Open` (the `Open`, or the `Close` of another request, travels
/// on another stream): the chunks in flight of two requests.
pub const PARKED_FRAMES_MAX: usize = 2 * CHUNKS_IN_FLIGHT_MAX as usize;
/// Frames queued ahead of a stage's executor: all chunks in flight of all sequences, and one decode step for each sequence.
pub const STAGE_QUEUE_MAX: usize = SEQUENCES_MAX as usize * (CHUNKS_IN_FLIGHT_MAX as usize + 1);
/// Positions of the queued frames: six full chunks per sequence, the most ever in flight (in a pipeline of four stages).
pub const STAGE_QUEUE_POSITIONS_MAX: u64 = 6 * SEQUENCES_MAX as u64 * CHUNK_POSITIONS_MAX as u64;
/// Ended requests that a stage remembers so that late frames allocate no cache: far more than can be in transit.
pub const CLOSED_REQUESTS_MAX: usize = 512;
/// Bytes of hidden rows in a stage's resend ring: a few thousand tokens of a wide model. Rows that the next stage's owner and
/// its standby both hold are dropped first.
pub const RING_BYTES_MAX: u64 = 64 << 20;
/// Frames in a stage's resend ring, whatever their size: bounds the bookkeeping.
pub const RING_FRAMES_MAX: usize = 16_384;
/// How often a stage acknowledges the positions it holds to its senders: often enough that they can trim their rings.
pub const HELD_EVERY: Duration = Duration::from_millis(100);
/// How often a stage reports how long it has computed: a share of a second means something, and changes slowly enough to read.
pub const BUSY_EVERY: Duration = Duration::from_secs(1);
/// How long after a connection is up again requests are resent: when one machine was unreachable, other connections to it follow.
pub const RECONNECT_SETTLES: Duration = Duration::from_millis(50);
/// How long a standby waits for a resend before it requests it again: the answer may still be in transit.
pub const RESUME_QUIET: Duration = Duration::from_millis(500);
/// Positions by which a standby may trail its stage and still count as current: what is in flight between two reports.
pub const STANDBY_LAG_MAX: u32 = 48;
/// How long no request runs before a coordinator computes resting ones again for its standbys: the next request of a busy
/// caller arrives sooner.
pub const REFRESH_AFTER: Duration = Duration::from_millis(500);
/// How often a job with missing standbys looks for candidates: each search is a planner run.
pub const STANDBY_RETRY: Duration = Duration::from_secs(1);
/// Bytes of a GPU's dedicated memory that no plan fills: the driver's context and the compiled kernels take about half of it,
/// allocator rounding the rest.
pub const DEDICATED_MEMORY_RESERVED: u64 = 1 << 30;
/// Percent of a machine's free memory that the node holds back unless it is configured how much to offer: for the user's
/// programs, this process and allocator rounding.
pub const SHARED_MEMORY_RESERVED_PERCENT: u64 = 25;
/// Interval of heartbeats between peers that share a job: six fit into a [`LEASE`], so that one lost datagram expires none.
pub const HEARTBEAT: Duration = Duration::from_millis(50);
/// Silence after which a neighbour counts as crashed: a stall of 250 ms (slow disk, garbage collector, scheduler) right before
/// a heartbeat is due must not expire a lease, and 40 ms are left for the path.
pub const LEASE: Duration = Duration::from_millis(340);
/// How long a request may wait while its job has no plan before it fails: a caller would not wait longer.
pub const DEGRADED_MAX: Duration = Duration::from_secs(30);
/// How long a participant keeps its parts of a job whose coordinator is silent: other jobs may need the memory.
pub const ORPHAN_MAX: Duration = Duration::from_secs(10);
/// The same while a successor may take the job over: twice [`SERVE_SUCCESSION_COLD`], because votes and turns take longer on
/// busy machines.
pub const ORPHAN_SUCCEEDED_MAX: Duration = Duration::from_secs(15);
/// Interval of the push-pull of full member state with one random peer: repairs what gossip lost.
pub const PUSH_PULL: Duration = Duration::from_secs(30);
/// How often the coordinator repeats an unanswered `Prepare`: a broken connection may have lost it.
pub const PREPARE_RETRY: Duration = Duration::from_secs(1);
/// Minimum time without progress before the coordinator resends a request from its log: shorter pauses are ordinary load.
pub const WATCHDOG_MIN: Duration = Duration::from_secs(2);
/// Resends of a request under one epoch before the job is placed again: if these do not help, a stage is at fault.
pub const RESENDS_MAX: u32 = 3;
/// Placements that failed during one request's work before the request is given up: the request itself may cause the failures.
pub const REQUEST_STRIKES_MAX: u32 = 3;
/// How many epochs a node may be ahead of its coordinator's counter: more than a coordinator issues in one lifetime, and a
/// small part of the 32-bit range.
pub const EPOCHS_FORGOTTEN_MAX: u32 = 1 << 16;
/// Consecutive failed placements before a job counts as degraded and waits for a change of the mesh: more attempts would fail
/// alike.
pub const PLACE_ATTEMPTS_MAX: u32 = 8;
/// How often a degraded job searches for a plan without a known change of the mesh: a change may have been missed.
pub const DEGRADED_RETRY: Duration = Duration::from_secs(1);
/// How long a node that failed a job is excluded from its plans, unless it rejoins before: the same fault is likely to recur at
/// once.
pub const EXCLUDED: Duration = Duration::from_secs(10);
/// Interval of placement reviews of a running job after the mesh changed: a review costs a planner run.
pub const MOVE_EVERY: Duration = Duration::from_secs(5);
/// Consecutive reviews that must agree before a job moves: a link or machine that is slow for seconds must move nothing.
pub const MOVE_REVIEWS: u32 = 3;
/// How long a job stays where it is after a loss or a move: each move pauses its requests.
pub const MOVE_QUIET: Duration = Duration::from_secs(60);
/// How long the weights of a move may take to arrive: 20 GB at 100 Mbit/s take 27 minutes.
pub const FETCH_MAX: Duration = Duration::from_secs(30 * 60);
/// Steps of one challenge: enough to detect a machine that is three times slower than it claims, at the cost of about one
/// token.
pub const CHALLENGE_STEPS: u32 = 4;
/// Challenges of a node of which the fastest counts: a single one may wait for a busy executor.
pub const CHALLENGES: usize = 3;
/// Interval between a node's first challenges: its measured speed should be available soon.
pub const CHALLENGE_SOON: Duration = Duration::from_secs(1);
/// Interval between later challenges of a node: each costs its requests about one token.
pub const CHALLENGE_EVERY: Duration = Duration::from_secs(60);
/// How long an answer may take before the challenge counts as lost: far longer than the steps take on any usable node.
pub const CHALLENGE_MAX: Duration = Duration::from_secs(10);
/// How many times slower than advertised a node must be before a challenge beside running requests counts: below this factor
/// their load may explain the difference, and only a challenge without load counts.
pub const SLOWER_TIMES: u64 = 3;
/// Lower bound of a node's measured step time, in percent of the advertised time: an advert measured on a busy machine may be
/// four times too slow, and a node that is faster still did not compute.
pub const FASTER_PERCENT_MIN: u64 = 25;
/// Upper bound of the step time assumed for a node that was never timed, in percent of the advertised time: attention, norms
/// and launches add at most half to the matrix products of a model that is large enough to be distributed.
pub const UNTIMED_PERCENT_MAX: u64 = 150;
/// Upper bound of a node's measured step time, in percent of the advertised time: no plan uses such a node while it has
/// another, so a more exact figure is of no use.
pub const SLOWER_PERCENT_MAX: u64 = 100_000;
/// How long a broken connection of a running job may take to reconnect before the coordinator receives a report: a few round
/// trips, and less than a caller notices as a pause.
pub const LINK_BROKEN: Duration = Duration::from_millis(500);
/// How long a stage may report a neighbour silent that the coordinator itself hears, before their link counts as cut: most
/// links recover sooner.
pub const LINK_CUT: Duration = Duration::from_secs(1);
/// Steps of a simulation: a halo frame's step plus its number of elements must fit in 32 bits.
pub const GRID_STEPS_MAX: u32 = 1 << 31;
/// Bytes of a job file with the files it names: masks of 8192 × 8192 pixels compress to a few megabytes, patterns of millions
/// of cells to tens of megabytes. Each participant holds one copy.
pub const SIMULATION_BYTES_MAX: u64 = 64 << 20;
/// Tiles' parts of a checkpoint that the coordinator fetches in parallel: one is transferred while the other is synced to disk.
pub const CHECKPOINT_PARTS_AT_ONCE: usize = 2;
/// Bytes of halo strips that a tile retains for resending: bounds how far a neighbour's standby may trail.
pub const HALO_LOG_BYTES_MAX: u64 = 256 << 20;
/// Bytes of halo strips sent to a standby and not yet acknowledged: a few round trips' worth on a fast link.
pub const HALO_WINDOW_BYTES: u64 = 8 << 20;
/// Received halo strips queued at a tile for their step: those of the next exchange, and a standby's window of small strips.
pub const HALO_STRIPS_QUEUED_MAX: usize = 16_384;
/// Output frames of a tile that wait to be fetched before the tile pauses: one in transfer and one computed meanwhile. A tile
/// retains one full state of each kind, which is what the planner charges.
pub const SAVES_WAITING_MAX: usize = 2;
/// Reports that a tile retains: it repeats them under the epoch of another coordinator.
pub const REPORTS_KEPT: usize = 16;
/// Interval of progress reports of a tile's owner and standby: frequent enough for a display, and cheap.
pub const TILE_PROGRESS: Duration = Duration::from_millis(200);
/// How long after a (re)start a tile reports progress every [`TILE_HELD`], so that the coordinator measures the failover stall
/// precisely.
pub const RESTART_REPORTING: Duration = Duration::from_secs(2);
/// How often a standby acknowledges the halos it holds to its senders: often enough that a window never limits a fast link for
/// long.
pub const TILE_HELD: Duration = Duration::from_millis(20);
/// How soon a standby requests a snapshot again that did not arrive, or arrived too late: the fetch itself may take this long.
pub const SNAPSHOT_RETRY: Duration = Duration::from_secs(2);
/// Shortest interval between the snapshots of a warm standby, whatever its order says: copying more often would slow the owner
/// down.
pub const SNAPSHOT_EVERY_MIN: Duration = Duration::from_millis(200);
/// Nodes that may succeed the coordinator of a job, in order: losing more at the same time is outside the guarantee.
pub const SUCCESSORS_MAX: usize = 4;
/// Successors that keep a copy of the last checkpoint: the job survives the simultaneous loss of the coordinator and one
/// successor.
pub const MIRRORS: usize = 2;
/// Previous coordinators of a job that may come back and are still recognised: more than a job loses in practice.
pub const PREVIOUS_COORDINATORS_MAX: usize = 8;
/// Delay between two successors' turns once a majority agrees: the earlier one has time to take over.
pub const SUCCESSION_TURN: Duration = Duration::from_secs(1);
/// How long a majority must hear nothing from a model's coordinator before a successor takes over: a coordinator that only
/// paused keeps its callers.
pub const SERVE_SUCCESSION: Duration = Duration::from_secs(1);
/// The same delay where the coordinator owns a stage without standby: its weights must be loaded again, perhaps from that node
/// alone. Far shorter than [`ORPHAN_SUCCEEDED_MAX`], so that the other stages still have their caches.
pub const SERVE_SUCCESSION_COLD: Duration = Duration::from_secs(7);
/// How often successors receive the additions to the token log: tokens lost with the coordinator are computed again.
pub const LOG_EVERY: Duration = Duration::from_millis(50);
/// Tokens in one message of the log: a long prompt is split, so that no message grows with the context.
pub const LOG_TOKENS_MAX: usize = 1 << 14;
/// Tokens that a successor retains of all requests of a job: 64 requests with a context of 64 k. A request beyond this bound is
/// recomputed from its prompt if its caller asks again.
pub const LOG_KEPT_MAX: usize = 1 << 22;
/// How long a request runs, and its end is retained, without a caller: the caller may be reconnecting through another node.
pub const DETACHED_MAX: Duration = Duration::from_secs(30);
/// How long a served model that a successor took over stays loaded without a caller: its first coordinator may serve it again.
pub const UNUSED_MAX: Duration = Duration::from_secs(60);
/// Calls of this node whose requests another node coordinates: bounds the table.
pub const CALLS_AWAY_MAX: usize = 1024;
/// How long a node waits for a token from another coordinator before it asks again: the answer may be lost.
pub const TOKEN_RETRY: Duration = Duration::from_secs(2);
/// How long a participant's vote that the coordinator is silent counts: it is repeated three times within this time. Shorter
/// than [`SERVE_SUCCESSION`], so that a short outage costs no coordinator its model.
pub const VOTE_MAX: Duration = Duration::from_millis(600);
/// The same where the successor waits for [`SERVE_SUCCESSION_COLD`]: a busy machine that votes late must not restart that wait.
pub const VOTE_MAX_COLD: Duration = Duration::from_secs(2);
/// How long a participant retains the orders of a successor while it still hears the coordinator: the successor repeats them.
pub const DEFERRED_MAX: Duration = PREPARE_RETRY;
/// How soon a failed copy of a checkpoint to a successor is repeated: each attempt transfers all of it.
pub const MIRROR_RETRY: Duration = Duration::from_secs(30);
/// How soon the copy is repeated where a newer checkpoint has replaced it meanwhile: the newer one stays for one
/// checkpoint interval.
pub const MIRROR_NEWER: Duration = Duration::from_secs(1);
/// How long one piece of an undivided tile's steps may take: the executor checks for other work after each piece.
pub const TILE_PIECE: Duration = Duration::from_millis(20);
/// How long a piece may take where one pass over the memory computes several steps: a user who ends a run waits this long at
/// most.
pub const TILE_PASS: Duration = Duration::from_secs(1);
/// Time after a (re)start that is not measured: the first steps of a simulation are slower than later ones.
pub const RATES_WARM_UP: Duration = Duration::from_millis(500);
/// Minimum time over which the step rates of tiles are measured: several progress reports.
pub const RATES_WINDOW: Duration = Duration::from_millis(1500);
/// Delay from a change of the mesh to the search for a better partition: links are measured first, and several nodes may join
/// together.
pub const RATES_SETTLE: Duration = Duration::from_secs(5);
/// How long a rebalanced partition stays, doubled with each further rebalance: the speed of nodes fluctuates.
pub const RATES_EVERY: Duration = Duration::from_secs(30);
/// Longest replay to find the step in which a field became infinite or NaN: a new run with `check_every = 1` finds it too.
pub const SEARCH_MAX: Duration = Duration::from_secs(120);
/// How soon a failed write of a checkpoint or frame is repeated: a full or slow disk may recover.
pub const COLLECT_RETRY: Duration = Duration::from_secs(2);

/// Positions of one request's prefill chunk in a pipeline of `stages` stages. A prompt takes (chunks + stages) steps of the
/// slowest stage, and a step takes time in proportion to its chunk, so deeper pipelines get smaller chunks.
#[must_use]
pub const fn chunk_positions(stages: u32) -> u32 {
    let positions = CHUNK_POSITIONS_MAX / if stages > 4 { stages.div_ceil(4) } else { 1 };
    if positions > CHUNK_POSITIONS_MIN { positions } else { CHUNK_POSITIONS_MIN }
}

/// Prefill chunks of one request in flight in a pipeline of `stages` stages: one per stage, one in transit to the first stage
/// and one whose acknowledgement is in transit back.
#[must_use]
pub const fn chunks_in_flight(stages: u32) -> u32 {
    let chunks = stages.saturating_add(2);
    if chunks < CHUNKS_IN_FLIGHT_MAX { chunks } else { CHUNKS_IN_FLIGHT_MAX }
}
