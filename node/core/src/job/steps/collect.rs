//! Results of a simulation: checkpoints and outputs as they are fetched from owners, and reports as they are added up.
use crate::id::PartId;
use crate::planted::{self, Planted};
use crate::work::steps::{Report, SaveKind};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// Parts of what is to be whole, from each tile one.
#[derive(Debug, Default)]
pub(super) struct Collected {
    /// Parts that are here, by what they are parts of.
    parts: BTreeMap<(u32, SaveKind), BTreeSet<PartId>>,
    /// The last that is whole, of each kind: earlier ones are not wanted any more, unless they are `open`.
    whole: BTreeMap<SaveKind, u32>,
    /// What was announced and is not whole. Parts overtake each other on their way here; of outputs each one counts.
    open: BTreeSet<(SaveKind, u32)>,
    reports: BTreeMap<u32, BTreeMap<PartId, Report>>,
    /// The last report told.
    reported: Option<u32>,
}

impl Collected {
    /// A part is announced. Whether it is still wanted.
    pub(super) fn wants(&mut self, tile: PartId, step: u32, kind: SaveKind) -> bool {
        let late = self.whole.get(&kind).is_some_and(|whole| step <= *whole) && !self.open.contains(&(kind, step));
        if late || self.parts.get(&(step, kind)).is_some_and(|tiles| tiles.contains(&tile)) {
            return false;
        }
        self.open.insert((kind, step));
        true
    }

    /// A part is here; whether it was the last one.
    pub(super) fn part(&mut self, tiles: usize, tile: PartId, step: u32, kind: SaveKind) -> bool {
        let parts = self.parts.entry((step, kind)).or_default();
        parts.insert(tile);
        parts.len() + lacking(kind) == tiles
    }

    /// All of it is here and dealt with; but for outputs, earlier ones of the kind are given up.
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

    /// Checkpoints that are here whole and not dealt with yet.
    pub(super) fn complete(&self, tiles: usize, kind: SaveKind) -> Vec<u32> {
        let parts = self.parts.iter().filter(|((_, of), parts)| *of == kind && parts.len() + lacking(kind) >= tiles);
        parts.map(|((step, _), _)| *step).collect()
    }

    /// Whether the last of each kind that there is to be is here.
    pub(super) fn is_idle(&self) -> bool {
        self.parts.is_empty()
    }

    /// The last step that all tiles have reported, under the present cut or the one before it.
    pub(super) fn reported(&self) -> Option<u32> {
        self.reported
    }

    /// Whether an output of an earlier step is announced and not whole.
    pub(super) fn waits_for_outputs(&self, before: u32) -> bool {
        self.open.iter().any(|(kind, step)| matches!(kind, SaveKind::Output(_)) && *step < before)
    }

    /// All begins anew from a step: what comes again is the same, but under another cut.
    pub(super) fn restart(&mut self) {
        self.parts.clear();
        if planted::has(Planted::ReportsOfTwoCuts) {
            return;
        }
        self.reports.clear();
        self.reported = None;
    }

    /// A tile's report; the whole one, once all tiles have said theirs.
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

/// Parts that a state may lack and still count as whole.
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
    fn frames_that_are_overtaken_stay_wanted() {
        let (mut collected, frame) = (Collected::default(), SaveKind::Output(0));
        for step in [10, 20] {
            assert!(collected.wants(PartId(0), step, frame) && collected.wants(PartId(1), step, frame));
        }
        assert!(!collected.part(2, PartId(0), 10, frame) && !collected.part(2, PartId(1), 20, frame));
        assert!(collected.part(2, PartId(0), 20, frame));
        collected.whole(20, frame);
        assert!(!collected.is_idle(), "half of the first frame is still to come");
        assert!(
            collected.wants(PartId(1), 10, frame)
                && !collected.wants(PartId(0), 10, frame)
                && !collected.wants(PartId(1), 20, frame)
        );
        assert!(collected.part(2, PartId(1), 10, frame));
        collected.whole(10, frame);
        assert!(collected.is_idle() && !collected.wants(PartId(1), 10, frame));
        // Made again after going back: the same, and not wanted; what was on its way is.
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
    fn earlier_checkpoints_are_given_up() {
        let (mut collected, kind) = (Collected::default(), SaveKind::Checkpoint);
        assert!(collected.wants(PartId(0), 10, kind) && collected.wants(PartId(0), 20, kind));
        assert!(!collected.part(2, PartId(0), 10, kind));
        collected.whole(20, kind);
        assert!(collected.is_idle() && !collected.wants(PartId(1), 10, kind) && !collected.wants(PartId(0), 20, kind));
    }
}
