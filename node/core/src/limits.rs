//! Every bound of a node, each with its reason.
use core::time::Duration;

/// Largest gossip datagram before it is sealed: packets of 1200 bytes fit any path without fragmentation (IPv6's
/// minimum of 1280 less its headers), and the transport's seal adds 49 (`transport::gossip::PAYLOAD_BYTES_MAX`).
pub const DATAGRAM_BYTES_MAX: usize = 1151;
/// Largest encoded advert: with its signature it must fit into one datagram beside a header.
pub const ADVERT_BYTES_MAX: usize = 900;
/// Contents an advert names (32 bytes each): what keeps it under its bound; the rest is found by asking.
pub const ADVERT_HOLDINGS_MAX: usize = 8;
/// Nodes asked for the weights of one stage: more would not make a transfer faster.
pub const SOURCES_MAX: usize = 16;
/// Bytes of a node's name in its advert, cut at a character.
pub const ADVERT_NAME_BYTES_MAX: usize = 64;
/// Bytes of a zone's name in an advert, cut at a character: two words, beside a name and the holdings.
pub const ZONE_BYTES_MAX: usize = 32;
/// Addresses of one kind in an advert: a few interfaces, the first reachable one is used.
pub const ADVERT_ADDRS_MAX: usize = 4;
/// Largest control message: a full push-pull of 2,000 members with adverts, or a plan with its manifest.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Members kept: foca scans them linearly and encodes them in every packet.
pub const MEMBERS_MAX: usize = 4096;
/// Jobs a node takes part in at once; each holds weights, so memory ends long before.
pub const JOBS_MAX: usize = 64;
/// Parts of one job that a node holds at once: tiles of a cut that gives each node several, and those of which it is the standby.
pub const PARTS_MAX: usize = 256;
/// Halos that a tile keeps, whatever their size: bounds the bookkeeping.
pub const HALO_ENTRIES_MAX: usize = 1 << 18;
/// Requests running at once in one job (slots of the KV cache).
pub const SEQUENCES_MAX: u32 = 64;
/// Requests waiting behind them; the next one is refused (HTTP 429).
pub const QUEUE_MAX: usize = 64;
/// Tokens of one request, prompt and answer: the longest context of the models we know.
pub const CONTEXT_MAX: u32 = 1 << 20;
/// Positions in one prefill chunk, and in one batch of chunks: large enough to saturate matrix products, small enough that
/// decode of other requests waits no more than one chunk.
pub const CHUNK_POSITIONS_MAX: u32 = 512;
/// Positions of one request's chunk in the deepest pipelines: fewer rows would not share the weights that each pass reads.
pub const CHUNK_POSITIONS_MIN: u32 = 16;
/// Prefill chunks in flight per request: a pipeline that is deeper waits for some of them.
pub const CHUNKS_IN_FLIGHT_MAX: u32 = 64;
/// Frames a stage keeps for requests it has no place for yet (their `Open`, or another's `Close`, travels on another stream):
/// the chunks in flight of two.
pub const PARKED_FRAMES_MAX: usize = 2 * CHUNKS_IN_FLIGHT_MAX as usize;
/// Frames a stage accepts ahead of its executor: all chunks in flight of all sequences, and a decode step each.
pub const STAGE_QUEUE_MAX: usize = SEQUENCES_MAX as usize * (CHUNKS_IN_FLIGHT_MAX as usize + 1);
/// And positions of these frames: six whole chunks of each sequence, more than are ever in flight.
pub const STAGE_QUEUE_POSITIONS_MAX: u64 = 6 * SEQUENCES_MAX as u64 * CHUNK_POSITIONS_MAX as u64;
/// Ended requests a stage remembers, so that their late frames open no cache: far more than can be on the way at once.
pub const CLOSED_REQUESTS_MAX: usize = 512;
/// Bytes of hidden rows a stage keeps so that they can be sent again: a few thousand tokens of a wide model. What a stage's
/// successors both hold goes first.
pub const RING_BYTES_MAX: u64 = 64 << 20;
/// Frames it keeps, whatever their size: bounds the bookkeeping.
pub const RING_FRAMES_MAX: usize = 16_384;
/// How often a stage tells those before it what it holds.
pub const HELD_EVERY: Duration = Duration::from_millis(100);
/// How long a standby waits for what it asked for before it asks again.
pub const RESUME_QUIET: Duration = Duration::from_millis(500);
/// Positions by which a standby may be behind its stage and count as current: what is in flight between two reports.
pub const STANDBY_LAG_MAX: u32 = 48;
/// How often a job without all its standbys looks for them.
pub const STANDBY_RETRY: Duration = Duration::from_secs(1);
/// Bytes of a GPU's own memory that no plan fills: the driver's context and the compiled kernels take about half of it, what
/// allocators round up the rest.
pub const OWN_MEMORY_KEPT: u64 = 1 << 30;
/// Percent of a machine's free memory that its node keeps back when it is not told how much to offer: the user's programs, this
/// process, and what allocators round up.
pub const SHARED_MEMORY_KEPT_PERCENT: u64 = 25;
/// How often peers that share a job tell each other that they live.
pub const HEARTBEAT: Duration = Duration::from_millis(50);
/// Silence after which a neighbour counts as crashed: a stall of 250 ms (a slow disk, a collector, a scheduler) just after a
/// heartbeat was due kills nobody, and 40 ms for the path are left.
pub const LEASE: Duration = Duration::from_millis(340);
/// How long a request may wait for a plan that does not exist any more before it fails.
pub const DEGRADED_MAX: Duration = Duration::from_secs(30);
/// How long a stage keeps a job whose head is silent.
pub const ORPHAN_MAX: Duration = Duration::from_secs(10);
/// Push-pull of full member state with one random peer.
pub const PUSH_PULL: Duration = Duration::from_secs(30);
/// How often the head repeats a `Prepare` that was not answered: a connection may have broken under it.
pub const PREPARE_RETRY: Duration = Duration::from_secs(1);
/// How long a request may make no progress, at least, before the head sends it again from its log.
pub const WATCHDOG_MIN: Duration = Duration::from_secs(2);
/// Times a request is sent again under one epoch before the job is placed anew.
pub const RESENDS_MAX: u32 = 3;
/// Placements that failed because of one request's work before that request is given up: it may be what breaks them.
pub const REQUEST_STRIKES_MAX: u32 = 3;
/// By how many epochs a stage may know better than its head: more than a head mints in a life, and far from all there are.
pub const EPOCHS_FORGOTTEN_MAX: u32 = 1 << 16;
/// Attempts to place a job in a row before it counts as degraded and waits for the mesh to change.
pub const PLACE_ATTEMPTS_MAX: u32 = 8;
/// How often a degraded job looks for a plan even if nothing seems to have changed.
pub const DEGRADED_RETRY: Duration = Duration::from_secs(1);
/// How long a node that failed a job is left out of its plans, unless it comes back as a new member before.
pub const EXCLUDED: Duration = Duration::from_secs(10);
/// How often a job that runs looks whether it would run better elsewhere, once the mesh has changed.
pub const MOVE_EVERY: Duration = Duration::from_secs(5);
/// Looks in a row that must find so before it moves: a link or a machine that dips for seconds moves nothing.
pub const MOVE_LOOKS: u32 = 3;
/// By how many percent of its time per token a job must gain to be moved: less is within what measurements vary by.
pub const MOVE_GAIN_PERCENT: u64 = 20;
/// How long a job stays where it is after a loss or a move: moving costs its requests a pause.
pub const MOVE_QUIET: Duration = Duration::from_secs(60);
/// How long the weights of a move may take to come: 20 GB at 100 Mbit/s.
pub const FETCH_MAX: Duration = Duration::from_secs(30 * 60);
/// Steps of a challenge: enough to tell a machine from one three times as fast, and what one token of a request costs.
pub const CHALLENGE_STEPS: u32 = 4;
/// Challenges of a node of which the fastest counts: one may meet a busy executor.
pub const CHALLENGES: usize = 3;
/// How soon the next of them follows.
pub const CHALLENGE_SOON: Duration = Duration::from_secs(1);
/// How often a node is challenged after that.
pub const CHALLENGE_EVERY: Duration = Duration::from_secs(60);
/// How long an answer may take before the challenge counts as lost.
pub const CHALLENGE_MAX: Duration = Duration::from_secs(10);
/// From how many times the time it should take on a node is planned with what was timed even if requests ran beside it: below
/// that the difference may be their load, and only a challenge that met none counts.
pub const SLOWER_TIMES: u64 = 3;
/// Least percent of the time it says that a node is planned with: its advert was made on a busy machine then. What is beyond
/// that did not compute.
pub const FASTER_PERCENT_MIN: u64 = 25;
/// Most percent that a node never timed is planned with because others took as much: what attention, norms and launches add to
/// the products of a model large enough to be shared.
pub const UNTIMED_PERCENT_MAX: u64 = 150;
/// Most percent: such a node is used by no plan that has another, so more exact figures serve nothing.
pub const SLOWER_PERCENT_MAX: u64 = 100_000;
/// How long a broken connection of a running job may take to stand again before the head is told: a few round trips, and less
/// than a caller would call a pause.
pub const LINK_BROKEN: Duration = Duration::from_millis(500);
/// How long a stage may go on reporting a neighbour silent that the head itself hears, before their link counts as cut.
pub const LINK_CUT: Duration = Duration::from_secs(1);
/// Steps of a simulation: a step's number shares a frame's 32 bits with the strip's length.
pub const GRID_STEPS_MAX: u32 = 1 << 31;
/// A job file with the files it names: masks of 8192 x 8192 pixels compress to a few megabytes, patterns of millions of cells to
/// tens. Each participant holds it once.
pub const SIMULATION_BYTES_MAX: u64 = 64 << 20;
/// Tiles' parts of checkpoints that the coordinator fetches at once: one comes while the other is forced to the disk.
pub const CHECKPOINT_PARTS_AT_ONCE: usize = 2;
/// Bytes of strips a tile keeps so that they can be sent again: what neighbours' standbys may lag behind.
pub const HALO_LOG_BYTES_MAX: u64 = 256 << 20;
/// Strips sent to a standby that it has not yet said to hold: a few round trips' worth on a fast link.
pub const HALO_WINDOW_BYTES: u64 = 8 << 20;
/// Standbys and owners that one tile feeds for one neighbour: its owner, its standby, and those of the epoch before.
pub const FEEDS_MAX: usize = 4;
/// Strips that wait at a tile for their step: those of the next exchange, and a standby's window of small ones.
pub const STRIPS_WAITING_MAX: usize = 16_384;
/// Frames of an output that wait to be fetched before the tile waits with them: one on its way and one made meanwhile. Of full
/// states one of each kind is kept, which is what the planner counts.
pub const SAVES_WAITING_MAX: usize = 2;
/// Reports a tile keeps, to say them again under another coordinator's epoch.
pub const REPORTS_KEPT: usize = 16;
/// How often whoever computes a tile says how far it is.
pub const TILE_PROGRESS: Duration = Duration::from_millis(200);
/// And for so long it says so each [`TILE_HELD`], once it begins or goes on: how long a loss held all up is worth knowing.
pub const TILE_BEGINS: Duration = Duration::from_secs(2);
/// How often a standby tells those it is fed by what it holds.
pub const TILE_HELD: Duration = Duration::from_millis(20);
/// How soon a standby asks for a snapshot again that did not come, or came too late.
pub const SNAPSHOT_RETRY: Duration = Duration::from_secs(2);
/// How often a warm standby takes a snapshot, at most, whatever it is told.
pub const SNAPSHOT_EVERY_MIN: Duration = Duration::from_millis(200);
/// Nodes that may succeed the coordinator of a simulation, in order: the loss of so many at once is not promised.
pub const SUCCESSORS_MAX: usize = 4;
/// Successors that keep a copy of the last checkpoint: the coordinator and one of them may be lost at once.
pub const MIRRORS: usize = 2;
/// Nodes that coordinated a simulation before and may come back.
pub const PREVIOUS_COORDINATORS_MAX: usize = 8;
/// How long each successor leaves to the one before it, once a majority agrees.
pub const SUCCESSION_TURN: Duration = Duration::from_secs(1);
/// How long a majority must have heard nothing of the coordinator of a model before a successor goes on: a coordinator that only
/// stood still keeps its callers.
pub const SERVE_SUCCESSION: Duration = Duration::from_secs(1);
/// And for how long where the coordinator has a stage without a standby: its weights have to be loaded, perhaps from it alone. Less than
/// [`ORPHAN_MAX`], so that the caches of the other stages are used.
pub const SERVE_SUCCESSION_COLD: Duration = Duration::from_secs(7);
/// How often successors receive what was added to the token log: what is lost with the coordinator is computed once more.
pub const LOG_EVERY: Duration = Duration::from_millis(50);
/// Tokens in one message of the log: a long prompt goes in pieces.
pub const LOG_TOKENS_MAX: usize = 1 << 14;
/// Tokens that a successor keeps of all requests of a job: the contexts of 64 requests of 64 k. A request beyond that is computed
/// from its prompt if its caller asks again.
pub const LOG_KEPT_MAX: usize = 1 << 22;
/// How long a request goes on, and its end is kept, without a caller: its caller may be on its way to another node.
pub const DETACHED_MAX: Duration = Duration::from_secs(30);
/// How long a served model that a successor took over stays without a caller.
pub const UNUSED_MAX: Duration = Duration::from_secs(60);
/// Calls of this node whose requests another node coordinates.
pub const CALLS_AWAY_MAX: usize = 1024;
/// How long a node waits for a token from another coordinator before it asks again, in case the answer was lost.
pub const ASK_AGAIN: Duration = Duration::from_secs(2);
/// How long it counts that a participant said the coordinator is silent: it is said again three times within that. Less than
/// [`SERVE_SUCCESSION`], so that a moment in which many heard nothing costs no coordinator its model.
pub const VOTE_MAX: Duration = Duration::from_millis(600);
/// How long a participant keeps the orders of a successor while it hears the coordinator: the successor repeats them.
pub const DEFERRED_MAX: Duration = PREPARE_RETRY;
/// How soon a checkpoint that could not be copied to a successor is copied again: all of it travels each time.
pub const MIRROR_RETRY: Duration = Duration::from_secs(30);
/// And how soon, where a newer one has replaced it meanwhile.
pub const MIRROR_NEWER: Duration = Duration::from_secs(1);
/// How long one piece of a tile without neighbours may take: it is looked at in between.
pub const TILE_PIECE: Duration = Duration::from_millis(20);
/// Longer pieces, of as many steps as one pass over the memory makes, take so much at most: what a user who ends a run waits.
pub const TILE_PASS: Duration = Duration::from_secs(1);
/// First steps, which are slower than others, before the tiles of a simulation are measured.
pub const RATES_WARM: Duration = Duration::from_millis(500);
/// Tiles are measured over so much at least, several reports of theirs.
pub const RATES_WINDOW: Duration = Duration::from_millis(1500);
/// After nodes joined or left: until a better cut is looked for.
pub const RATES_SETTLES: Duration = Duration::from_secs(5);
/// A cut that was changed for a faster one stays for so long, then for twice as long: what nodes can do changes from moment
/// to moment.
pub const RATES_EVERY: Duration = Duration::from_secs(30);
/// Steps are made again for so long to find the one after which a field was not finite any more.
pub const SEARCH_MOST: Duration = Duration::from_secs(120);
/// Checkpoints and frames that cannot be written are tried again.
pub const COLLECT_RETRY: Duration = Duration::from_secs(2);

/// Positions of one request's prefill chunk in a pipeline of `stages` stages. A prompt is through after (chunks + stages) steps
/// of the slowest stage, and a step takes as long as its chunk is large: deeper pipelines want smaller chunks.
#[must_use]
pub const fn chunk_positions(stages: u32) -> u32 {
    let positions = CHUNK_POSITIONS_MAX / if stages > 4 { stages.div_ceil(4) } else { 1 };
    if positions > CHUNK_POSITIONS_MIN { positions } else { CHUNK_POSITIONS_MIN }
}

/// Prefill chunks of one request in flight in a pipeline of `stages` stages: one at each, one on its way in and one whose
/// acknowledgement is on its way back.
#[must_use]
pub const fn chunks_in_flight(stages: u32) -> u32 {
    let chunks = stages.saturating_add(2);
    if chunks < CHUNKS_IN_FLIGHT_MAX { chunks } else { CHUNKS_IN_FLIGHT_MAX }
}
