//! The program of a part, behind the questions of the participant: how to create, feed and run it, what state it has,
//! and where it resumes. `job/workload.rs` is the coordinator's counterpart.
use super::output::{Names, Out, PartOutput, Sharing, Started, discard, discard_payload};
use super::stage::StageRun;
use super::tile::TileRun;
use crate::id::{Epoch, JobId, NodeId, PartId, WorkId};
use crate::message::{FrameHeader, ToTile};
use crate::time::{Duration, Instant};
use crate::work::steps::TileStart;
use crate::work::{Cursors, HeldWork, Order, PartState, PartWork, Payload, Resume, RunResult};
use alloc::string::String;

/// What a part computes. A new kind of part is a new variant.
#[derive(Debug)]
pub(super) enum Program {
    Stage(StageRun),
    Tile(TileRun),
}

impl Program {
    pub(super) fn new(now: Instant, job: JobId, epoch: Epoch, order: &Order) -> Self {
        match &order.work {
            PartWork::Stage(stage) => Program::Stage(StageRun::new(job, epoch, order, stage)),
            PartWork::Tile(tile) => Program::Tile(TileRun::new(now, job, epoch, order, tile)),
        }
    }

    // ---- orders

    /// Whether this part, `resident` or still loading, can stay under a new order, whatever its neighbours.
    pub(super) fn may_stay(&self, resident: bool, order: &Order) -> bool {
        match self {
            Program::Stage(_) => resident,
            Program::Tile(tile) => tile.may_stay(order),
        }
    }

    /// Whether it is dropped when a part of another partition of the job is ordered.
    pub(super) fn gives_way(&self) -> bool {
        match self {
            Program::Stage(_) => true,
            Program::Tile(_) => false,
        }
    }

    /// The part stays under another epoch. Returns the step of the snapshot to restore, if it resumes from one.
    pub(super) fn keep(&mut self, now: Instant, epoch: Epoch, order: &Order) -> Option<u32> {
        match (self, &order.work) {
            (Program::Tile(run), PartWork::Tile(tile)) => run.keep(now, epoch, order, tile),
            // A stage adopts its new route when it answers.
            (Program::Stage(_), _) | (Program::Tile(_), PartWork::Stage(_)) => None,
        }
    }

    /// The part is loaded. `ram_pages`: pages that a stage has in RAM. `step` is the step of a tile's cells.
    pub(super) fn loaded(&mut self, now: Instant, (ram_pages, step): (u32, Option<u32>), out: &mut Out) {
        match (self, step) {
            (Program::Stage(stage), _) => stage.set_ram_pages(ram_pages),
            (Program::Tile(run), Some(step)) => run.loaded(step, out),
            (Program::Tile(run), None) => run.wait_for_snapshot(now),
        }
    }

