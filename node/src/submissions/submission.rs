//! One simulation submitted here: its state, and its results on disk.
use super::checkpoints::stored::Checkpoint;
use super::checkpoints::{self, Checkpoints, WrittenPart};
use super::forces::Forces;
use super::run_folder::{self, RunFolder};
use super::view::{self, LiveView, Pace, View};
use crate::output::{Writer, render};
use crate::regions::{common, region};
use crate::states::StateName;
use bytes::Bytes;
use kernels_grids::Region;
use kernels_simulations::{Field, Mosaic, Simulation};
use node_core::id::{JobId, NodeId, PartId};
use node_core::output::Event;
use node_core::work::steps::{SaveKind, SimulationId, StepsEvent, TileFigures};
use node_core::work::{Ending, Placement};
use parking_lot::{Mutex, MutexGuard};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// After a loss, an earlier frame may never arrive. At most this many complete frames per output (count, bytes) are
/// buffered before writing past the gap. Without a loss or a new tiling, an earlier frame always arrives.
const FRAMES_HELD: [usize; 2] = [64, 256 << 20];

const CLOSED: &str = "the run is over";

/// One simulation.
pub(crate) struct Submission {
    /// Its id.
    pub job: JobId,
    /// The simulation to compute.
    pub simulation: Arc<Simulation>,
    /// Its content id.
    pub(super) id: SimulationId,
    /// Folder for its outputs.
    pub out: Option<PathBuf>,
    /// Locked only briefly: the driver thread writes to it.
    pub(super) told: Mutex<Progress>,
    pub(super) view: Mutex<Option<Arc<View>>>,
    /// The table of forces, if the job has one. Locked only briefly.
    pub(super) forces: Mutex<Option<Forces>>,
    /// Locked while the disk is written.
    pub(super) results: Mutex<Results>,
    /// Changes with every event.
    pub(super) changed: watch::Sender<u64>,
}

/// Results of a simulation on this node.
#[derive(Default)]
pub(super) struct Results {
    /// The tiling that the parts belong to.
    pub(super) cut: Vec<Region>,
    /// Frames of which some tiles' parts have arrived, by output and step.
    pub(super) mosaics: BTreeMap<(u16, u32), (Mosaic, BTreeSet<PartId>)>,
    /// Complete frames that failed to be written, or wait for earlier ones: animations need them in order.
    pub(super) unwritten: BTreeMap<(u16, u32), Field>,
    /// The step of the next frame to write, by output.
    pub(super) next: BTreeMap<u16, u32>,
    pub(super) writers: BTreeMap<u16, Writer>,
    pub(super) checkpoints: Option<Checkpoints>,
    /// The run is over: late results are dropped, because the folder may belong to another run by now.
    pub(super) closed: bool,
    /// No other run writes into the folder while this is held.
    pub(super) folder: Option<RunFolder>,
}

/// State of a simulation, from the events of its job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    /// The step at which it began on this node.
    pub begun_at: u32,
    /// Its previous coordinator.
    pub inherited_from: Option<NodeId>,
    /// Steps that all tiles have completed.
    pub step: u32,
    /// Halo depth: steps between halo exchanges.
    pub depth: u32,
    /// Predicted nanoseconds per step.
    pub step_ns: u64,
    /// Node and region of each tile.
    pub tiles: Vec<(NodeId, Region)>,
    /// When the first step could begin.
    pub running_since: Option<Instant>,
    /// When the last step was completed, or the run ended.
    pub computed: Option<Instant>,
    /// Its recent speed.
    pub pace: Pace,
    /// The longest interruption so far.
    pub longest_stall: Duration,
    /// Start of the current interruption, and the step that it must pass to end.
    pub(super) stalled: Option<(Instant, u32)>,
    /// Number of nodes lost.
    pub losses: u32,
    /// It was placed again while running, after a loss or by a rebalance.
    pub(super) placed_again: bool,
    /// The last totals per field, in units of 2^-40, with their step.
    pub totals: Option<(u32, Vec<i128>)>,
    /// The first totals.
    pub first_totals: Option<Vec<i128>>,
    /// The state hash after the last step.
    pub hash: Option<u128>,
    /// The last checkpoint on disk.
    pub checkpoint: Option<u32>,
    /// If it ended without a checkpoint: a description of the run that it was to replace, which is still there.
    pub replaced: Option<String>,
    /// Why it is paused, if it is.
    pub waiting: Option<String>,
    /// Another node coordinates it now.
    pub moved: bool,
    /// How it ended.
    pub ended: Option<Ending>,
    /// Accumulated times and bytes of the tiles.
    pub figures: Vec<TileFigures>,
}

