//! One simulation that was submitted here: what is known of it, and what is written of it.
use super::checkpoints::{self, Checkpoint, Checkpoints, WrittenPart};
use super::forces::Forces;
use super::run_folder::{self, RunFolder};
use super::view::{self, Pace, View, Watched};
use crate::device_thread::tiles::{common, region};
use crate::output::{Writer, render};
use crate::states::StateName;
use bytes::Bytes;
use kernels::grid::Region;
use kernels::grid::simulation::{Field, Mosaic, Simulation};
use node_core::id::{JobId, NodeId, PartId};
use node_core::output::Event;
use node_core::work::steps::{SaveKind, SimulationId, StepsEvent, TileFigures};
use node_core::work::{Ending, Placement};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Whole frames of an output that wait for an earlier one after a loss, in number and in bytes: then it does not come any
/// more, because who made it is gone. As long as nobody is, and the cut stays, it comes.
const FRAMES_HELD: [usize; 2] = [64, 256 << 20];

const CLOSED: &str = "the run is over";

/// One simulation.
pub struct Submission {
    /// Its id.
    pub job: JobId,
    /// What is computed.
    pub simulation: Arc<Simulation>,
    /// Its name for other nodes.
    pub(super) id: SimulationId,
    /// Where outputs go.
    pub out: Option<PathBuf>,
    /// Held for moments only: the thread that decides writes into it.
    pub(super) told: Mutex<Told>,
    pub(super) view: Mutex<Option<Arc<View>>>,
    /// The table of forces, if one is wanted. Held for moments only.
    pub(super) forces: Mutex<Option<Forces>>,
    /// Held while the disk is written.
    pub(super) made: Mutex<Made>,
    /// Changes when something has happened.
    pub(super) changed: watch::Sender<u64>,
}

/// What comes of a simulation, as far as it is here.
#[derive(Default)]
pub(super) struct Made {
    /// The cut that the parts are of.
    pub(super) cut: Vec<Region>,
    /// Outputs of which some tiles are here, by output and step.
    pub(super) mosaics: BTreeMap<(u16, u32), (Mosaic, BTreeSet<PartId>)>,
    /// Frames that are whole and could not be written yet, or wait for earlier ones: a film's are in order.
    pub(super) unwritten: BTreeMap<(u16, u32), Field>,
    /// The step of the next frame to be written, by output.
    pub(super) next: BTreeMap<u16, u32>,
    pub(super) writers: BTreeMap<u16, Writer>,
    pub(super) checkpoints: Option<Checkpoints>,
    /// The run is over: what still arrives is not written, because the folder may belong to another run by now.
    pub(super) closed: bool,
    /// No other run writes into the folder while this is held.
    pub(super) folder: Option<RunFolder>,
}

/// What is known of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The step that it began with here.
    pub begun_at: u32,
    /// Whose it was before.
    pub inherited_from: Option<NodeId>,
    /// Steps that all tiles have made.
    pub step: u32,
    /// Steps between exchanges.
    pub depth: u32,
    /// Predicted nanoseconds of a step.
    pub step_ns: u64,
    /// Who computes what.
    pub tiles: Vec<(NodeId, Region)>,
    /// When the first step could begin.
    pub running_since: Option<Instant>,
    /// When the last step was completed, or the run ended.
    pub computed: Option<Instant>,
    /// How fast it has been of late.
    pub pace: Pace,
    /// When it was last interrupted, and for how long at most.
    pub longest_stall: Duration,
    /// Since when, and the step beyond which it has gone on.
    pub(super) stalled: Option<(Instant, u32)>,
    /// Nodes lost.
    pub losses: u32,
    /// Placed again, after a loss or under another cut.
    pub(super) cut_anew: bool,
    /// The last totals, by field, in units of 2^-40, with the step.
    pub totals: Option<(u32, Vec<i128>)>,
    /// And the first.
    pub first_totals: Option<Vec<i128>>,
    /// The state hash after the last step.
    pub hash: Option<u128>,
    /// The last checkpoint on disk.
    pub checkpoint: Option<u32>,
    /// It ended without one: the run that it was to replace, which is there still.
    pub replaced: Option<String>,
    /// Why it waits, if it does.
    pub waiting: Option<String>,
    /// Another node goes on with it.
    pub moved: bool,
    /// How it ended.
    pub ended: Option<Ending>,
    /// What the tiles spent.
    pub figures: Vec<TileFigures>,
}

impl Told {
    /// Why it ended without all its steps made, if it did.
    pub fn error(&self) -> Option<&str> {
        match self.ended.as_ref()? {
            Ending::Completed => None,
            Ending::Cancelled => Some("it was cancelled"),
            Ending::Moved(why) | Ending::Failed(why) => Some(why),
        }
    }
}

impl Submission {
    /// What is known of it.
    pub fn told(&self) -> Told {
        self.telling().clone()
    }

