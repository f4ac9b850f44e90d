//! What comes of a simulation: checkpoints and outputs as they are fetched from owners, and reports as they are added up.
use super::super::order::{Report, SaveKind};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// Parts of what is to be whole, from each tile one.
#[derive(Debug, Default)]
pub(super) struct Collected {
    /// Parts that are here, by what they are parts of.
    parts: BTreeMap<(u32, SaveKind), BTreeSet<u16>>,
    /// Those that are whole already, the last of each kind: late parts of them are not wanted.
    whole: BTreeMap<SaveKind, u32>,
    reports: BTreeMap<u32, BTreeMap<u16, Report>>,
    /// The last report told.
    reported: Option<u32>,
}

impl Collected {
    /// Whether a part is still wanted.
    pub(super) fn wants(&self, tile: u16, step: u32, kind: SaveKind) -> bool {
        let late = self.whole.get(&kind).is_some_and(|whole| step <= *whole);
        !late && !self.parts.get(&(step, kind)).is_some_and(|tiles| tiles.contains(&tile))
    }

    /// A part is here; whether it was the last one.
    pub(super) fn part(&mut self, tiles: usize, tile: u16, step: u32, kind: SaveKind) -> bool {
        let parts = self.parts.entry((step, kind)).or_default();
        parts.insert(tile);
        parts.len() == tiles
    }

    /// All of it is here and dealt with; parts of earlier ones of the kind are given up.
    pub(super) fn whole(&mut self, step: u32, kind: SaveKind) {
        let whole = self.whole.entry(kind).or_insert(step);
        *whole = step.max(*whole);
        self.parts.retain(|(at, of), _| *of != kind || *at > step);
    }

    /// Checkpoints that are here whole and not dealt with yet.
    pub(super) fn complete(&self, tiles: usize, kind: SaveKind) -> Vec<u32> {
        let parts = self.parts.iter().filter(|((_, of), parts)| *of == kind && parts.len() == tiles);
        parts.map(|((step, _), _)| *step).collect()
    }

    /// Whether the last of each kind that there is to be is here.
    pub(super) fn is_idle(&self) -> bool {
        self.parts.is_empty()
    }

    /// All begins anew from a step: what comes again is the same, but under another cut.
    pub(super) fn restart(&mut self) {
        self.parts.clear();
        self.reports.clear();
        self.reported = None;
    }

    /// A tile's report; the whole one, once all tiles have said theirs.
    pub(super) fn report(&mut self, tiles: usize, tile: u16, step: u32, report: &Report) -> Option<Report> {
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

fn sum(all: Report, part: Report) -> Report {
    let totals = all.totals.iter().zip(&part.totals).map(|(a, b)| a.wrapping_add(*b)).collect();
    let hash = all.hash.zip(part.hash).map(|(a, b)| a.wrapping_add(b));
    Report { totals, hash, not_finite: all.not_finite.or(part.not_finite) }
}