impl Progress {
    /// Why it ended before its last step, if it did.
    pub(crate) fn error(&self) -> Option<&str> {
        match self.ended.as_ref()? {
            Ending::Completed => None,
            Ending::Cancelled => Some("it was cancelled"),
            Ending::Moved(why) | Ending::Failed(why) => Some(why),
        }
    }
}

impl Submission {
    /// Its state.
    pub(crate) fn told(&self) -> Progress {
        self.telling().clone()
    }

    /// Whether another node coordinates it now, or this node gave it up.
    pub(super) fn moved(&self) -> bool {
        self.told().moved
    }

    /// The live view: a step, and a quantity downsampled to fit a screen.
    pub(crate) fn view(&self) -> Option<Arc<View>> {
        self.view.lock().clone()
    }

    /// Wakes at every event.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Handles an event of its job.
    #[expect(clippy::wildcard_enum_match_arm, reason = "only a few events are about a simulation")]
    pub(super) fn handle_event(&self, event: &Event) {
        let mut told = self.telling();
        let now = Instant::now();
        match event {
            Event::JobPlaced { step_ns, placement, .. } => {
                if let Placement::Tiles { tiles, depth, .. } = &**placement {
                    told.tiles = tiles.iter().map(|(node, block)| (*node, region(block))).collect();
                    (told.depth, told.step_ns) = (*depth, *step_ns);
                    told.placed_again |= told.running_since.is_some();
                }
            }
            Event::JobReady { .. } => told.waiting = None,
            Event::JobDegraded { reason, .. } => told.waiting = Some(view::named(&self.simulation, reason.clone())),
            Event::JobEnded { ending, figures, .. } => {
                told.computed.get_or_insert(now);
                told.ended = Some(match ending.clone() {
                    Ending::Failed(reason) => Ending::Failed(view::named(&self.simulation, reason)),
                    ending @ (Ending::Completed | Ending::Cancelled | Ending::Moved(_)) => ending,
                });
                told.figures.clone_from(figures);
            }
            Event::Steps { event, .. } => self.tell_steps(&mut told, now, event),
            _ => return,
        }
        drop(told);
        self.changed.send_modify(|count| *count += 1);
    }

    fn tell_steps(&self, told: &mut Progress, now: Instant, event: &StepsEvent) {
        match event {
            StepsEvent::Runs { step } => {
                if told.running_since.is_none() {
                    (told.running_since, told.begun_at) = (Some(now), *step);
                }
                told.step = *step;
                told.pace.mark(now, *step);
            }
            StepsEvent::Progress { step } => {
                // Replayed steps do not end the interruption.
                if let Some((since, _)) = told.stalled.take_if(|(_, at)| *step > *at) {
                    told.longest_stall = told.longest_stall.max(now - since);
                }
                told.step = *step;
                told.pace.mark(now, *step);
            }
            StepsEvent::Report { step, report } => {
                told.first_totals.get_or_insert_with(|| report.totals.clone());
                told.totals = Some((*step, report.totals.clone()));
                if let Some(forces) = &*self.forces.lock()
                    && let Some(force) = self.simulation.force_of(&report.totals)
                {
                    forces.append(*step, &force);
                }
                if report.hash.is_some() {
                    told.hash = report.hash;
                    told.computed = Some(now);
                    told.step = *step;
                }
            }
            StepsEvent::Checkpoint { step } => {
                told.checkpoint = Some(*step);
                told.waiting = None;
            }
            StepsEvent::Waiting { reason } => told.waiting = Some(view::named(&self.simulation, reason.clone())),
        }
    }

    /// Closes the table of forces; all lines are on disk when this returns.
    pub(super) fn finish_forces(&self) {
        let forces = self.forces.lock().take();
        if let Some(forces) = forces {
            forces.finish();
        }
    }