    /// What watchers see: a step, and a quantity thinned to fit a screen.
    pub fn view(&self) -> Option<Arc<View>> {
        self.view.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Wakes when something has happened.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// An event of its job.
    #[expect(clippy::wildcard_enum_match_arm, reason = "few of many events are about a simulation")]
    pub(super) fn tell(&self, event: &Event) {
        let mut told = self.telling();
        let now = Instant::now();
        match event {
            Event::JobPlaced { step_ns, placement, .. } => {
                if let Placement::Tiles { tiles, depth, .. } = &**placement {
                    told.tiles = tiles.iter().map(|(node, block)| (*node, region(block))).collect();
                    (told.depth, told.step_ns) = (*depth, *step_ns);
                    told.cut_anew |= told.running_since.is_some();
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

    fn tell_steps(&self, told: &mut Told, now: Instant, event: &StepsEvent) {
        match event {
            StepsEvent::Runs { step } => {
                if told.running_since.is_none() {
                    (told.running_since, told.begun_at) = (Some(now), *step);
                }
                told.step = *step;
                told.pace.mark(now, *step);
            }
            StepsEvent::Progress { step } => {
                // What is made again is not gone on with.
                if let Some((since, _)) = told.stalled.take_if(|(_, at)| *step > *at) {
                    told.longest_stall = told.longest_stall.max(now - since);
                }
                told.step = *step;
                told.pace.mark(now, *step);
            }
            StepsEvent::Report { step, report } => {
                told.first_totals.get_or_insert_with(|| report.totals.clone());
                told.totals = Some((*step, report.totals.clone()));
                if let Some(forces) = &*self.forces.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
                    && let Some(force) = self.simulation.force_of(&report.totals)
                {
                    forces.tell(*step, &force);
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

    /// No more forces come: what was told is on the disk when this returns.
    pub(super) fn finish_forces(&self) {
        let forces = self.forces.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(forces) = forces {
            forces.finish();
        }
    }

    /// The run is over: writes what needs all frames, and releases the folder.
    pub(super) fn close(&self, done: bool) {
        let mut made = self.made();
        for number in 0..self.simulation.outputs().len() {
            if let Err(error) = self.write(&mut made, number as u16, true) {
                tracing::warn!("{error}");
            }
        }
        for writer in made.writers.values_mut() {
            if let Err(error) = writer.finish() {
                tracing::warn!("{error}");
            }
        }
        let step = self.telling().step;
        if let Some(folder) = std::mem::replace(&mut *made, Made { closed: true, ..Made::default() }).folder {
            folder.finish(step, done);
        }
        if let Some(before) = self.out.as_deref().filter(|_| !done).and_then(run_folder::replaced) {
            self.telling().replaced = Some(before);
        }
    }

    /// A node is lost that has been silent for so long: what waits for it has waited since then.
    pub(super) fn lost(&self, silent: Duration) {
        let mut told = self.telling();
        told.losses += 1;
        let (since, step) = (Instant::now(), told.step);
        told.stalled.get_or_insert((since.checked_sub(silent).unwrap_or(since), step));
    }

    pub(super) fn cut(&self) -> Vec<Region> {
        self.telling().tiles.iter().map(|(_, region)| *region).collect()
    }

    /// A file for a tile's part of a checkpoint; none where none are kept.
    pub(super) fn begin_part(&self, name: StateName) -> Result<Option<checkpoints::PartFile>, String> {
        let region = self.region_of(name.part)?;
        let mut made = self.made();
        if made.closed {
            return Err(CLOSED.into());
        }
        if let (None, Some(out)) = (&made.checkpoints, &self.out) {
            made.checkpoints = Some(Checkpoints::open(out, &self.simulation)?);
        }
        made.checkpoints.as_mut().map(|checkpoints| checkpoints.begin(name.step, region)).transpose()
    }

    pub(super) fn add_part(&self, part: WrittenPart) {
        if let Some(checkpoints) = &mut self.made().checkpoints {
            checkpoints.add(part);
        }
    }

    pub(super) fn region_of(&self, part: PartId) -> Result<Region, String> {
        self.cut().get(part.index()).copied().ok_or_else(|| "the tile is none of the present cut's".into())
    }

    /// The quantity that an output shows, of which cells, and every how many.
    pub(super) fn shown(&self, number: u16) -> (&str, (Region, usize)) {
        match self.simulation.outputs().get(usize::from(number)) {
            Some(output) => (output.quantity.as_str(), self.simulation.shown(output)),
            // More than the job names: for watchers.
            None => {
                let watched = Watched::of(&self.simulation);
                (watched.quantity, watched.shown)
            }
        }
    }

    /// Bytes of a tile's part of a frame.
    pub(super) fn frame_bytes(&self, name: StateName) -> Result<u64, String> {
        let SaveKind::Output(number) = name.kind else { return Err("expected a frame".into()) };
        let (quantity, (shown, stride)) = self.shown(number);
        let part = common(&shown, &self.region_of(name.part)?);
        let values = part.map_or(0, |part| kernels::grid::simulation::blocks(part, stride).cells());
        Ok((values * self.simulation.needs(quantity).len() * size_of::<f32>()) as u64)
    }

    /// A part of an output is here.
    pub(super) fn take(&self, name: StateName, bytes: &Bytes) -> Result<(), String> {
        let StateName { part, step, kind, .. } = name;
        let cut = self.cut();
        let region = *cut.get(part.index()).ok_or("the tile is none of the present cut's")?;
        let mut made = self.made();
        if made.closed {
            return Err(CLOSED.into());
        }
        if made.cut != cut {
            // Parts under the same cut stay good: they would come again as they were.
            made.mosaics.clear();
            made.cut = cut;
        }
        match kind {
            SaveKind::Snapshot | SaveKind::Checkpoint => Ok(()),
            SaveKind::Output(number) => self.frame(&mut made, (number, step), (part, region), bytes),
        }
    }

    /// A tile's part of a frame; when it was the last, the frame is written.
    pub(super) fn frame(
        &self,
        made: &mut Made,
        key: (u16, u32),
        (tile, region): (PartId, Region),
        bytes: &Bytes,
    ) -> Result<(), String> {
        if made.unwritten.contains_key(&key) {
            return self.write(made, key.0, false);
        }
        if made.next.get(&key.0).is_some_and(|next| key.1 < *next) {
            return Ok(());
        }
        let simulation = &self.simulation;
        let output = simulation.outputs().get(usize::from(key.0));
        let (quantity, shown) = self.shown(key.0);
        let tiles = made.cut.len();
        let entry = match made.mosaics.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let mosaic = Mosaic::new(simulation, quantity, shown).map_err(|e| e.to_string())?;
                entry.insert((mosaic, BTreeSet::new()))
            }
        };
        let part = common(&shown.0, &region).filter(|_| !entry.1.contains(&tile));
        if let Some(part) = part {
            let values = transport::frame::to_f32(bytes);
            let needs = simulation.needs(quantity);
            let each = (values.len() / needs.len().max(1)).max(1);
            for (need, values) in needs.iter().zip(values.chunks_exact(each)) {
                entry.0.add(need, part, values).map_err(|e| e.to_string())?;
            }
        }
        entry.1.insert(tile);
        if entry.1.len() < tiles {
            return Ok(());
        }
        let Some((mosaic, _)) = made.mosaics.remove(&key) else { return Ok(()) };
        let field = mosaic.finish();
        if output.is_some() {
            made.unwritten.insert(key, field);
            return self.write(made, key.0, false);
        }
        let new = View::new(simulation, key.1, field);
        let mut view = self.view.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if view.as_ref().is_none_or(|view| view.step <= new.step) {
            *view = Some(Arc::new(new));
            self.changed.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    /// Writes an output's whole frames in order, as long as none is missing between them, or all of them; what cannot be
    /// written is left to be tried again.
    pub(super) fn write(&self, made: &mut Made, number: u16, all: bool) -> Result<(), String> {
        let (Some(output), Some(out)) = (self.simulation.outputs().get(usize::from(number)), &self.out) else {
            return Ok(());
        };
        let every = u32::try_from(output.every).unwrap_or(u32::MAX);
        let (begun_at, undisturbed) = {
            let told = self.telling();
            (told.begun_at, told.losses == 0 && !told.cut_anew && told.inherited_from.is_none())
        };
        let first = begun_at.checked_next_multiple_of(every).unwrap_or(u32::MAX);
        loop {
            let mut whole = made.unwritten.range((number, 0)..=(number, u32::MAX));
            let Some((&(_, step), field)) = whole.next() else { return Ok(()) };
            let next = made.next.get(&number).copied().unwrap_or(first);
            let held = FRAMES_HELD[0].min(FRAMES_HELD[1] / (4 * field.values.len()).max(1));
            if step > next && !all && (undisturbed || whole.count() < held) {
                return Ok(());
            }
            let writer = match made.writers.entry(number) {
                Entry::Occupied(writer) => writer.into_mut(),
                Entry::Vacant(entry) => {
                    let writer = Writer::new(&self.simulation, output, out, begun_at.into());
                    entry.insert(writer.map_err(|e| e.to_string())?)
                }
            };
            writer.write(step.into(), field).map_err(|e| e.to_string())?;
            if u64::from(step) + output.every > self.simulation.steps() {
                // The last one: whoever is told that the run is done finds all of it.
                writer.finish().map_err(|e| e.to_string())?;
            }
            made.next.insert(number, step.saturating_add(every));
            made.unwritten.remove(&(number, step));
        }
    }

    /// What watchers see, as a picture: a PNG file.
    pub fn picture(&self) -> Option<(u32, Vec<u8>)> {
        let view = self.view()?;
        Some((view.step, Watched::of(&self.simulation).painter(&self.simulation).paint(&view.field, None).png()))
    }

    /// The same for a terminal of so many columns and lines.
    pub fn text(&self, columns: usize, lines: usize) -> Option<(u32, String)> {
        let view = self.view()?;
        let painter = Watched::of(&self.simulation).painter(&self.simulation);
        Some((view.step, render(&painter, &view.field, columns, lines)))
    }

    pub(super) fn checkpoint(&self, step: u32) -> Result<Checkpoint, String> {
        let out = self.out.as_deref().ok_or("this job has no checkpoints")?;
        Checkpoint::open(out, step, &self.simulation)
    }

    pub(super) fn telling(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
