//! Results of a simulation, assembled from tiles: saved states as they are fetched from owners, and reports as they are
//! added up.
use crate::id::PartId;
use crate::planted::{self, Planted};
use crate::work::steps::{Report, SaveKind};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// States and reports that need a part from each tile.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    /// Parts that are here, by state.
    parts: BTreeMap<(u32, SaveKind), BTreeSet<PartId>>,
    /// The last complete state of each kind. Earlier ones are not needed any more, unless they are `open`.
    whole: BTreeMap<SaveKind, u32>,
    /// States that are announced and not complete. Parts may overtake each other, and every frame of an output counts.
    open: BTreeSet<(SaveKind, u32)>,
    reports: BTreeMap<u32, BTreeMap<PartId, Report>>,
    /// The last step whose report was complete.
    reported: Option<u32>,
}

impl Assembly {
    /// A part is announced. Returns whether it is still needed.
    pub(super) fn wants(&mut self, tile: PartId, step: u32, kind: SaveKind) -> bool {
        let late = self.whole.get(&kind).is_some_and(|whole| step <= *whole) && !self.open.contains(&(kind, step));
        if late || self.parts.get(&(step, kind)).is_some_and(|tiles| tiles.contains(&tile)) {
            return false;
        }
        self.open.insert((kind, step));
        true
    }

    /// A part is here. Returns whether its state is complete.
    pub(super) fn part(&mut self, tiles: usize, tile: PartId, step: u32, kind: SaveKind) -> bool {
        let parts = self.parts.entry((step, kind)).or_default();
        parts.insert(tile);
        parts.len() + lacking(kind) == tiles
    }

    /// A state is complete and handled. Except for outputs, earlier states of its kind are dropped.
    pub(super) fn whole(&mut self, step: u32, kind: SaveKind) {
        let whole = self.whole.entry(kind).or_insert(step);
        *whole = step.max(*whole);
        let dealt_with = |at: u32, of: SaveKind| match kind {
            SaveKind::Output(_) => of == kind && at == step,
            SaveKind::Checkpoint | SaveKind::Snapshot => of == kind && at <= step,
        };
        self.parts.retain(|(at, of), _| !dealt_with(*at, *of));
        self.open.retain(|(of, at)| !dealt_with(*at, *of));
    }

    /// Complete states of a kind that are not handled yet.
    pub(super) fn complete(&self, tiles: usize, kind: SaveKind) -> Vec<u32> {
        let parts = self.parts.iter().filter(|((_, of), parts)| *of == kind && parts.len() + lacking(kind) >= tiles);
        parts.map(|((step, _), _)| *step).collect()
    }

    /// Whether no part waits for the rest of its state.
    pub(super) fn is_idle(&self) -> bool {
        self.parts.is_empty()
    }

    /// The last step that all tiles have reported under the present partition.
    pub(super) fn reported(&self) -> Option<u32> {
        self.reported
    }

    /// Whether an output of an earlier step is announced and not complete.
    pub(super) fn waits_for_outputs(&self, before: u32) -> bool {
        self.open.iter().any(|(kind, step)| matches!(kind, SaveKind::Output(_)) && *step < before)
    }

    /// The job starts again under another partition. Its results will be the same, in other parts.
    pub(super) fn restart(&mut self) {
        self.parts.clear();
        if planted::has(Planted::ReportsOfTwoPartitions) {
            return;
        }
        self.reports.clear();
        self.reported = None;
    }

    /// A tile's report. Returns the sum once all tiles have reported.
    pub(super) fn report(&mut self, tiles: usize, tile: PartId, step: u32, report: &Report) -> Option<Report> {
        if self.reported.is_some_and(|reported| step <= reported) {
            return None;
        }
        let parts = self.reports.entry(step).or_default();
        parts.insert(tile, report.clone());
        if parts.len() < tiles {
            return None;
        }
        let whole = parts.values().cloned().reduce(sum);
        self.reports.retain(|at, _| *at > step);
        self.reported = Some(step);
        whole
    }
}

/// Number of parts that a state may lack and still count as complete.
fn lacking(kind: SaveKind) -> usize {
    usize::from(kind == SaveKind::Checkpoint && planted::has(Planted::CheckpointIncomplete))
}

fn sum(all: Report, part: Report) -> Report {
    let totals = all.totals.iter().zip(&part.totals).map(|(a, b)| a.wrapping_add(*b)).collect();
    let hash = all.hash.zip(part.hash).map(|(a, b)| a.wrapping_add(b));
    Report { totals, hash, not_finite: all.not_finite.or(part.not_finite) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overtaken_frames_are_still_needed() {
        let (mut collected, frame) = (Assembly::default(), SaveKind::Output(0));
        for step in [10, 20] {
            assert!(collected.wants(PartId(0), step, frame) && collected.wants(PartId(1), step, frame));
        }
        assert!(!collected.part(2, PartId(0), 10, frame) && !collected.part(2, PartId(1), 20, frame));
        assert!(collected.part(2, PartId(0), 20, frame));
        collected.whole(20, frame);
        assert!(!collected.is_idle(), "half of the first frame is missing");
        assert!(
            collected.wants(PartId(1), 10, frame)
                && !collected.wants(PartId(0), 10, frame)
                && !collected.wants(PartId(1), 20, frame)
        );
        assert!(collected.part(2, PartId(1), 10, frame));
        collected.whole(10, frame);
        assert!(collected.is_idle() && !collected.wants(PartId(1), 10, frame));
        // Recomputed after a rollback: a frame that was complete is the same and not needed, one that was on its way
        // is.
        assert!(
            collected.wants(PartId(0), 30, frame)
                && collected.wants(PartId(0), 40, frame)
                && collected.wants(PartId(1), 40, frame)
        );
        let _ = (collected.part(2, PartId(0), 40, frame), collected.part(2, PartId(1), 40, frame));
        collected.whole(40, frame);
        collected.restart();
        assert!(
            !collected.wants(PartId(0), 20, frame)
                && collected.wants(PartId(0), 30, frame)
                && !collected.wants(PartId(0), 40, frame)
        );
    }

    #[test]
    fn earlier_checkpoints_are_dropped() {
        let (mut collected, kind) = (Assembly::default(), SaveKind::Checkpoint);
        assert!(collected.wants(PartId(0), 10, kind) && collected.wants(PartId(0), 20, kind));
        assert!(!collected.part(2, PartId(0), 10, kind));
        collected.whole(20, kind);
        assert!(collected.is_idle() && !collected.wants(PartId(1), 10, kind) && !collected.wants(PartId(0), 20, kind));
    }
}
