//! The live view of a simulation: one quantity, downsampled to fit a screen, and the recent speed.
use crate::output::Painter;
use kernels_grids::Region;
use kernels_simulations::{Colours, Field, Simulation};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Pixels along the longer side of a picture: smaller grids are shown cell by cell, larger ones downsampled.
const SIZE: usize = 1024;
/// Pictures of a short run.
const PICTURES: u64 = 16;
/// Bounds on the bytes that steps read and write between two pictures: at least the first (short runs on one core), at
/// most the second (the fastest devices).
const BYTES: [u64; 2] = [1 << 30, 256 << 30];
/// Minimum bytes of step traffic per byte read for a picture: the read is slow on a device with its own memory.
const BYTES_PER_BYTE: u64 = 4 << 10;

/// What the live view shows: the first picture output of the job, or the rule's default quantity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveView<'a> {
    /// The quantity.
    pub quantity: &'a str,
    /// The region, and the stride between cells.
    pub shown: (Region, usize),
    colours: Colours,
    range: Option<[f32; 2]>,
}

/// The live view after a step.
#[derive(Debug)]
pub(crate) struct View {
    /// The step.
    pub step: u32,
    /// The sampled values.
    pub field: Field,
    /// The values of the first and of the last colour.
    pub range: [f32; 2],
}

impl<'a> LiveView<'a> {
    /// The live view of a simulation.
    pub(crate) fn of(simulation: &'a Simulation) -> Self {
        let picture = simulation.outputs().iter().find(|output| output.kind.is_picture());
        let layer = picture.map_or(simulation.grid().size()[2] / 2, |output| output.layer);
        let quantity = picture.map_or(simulation.default_quantity(), |output| output.quantity.as_str());
        Self {
            quantity,
            shown: simulation.view(layer, SIZE),
            colours: picture.map_or(Colours::of(quantity), |output| output.colours),
            range: picture.and_then(|output| output.range),
        }
    }

    /// Steps between two pictures: computing them takes far longer than the picture itself. At most the interval of
    /// reports.
    pub(crate) fn every(&self, simulation: &Simulation) -> u64 {
        let (region, stride) = self.shown;
        let bits = simulation.rule().costs().traffic_bits;
        let rows = region.size()[1].div_ceil(stride) as u64;
        let looking = (rows * region.size()[0] as u64 * bits.div_ceil(16)).saturating_mul(BYTES_PER_BYTE);
        let step = ((simulation.grid().region().cells() as u64).saturating_mul(bits) / 8).max(1);
        let [least, most] = BYTES.map(|bytes| bytes.max(looking) / step);
        (simulation.steps() / PICTURES).clamp(least, most).clamp(1, simulation.check_every())
    }

    /// The painter for its pictures.
    pub(crate) fn painter(&self, simulation: &Simulation) -> Painter {
        Painter::new(simulation, self.colours, self.range, self.shown, SIZE)
    }
}

impl View {
    /// The view of a frame.
    pub(crate) fn new(simulation: &Simulation, step: u32, field: Field) -> Self {
        let watched = LiveView::of(simulation);
        let range = watched.range.unwrap_or_else(|| watched.painter(simulation).range_of(&field));
        Self { step, field, range }
    }
}

/// Steps completed over the last few seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    marks: VecDeque<(Instant, u32)>,
}

/// Time over which the speed is averaged.
const WINDOW: Duration = Duration::from_secs(8);
/// Minimum time between two marks.
const MARK_EVERY: Duration = Duration::from_millis(250);

impl Pace {
    /// Records the present step. A lower step than before means a rollback, and restarts the average.
    pub(crate) fn mark(&mut self, now: Instant, step: u32) {
        if self.marks.back().is_some_and(|(_, last)| step < *last) {
            self.marks.clear();
        }
        if self.marks.back().is_none_or(|(last, _)| now - *last >= MARK_EVERY) {
            self.marks.push_back((now, step));
        }
        // Keep one mark older than the window: the average starts there.
        while self.marks.get(1).is_some_and(|(second, _)| now - *second >= WINDOW) {
            self.marks.pop_front();
        }
    }