    /// Its state, for the answer to an order. `reroute`: the part stayed, and adopts the order's route now.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        epoch: Epoch,
        order: &Order,
        reroute: bool,
        out: &mut Out,
    ) -> Option<PartState> {
        match (self, &order.work) {
            (Program::Stage(run), PartWork::Stage(stage)) => {
                if reroute {
                    run.keep(epoch, order, stage, out);
                }
                if order.standby.is_some() {
                    run.start_following(now);
                }
                Some(PartState::Stage(run.positions()))
            }
            (Program::Tile(run), _) => Some(run.has()),
            (Program::Stage(_), PartWork::Tile(_)) => None,
        }
    }

    /// A standby starts to follow.
    pub(super) fn start_following(&mut self, order: &Order, part: PartId, out: &mut Out) {
        match self {
            Program::Tile(tile) => tile.start_following(out),
            // The connection should be up before it is needed.
            Program::Stage(_) => {
                if let Some(node) = order.owner(part.after()) {
                    out.push_back(PartOutput::Connect { node });
                }
            }
        }
    }

    /// All parts of the job are ready.
    pub(super) fn go(&mut self, now: Instant, resume: &Resume, out: &mut Out) {
        match (self, resume) {
            (Program::Stage(run), Resume::Stage(resume)) => run.go(now, resume, out),
            (Program::Tile(run), Resume::Tile(at)) => run.go(at, out),
            (Program::Stage(_), Resume::Tile(_)) | (Program::Tile(_), Resume::Stage(_)) => {}
        }
    }

    /// Nothing is sent or started until the part is ordered again.
    pub(super) fn pause(&mut self, out: &mut Out) {
        match self {
            Program::Stage(stage) => stage.pause(out),
            Program::Tile(tile) => tile.pause(out),
        }
    }

    /// Drops all its state.
    pub(super) fn end(&mut self, out: &mut Out) {
        match self {
            Program::Stage(stage) => stage.drop_everything(out),
            Program::Tile(tile) => tile.end(out),
        }
    }

    // ---- channels

    /// A frame arrived. Returns whether a run may start that needs no batching.
    pub(super) fn handle_frame(
        &mut self,
        now: Instant,
        from: NodeId,
        header: FrameHeader,
        payload: Payload,
        out: &mut Out,
    ) -> bool {
        match (self, payload) {
            (Program::Stage(run), payload) => {
                run.handle_frame(now, from, header, payload, out);
                false
            }
            (Program::Tile(run), Payload::Tensor(tensor)) => {
                let taken = run.handle_halo(from, &header, tensor);
                if !taken {
                    out.push_back(discard(tensor));
                }
                taken
            }
            (Program::Tile(_), payload) => {
                discard_payload(payload, out);
                false
            }
        }
    }

    /// A part that this one feeds reports its progress. `live` and `again` as in `ToParticipant::Held`.
    pub(super) fn handle_held(
        &mut self,
        from: NodeId,
        part: PartId,
        cursors: &Cursors,
        (live, again): (bool, bool),
        out: &mut Out,
    ) {
        match self {
            Program::Stage(run) => run.handle_held(from, part, cursors, again, out),
            Program::Tile(run) => run.handle_held(from, part, cursors, (live, again), out),
        }
    }

    /// A message about saved states. Returns whether a run may start that waited for it.
    pub(super) fn handle_tile_message(&mut self, me: NodeId, from: NodeId, say: ToTile, out: &mut Out) -> bool {
        match (self, say) {
            (Program::Stage(_), _) => {}
            (Program::Tile(tile), ToTile::WantSnapshot { .. }) => tile.handle_want_snapshot(from),
            (Program::Tile(tile), ToTile::Saved { step, bytes, .. }) => tile.handle_saved(me, from, step, bytes, out),
            (Program::Tile(tile), ToTile::Fetched { step, kind, .. }) => {
                tile.handle_taken(step, kind, out);
                return true;
            }
        }
        false
    }

    /// Another part has this standby, or none.
    pub(super) fn handle_standby(&mut self, part: PartId, node: Option<NodeId>) {
        match self {
            Program::Stage(run) => run.handle_standby(part, node),
            Program::Tile(run) => run.handle_standby(part, node),
        }
    }

    /// A broken connection is up again: messages that were in flight are lost.
    pub(super) fn handle_reconnected(&mut self, node: NodeId, out: &mut Out) {
        match self {
            Program::Stage(run) => run.handle_reconnected(node, out),
            Program::Tile(run) => run.handle_reconnected(node, out),
        }
    }

    /// Withholds output until the coordinator is heard. A tile need not: none of its results reaches a caller before
    /// all tiles agree.
    pub(super) fn withhold(&mut self) {
        match self {
            Program::Stage(run) => run.withhold(),
            Program::Tile(_) => {}
        }
    }

    /// The coordinator was heard under the present epoch.
    pub(super) fn release(&mut self, out: &mut Out) {
        match self {
            Program::Stage(run) => run.release(true, out),
            Program::Tile(_) => {}
        }
    }

    // ---- runs

    pub(super) fn is_busy(&self) -> bool {
        match self {
            Program::Stage(stage) => stage.is_busy(),
            Program::Tile(tile) => tile.is_busy(),
        }
    }

    pub(super) fn runs(&self, work: WorkId) -> bool {
        match self {
            Program::Stage(stage) => stage.runs(work),
            Program::Tile(tile) => tile.runs(work),
        }
    }

    /// The next batch of a part whose work is batched. Started when the shell has reported everything that happened.
    pub(super) fn start_batch(&mut self, now: Instant, sharing: Sharing, names: &mut Names) -> Option<Started> {
        match self {
            Program::Stage(run) => run.start(now, sharing, names),
            Program::Tile(_) => None,
        }
    }

    /// The next run of a part whose runs start as soon as they can. `paused`: the coordinator waits for the part's
    /// answer first.
    pub(super) fn start(&mut self, now: Instant, paused: bool, names: &mut Names, out: &mut Out) -> Option<Started> {
        match self {
            Program::Stage(_) => None,
            Program::Tile(run) => run.start(now, paused, names, out),
        }
    }

    /// A run is done, or failed. Returns whether to report progress immediately.
    ///
    /// # Errors
    /// The part cannot continue.
    pub(super) fn ran(
        &mut self,
        now: Instant,
        result: Result<RunResult, String>,
        out: &mut Out,
    ) -> Result<bool, String> {
        match (self, result) {
            (Program::Stage(run), result) => {
                let results = result.and_then(|result| match result {
                    RunResult::Batch { results, compute_ns } => Ok((results, Duration::from_nanos(compute_ns))),
                    RunResult::Steps(_) => Err("the executor ran steps of a stage".into()),
                });
                run.ran(now, results, out).map(|()| false)
            }
            (Program::Tile(run), Ok(RunResult::Steps(made))) => Ok(run.ran(now, made, out)),
            (Program::Tile(run), result) => {
                run.failed(out);
                Err(result.err().unwrap_or_else(|| "the executor ran a batch of a tile".into()))
            }
        }
    }

    /// When a batch starts that waits for nothing but time.
    pub(super) fn start_at(&self) -> Option<Instant> {
        match self {
            Program::Stage(run) => run.start_at(),
            Program::Tile(_) => None,
        }
    }

    // ---- reports

    /// When it next reports what it holds, if it has its own timer.
    pub(super) fn report_at(&self) -> Option<Instant> {
        match self {
            Program::Stage(run) => run.report_at(),
            Program::Tile(_) => None,
        }
    }

    /// Reports what it holds, if it has its own timer and that is due.
    pub(super) fn report_due(&mut self, now: Instant, out: &mut Out) {
        match self {
            Program::Stage(run) => run.report_held(now, out),
            Program::Tile(_) => {}
        }
    }

    /// Whether it reports together with all parts of its kind, at fixed intervals.
    pub(super) fn is_periodic(&self) -> bool {
        match self {
            Program::Stage(_) => false,
            Program::Tile(_) => true,
        }
    }

    /// Reports what it holds. Called every `TILE_HELD`.
    pub(super) fn report_held(&mut self, now: Instant, out: &mut Out) {
        match self {
            Program::Stage(_) => {}
            Program::Tile(run) => run.report_held(now, out),
        }
    }

    /// Reports its progress. Called every `TILE_PROGRESS`, and immediately when a run asks for it.
    pub(super) fn report_progress(&self, out: &mut Out) {
        match self {
            Program::Stage(_) => {}
            Program::Tile(run) => run.report_progress(out),
        }
    }

    /// Asks for what it lacks. Called every `TILE_PROGRESS`.
    pub(super) fn ask_again(&mut self, now: Instant, out: &mut Out) {
        match self {
            Program::Stage(_) => {}
            Program::Tile(run) => run.ask_again(now, out),
        }
    }

    pub(super) fn view(&self, order: &Order, part: PartId) -> HeldWork {
        match (self, &order.work) {
            (Program::Tile(tile), _) => {
                let (step, steps) = tile.steps();
                HeldWork::Tile { step, steps }
            }
            (Program::Stage(_), PartWork::Stage(stage)) => HeldWork::Stage { layers: stage.layers_of(part) },
            (Program::Stage(_), PartWork::Tile(_)) => HeldWork::Stage { layers: 0..0 },
        }
    }

    /// Asserts what holds between two inputs. `order`: the part's last order.
    pub(super) fn assert_invariants(&self, order: &Order) {
        match (self, &order.work) {
            (Program::Stage(run), PartWork::Stage(_)) => run.assert_invariants(),
            (Program::Tile(run), PartWork::Tile(_)) => run.assert_invariants(),
            (Program::Stage(_), PartWork::Tile(_)) | (Program::Tile(_), PartWork::Stage(_)) => {
                panic!("part {} computes something else than it was ordered to", order.part)
            }
        }
    }

    pub(super) fn tile(&mut self) -> Option<&mut TileRun> {
        match self {
            Program::Tile(tile) => Some(tile),
            Program::Stage(_) => None,
        }
    }
}

/// Whether a part may continue with the state that its node has. Otherwise all parts start again under a new partition.
pub(super) fn continues(order: &Order) -> bool {
    match &order.work {
        PartWork::Stage(_) => true,
        PartWork::Tile(tile) => matches!(tile.start, TileStart::Continue | TileStart::Snapshot),
    }
}

/// Whether only a node that holds the part can follow the order: nothing could be loaded for it.
pub(super) fn must_be_here(order: &Order) -> bool {
    match &order.work {
        PartWork::Stage(_) => false,
        PartWork::Tile(tile) => tile.start == TileStart::Continue,
    }
}

/// Whether two orders have the same data and the same partition.
pub(super) fn is_in(mine: &Order, theirs: &Order) -> bool {
    match (&mine.work, &theirs.work) {
        (PartWork::Stage(mine), PartWork::Stage(theirs)) => {
            mine.content == theirs.content && mine.layers == theirs.layers
        }
        (PartWork::Tile(_), _) | (_, PartWork::Tile(_)) => false,
    }
}