    /// Ends the run: writes the remaining frames and the indices, and releases the folder.
    pub(super) fn close(&self, done: bool) {
        let mut results = self.results();
        for number in 0..self.simulation.outputs().len() {
            if let Err(error) = self.write(&mut results, number as u16, true) {
                tracing::warn!("{error}");
            }
        }
        for writer in results.writers.values_mut() {
            if let Err(error) = writer.finish() {
                tracing::warn!("{error}");
            }
        }
        let step = self.telling().step;
        if let Some(folder) = std::mem::replace(&mut *results, Results { closed: true, ..Results::default() }).folder {
            folder.finish(step, done);
        }
        if let Some(before) = self.out.as_deref().filter(|_| !done).and_then(run_folder::replaced) {
            self.telling().replaced = Some(before);
        }
    }

    /// Records the loss of a node that has been silent for `silent`: the interruption began then.
    pub(super) fn lost(&self, silent: Duration) {
        let mut told = self.telling();
        told.losses += 1;
        let (since, step) = (Instant::now(), told.step);
        told.stalled.get_or_insert((since.checked_sub(silent).unwrap_or(since), step));
    }

    pub(super) fn cut(&self) -> Vec<Region> {
        self.telling().tiles.iter().map(|(_, region)| *region).collect()
    }

    /// The file for a tile's part of a checkpoint; `None` if no checkpoints are saved.
    pub(super) fn begin_part(&self, name: StateName) -> Result<Option<checkpoints::PartFile>, String> {
        let region = self.region_of(name.part)?;
        let mut results = self.results();
        if results.closed {
            return Err(CLOSED.into());
        }
        if let (None, Some(out)) = (&results.checkpoints, &self.out) {
            results.checkpoints = Some(Checkpoints::open(out, &self.simulation)?);
        }
        results.checkpoints.as_mut().map(|checkpoints| checkpoints.begin(name.step, region)).transpose()
    }

    pub(super) fn add_part(&self, part: WrittenPart) {
        if let Some(checkpoints) = &mut self.results().checkpoints {
            checkpoints.add(part);
        }
    }

    pub(super) fn region_of(&self, part: PartId) -> Result<Region, String> {
        self.cut().get(part.index()).copied().ok_or_else(|| "the tile does not belong to the present tiling".into())
    }

    /// The quantity that an output shows, its region, and the stride between cells.
    pub(super) fn shown(&self, number: u16) -> (&str, (Region, usize)) {
        match self.simulation.outputs().get(usize::from(number)) {
            Some(output) => (output.quantity.as_str(), self.simulation.output_view(output)),
            // Numbers past the job's own outputs are for live viewers.
            None => {
                let watched = LiveView::of(&self.simulation);
                (watched.quantity, watched.shown)
            }
        }
    }

    /// Bytes of a tile's part of a frame.
    pub(super) fn frame_bytes(&self, name: StateName) -> Result<u64, String> {
        let SaveKind::Output(number) = name.kind else { return Err("expected a frame".into()) };
        let (quantity, (shown, stride)) = self.shown(number);
        let part = common(&shown, &self.region_of(name.part)?);
        let values = part.map_or(0, |part| kernels_grids::any_tile::blocks(part, stride).cells());
        Ok((values * self.simulation.source_quantities(quantity).len() * size_of::<f32>()) as u64)
    }

    /// Adds a tile's part of an output.
    pub(super) fn take(&self, name: StateName, bytes: &Bytes) -> Result<(), String> {
        let StateName { part, step, kind, .. } = name;
        let cut = self.cut();
        let region = *cut.get(part.index()).ok_or("the tile does not belong to the present tiling")?;
        let mut results = self.results();
        if results.closed {
            return Err(CLOSED.into());
        }
        if results.cut != cut {
            // Under the same tiling, parts stay valid: they would be computed again with the same values.
            results.mosaics.clear();
            results.cut = cut;
        }
        match kind {
            SaveKind::Snapshot | SaveKind::Checkpoint => Ok(()),
            SaveKind::Output(number) => self.frame(&mut results, (number, step), (part, region), bytes),
        }
    }