    /// Steps per second up to now; `None` while there are too few marks.
    pub(crate) fn steps_per_s(&self, now: Instant, step: u32) -> Option<f64> {
        let (first, from) = self.marks.front()?;
        let seconds = now.saturating_duration_since(*first).as_secs_f64();
        (seconds >= MARK_EVERY.as_secs_f64() && step >= *from).then(|| f64::from(step - from) / seconds)
    }
}

/// Replaces a field number in an error text by the field's name.
pub(crate) fn named(simulation: &Simulation, reason: String) -> String {
    let numbers = simulation.rule().field_names().into_iter().zip(0..);
    let mut found =
        numbers.map(|(name, number)| (format!("field {number} of the cell"), format!("`{name}` of the cell")));
    found
        .find(|(number, _)| reason.contains(number))
        .map_or(reason.clone(), |(number, name)| reason.replacen(&number, &name, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_covers_recent_steps_and_restarts_after_a_rollback() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(pace.steps_per_s(start, 0), None);
        (0..=100).for_each(|i| pace.mark(at(100 * i), 10 * i as u32));
        let slow = pace.steps_per_s(at(10_000), 1000).unwrap();
        assert!((99.0..101.0).contains(&slow), "{slow}");
        (1..=100).for_each(|i| pace.mark(at(10_000 + 100 * i), 1000 + 100 * i as u32));
        let fast = pace.steps_per_s(at(20_000), 11_000).unwrap();
        assert!((990.0..1010.0).contains(&fast), "{fast}");
        // No more progress.
        let stalled = pace.steps_per_s(at(36_000), 11_000).unwrap();
        assert!(stalled < 400.0, "{stalled}");
        pace.mark(at(36_000), 5000);
        pace.mark(at(37_000), 5100);
        let again = pace.steps_per_s(at(37_000), 5100).unwrap();
        assert!((99.0..101.0).contains(&again), "{again}");
    }

    #[test]
    fn a_field_number_is_replaced_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        std::fs::write(&path, "name = \"x\"\nsteps = 1\n[grid]\nsize = [8, 8]\n[rule]\nname = \"wave\"\nspeed = 1")
            .unwrap();
        let simulation = Simulation::read(&path).unwrap();
        let text = |reason: &str| named(&simulation, reason.into());
        assert_eq!(text("after step 9 field 1 of the cell 1, 2, 0"), "after step 9 `before` of the cell 1, 2, 0");
        assert_eq!(text("node 1 of the cell is lost"), "node 1 of the cell is lost");
    }

    #[test]
    fn pictures_are_frequent_enough_and_cost_little() {
        let folder = tempfile::tempdir().unwrap();
        let every = |size: &str, rule: &str, steps: u64| {
            let path = folder.path().join("job.toml");
            let text = format!("name = \"x\"\nsteps = {steps}\n[grid]\nsize = {size}\n[rule]\n{rule}\n");
            std::fs::write(&path, text).unwrap();
            let simulation = Simulation::read(&path).unwrap();
            LiveView::of(&simulation).every(&simulation)
        };
        let (fluid, fluid3) = ("name = \"d2q9\"\ntau = 0.8", "name = \"d3q19\"\ntau = 0.8");
        // A short run has some pictures, a long one has one per report.
        assert_eq!(every("[96, 40, 40]", fluid3, 2500), 156);
        assert_eq!(every("[640, 192]", fluid, 40_000), 546);
        // On a large grid, a picture takes a while, but so do a thousand steps.
        assert!((200..=300).contains(&every("[4096, 4096]", fluid, 1_000_000)));
        assert!(every("[2048, 2048]", fluid, 200) > 200);
        assert!((50..=150).contains(&every("[256, 256, 256]", fluid3, 1_000_000)));
    }
}
