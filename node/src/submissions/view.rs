//! What whoever watches a simulation sees of it: one quantity, thinned to fit a screen, and how fast it is of late.
use crate::output::Painter;
use kernels::grid::Region;
use kernels::grid::simulation::{Colours, Field, Simulation};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Pixels along the longer side of a picture: grids up to this are shown cell by cell, larger ones thinned.
const SIZE: usize = 1024;
/// Pictures of a short run.
const PICTURES: u64 = 16;
/// Steps from one picture to the next read and write at least so many bytes in short runs, and in runs of any length no
/// more than the second: time on a core, and on the fastest devices.
const BYTES: [u64; 2] = [1 << 30, 256 << 30];
/// And so many for each byte that is read for the picture, which is slow where a device has memory of its own.
const BYTES_PER_BYTE: u64 = 4 << 10;

/// How a simulation is shown: as the first picture that its job wants, or what its rule is looked at for.
#[derive(Clone, Copy, Debug)]
pub struct Watched<'a> {
    /// What is shown.
    pub quantity: &'a str,
    /// Of which cells, and every how many.
    pub shown: (Region, usize),
    colours: Colours,
    range: Option<[f32; 2]>,
}

/// What a simulation looked like after a step.
#[derive(Debug)]
pub struct View {
    /// After this step.
    pub step: u32,
    /// What it looked like.
    pub field: Field,
    /// The values of the first and of the last colour.
    pub range: [f32; 2],
}

impl<'a> Watched<'a> {
    /// Of a simulation.
    pub fn of(simulation: &'a Simulation) -> Self {
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

    /// Steps from one picture to the next: making them takes far longer than looking. Not more than from one report to the
    /// next.
    pub fn every(&self, simulation: &Simulation) -> u64 {
        let (region, stride) = self.shown;
        let bits = simulation.rule().costs().traffic_bits;
        let rows = region.size()[1].div_ceil(stride) as u64;
        let looking = (rows * region.size()[0] as u64 * bits.div_ceil(16)).saturating_mul(BYTES_PER_BYTE);
        let step = ((simulation.grid().region().cells() as u64).saturating_mul(bits) / 8).max(1);
        let [least, most] = BYTES.map(|bytes| bytes.max(looking) / step);
        (simulation.steps() / PICTURES).clamp(least, most).clamp(1, simulation.check_every())
    }

    /// Who paints it.
    pub fn painter(&self, simulation: &Simulation) -> Painter {
        Painter::new(simulation, self.colours, self.range, self.shown, SIZE)
    }
}

impl View {
    /// Of a frame.
    pub fn new(simulation: &Simulation, step: u32, field: Field) -> Self {
        let watched = Watched::of(simulation);
        let range = watched.range.unwrap_or_else(|| watched.painter(simulation).range_of(&field));
        Self { step, field, range }
    }
}

/// How many steps were made when, for the last few seconds.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    marks: VecDeque<(Instant, u32)>,
}

/// The time over which a pace is taken.
const WINDOW: Duration = Duration::from_secs(8);
/// Between two marks.
const MARK_EVERY: Duration = Duration::from_millis(250);

impl Pace {
    /// So many steps are made now. Fewer than before: a run went back, and counts from there.
    pub fn mark(&mut self, now: Instant, step: u32) {
        if self.marks.back().is_some_and(|(_, last)| step < *last) {
            self.marks.clear();
        }
        if self.marks.back().is_none_or(|(last, _)| now - *last >= MARK_EVERY) {
            self.marks.push_back((now, step));
        }
        // One older than the window stays: the pace is taken from there.
        while self.marks.get(1).is_some_and(|(second, _)| now - *second >= WINDOW) {
            self.marks.pop_front();
        }
    }

    /// Steps per second up to now; none before there is something to tell from.
    pub fn steps_per_s(&self, now: Instant, step: u32) -> Option<f64> {
        let (first, from) = self.marks.front()?;
        let seconds = now.saturating_duration_since(*first).as_secs_f64();
        (seconds >= MARK_EVERY.as_secs_f64() && step >= *from).then(|| f64::from(step - from) / seconds)
    }
}

/// Why a run ended, with the name of the field that it has the number of.
pub fn named(simulation: &Simulation, reason: String) -> String {
    let numbers = simulation.rule().field_names().into_iter().zip(0..);
    let mut told =
        numbers.map(|(name, number)| (format!("field {number} of the cell"), format!("`{name}` of the cell")));
    told.find(|(number, _)| reason.contains(number))
        .map_or(reason.clone(), |(number, name)| reason.replacen(&number, &name, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_forgets_what_was_long_ago_and_what_was_undone() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(pace.steps_per_s(start, 0), None);
        (0..=100).for_each(|i| pace.mark(at(100 * i), 10 * i as u32));
        let slow = pace.steps_per_s(at(10_000), 1000).unwrap();
        assert!((99.0..101.0).contains(&slow), "{slow}");
        (1..=100).for_each(|i| pace.mark(at(10_000 + 100 * i), 1000 + 100 * i as u32));
        let fast = pace.steps_per_s(at(20_000), 11_000).unwrap();
        assert!((990.0..1010.0).contains(&fast), "{fast}");
        // Nothing comes any more.
        let stalled = pace.steps_per_s(at(36_000), 11_000).unwrap();
        assert!(stalled < 400.0, "{stalled}");
        pace.mark(at(36_000), 5000);
        pace.mark(at(37_000), 5100);
        let again = pace.steps_per_s(at(37_000), 5100).unwrap();
        assert!((99.0..101.0).contains(&again), "{again}");
    }

    #[test]
    fn a_field_that_is_no_number_is_told_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        std::fs::write(&path, "name = \"x\"\nsteps = 1\n[grid]\nsize = [8, 8]\n[rule]\nname = \"wave\"\nspeed = 1")
            .unwrap();
        let simulation = Simulation::read(&path).unwrap();
        let told = |reason: &str| named(&simulation, reason.into());
        assert_eq!(told("after step 9 field 1 of the cell 1, 2, 0"), "after step 9 `before` of the cell 1, 2, 0");
        assert_eq!(told("node 1 of the cell is lost"), "node 1 of the cell is lost");
    }

    #[test]
    fn pictures_are_as_many_as_one_likes_to_see_and_cost_little() {
        let folder = tempfile::tempdir().unwrap();
        let every = |size: &str, rule: &str, steps: u64| {
            let path = folder.path().join("job.toml");
            let text = format!("name = \"x\"\nsteps = {steps}\n[grid]\nsize = {size}\n[rule]\n{rule}\n");
            std::fs::write(&path, text).unwrap();
            let simulation = Simulation::read(&path).unwrap();
            Watched::of(&simulation).every(&simulation)
        };
        let (fluid, fluid3) = ("name = \"d2q9\"\ntau = 0.8", "name = \"d3q19\"\ntau = 0.8");
        // A short run has some, a long one has one with each report.
        assert_eq!(every("[96, 40, 40]", fluid3, 2500), 156);
        assert_eq!(every("[640, 192]", fluid, 40_000), 546);
        // Of a large grid, looking takes a while, but so do a thousand steps.
        assert!((200..=300).contains(&every("[4096, 4096]", fluid, 1_000_000)));
        assert!(every("[2048, 2048]", fluid, 200) > 200);
        assert!((50..=150).contains(&every("[256, 256, 256]", fluid3, 1_000_000)));
    }
}