    /// Adds a tile's part of a frame; after the last part, the frame is written.
    pub(super) fn frame(
        &self,
        results: &mut Results,
        key: (u16, u32),
        (tile, region): (PartId, Region),
        bytes: &Bytes,
    ) -> Result<(), String> {
        if results.unwritten.contains_key(&key) {
            return self.write(results, key.0, false);
        }
        if results.next.get(&key.0).is_some_and(|next| key.1 < *next) {
            return Ok(());
        }
        let simulation = &self.simulation;
        let output = simulation.outputs().get(usize::from(key.0));
        let (quantity, shown) = self.shown(key.0);
        let tiles = results.cut.len();
        let entry = match results.mosaics.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let mosaic = Mosaic::new(simulation, quantity, shown).map_err(|e| e.to_string())?;
                entry.insert((mosaic, BTreeSet::new()))
            }
        };
        let part = common(&shown.0, &region).filter(|_| !entry.1.contains(&tile));
        if let Some(part) = part {
            let values = transport::frame::to_f32(bytes);
            let needs = simulation.source_quantities(quantity);
            let each = kernels_grids::any_tile::blocks(part, shown.1).cells();
            let expected = each * needs.len();
            if values.len() != expected {
                let found = values.len();
                return Err(format!(
                    "the frame of tile {tile} has {found} values, expected {expected}: fetch it again"
                ));
            }
            for (need, values) in needs.iter().zip(values.chunks_exact(each.max(1))) {
                entry.0.add(need, part, values).map_err(|e| e.to_string())?;
            }
        }
        entry.1.insert(tile);
        if entry.1.len() < tiles {
            return Ok(());
        }
        let Some((mosaic, _)) = results.mosaics.remove(&key) else { return Ok(()) };
        let field = mosaic.finish();
        if output.is_some() {
            results.unwritten.insert(key, field);
            return self.write(results, key.0, false);
        }
        let new = View::new(simulation, key.1, field);
        let mut view = self.view.lock();
        if view.as_ref().is_none_or(|view| view.step <= new.step) {
            *view = Some(Arc::new(new));
            self.changed.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    /// Writes an output's complete frames in order up to a gap, or all of them with `all`. A failed write is retried by
    /// the next call.
    pub(super) fn write(&self, results: &mut Results, number: u16, all: bool) -> Result<(), String> {
        let (Some(output), Some(out)) = (self.simulation.outputs().get(usize::from(number)), &self.out) else {
            return Ok(());
        };
        let every = u32::try_from(output.every).unwrap_or(u32::MAX);
        let (begun_at, undisturbed) = {
            let told = self.telling();
            (told.begun_at, told.losses == 0 && !told.placed_again && told.inherited_from.is_none())
        };
        let first = begun_at.checked_next_multiple_of(every).unwrap_or(u32::MAX);
        loop {
            let mut whole = results.unwritten.range((number, 0)..=(number, u32::MAX));
            let Some((&(_, step), field)) = whole.next() else { return Ok(()) };
            let next = results.next.get(&number).copied().unwrap_or(first);
            let held = FRAMES_HELD[0].min(FRAMES_HELD[1] / (4 * field.values.len()).max(1));
            if step > next && !all && (undisturbed || whole.count() < held) {
                return Ok(());
            }
            let writer = match results.writers.entry(number) {
                Entry::Occupied(writer) => writer.into_mut(),
                Entry::Vacant(entry) => {
                    let writer = Writer::new(&self.simulation, output, out, begun_at.into());
                    entry.insert(writer.map_err(|e| e.to_string())?)
                }
            };
            writer.write(step.into(), field).map_err(|e| e.to_string())?;
            if u64::from(step) + output.every > self.simulation.steps() {
                // The last frame: all files must be complete before the end of the run is reported.
                writer.finish().map_err(|e| e.to_string())?;
            }
            results.next.insert(number, step.saturating_add(every));
            results.unwritten.remove(&(number, step));
        }
    }

    /// The live view as a PNG file, with its step.
    pub(crate) fn picture(&self) -> Option<(u32, Vec<u8>)> {
        let view = self.view()?;
        Some((view.step, LiveView::of(&self.simulation).painter(&self.simulation).paint(&view.field, None).png()))
    }

    /// The live view as text for a terminal of `columns` × `lines`, with its step.
    pub(crate) fn text(&self, columns: usize, lines: usize) -> Option<(u32, String)> {
        let view = self.view()?;
        let painter = LiveView::of(&self.simulation).painter(&self.simulation);
        Some((view.step, render(&painter, &view.field, columns, lines)))
    }

    pub(super) fn checkpoint(&self, step: u32) -> Result<Checkpoint, String> {
        let out = self.out.as_deref().ok_or("this job saves no checkpoints")?;
        Checkpoint::open(out, step, &self.simulation)
    }

    pub(super) fn telling(&self) -> MutexGuard<'_, Progress> {
        self.told.lock()
    }

    pub(super) fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock()
    }
}

#[cfg(test)]
mod tests;
