//! Reported results of a simulation equal those of a run in one piece: sums and hashes after each step, checkpoints and
//! outputs on disk. A coordinator reports each step once per epoch.
use crate::grids::{self, Saved};
use crate::submissions::{End, Submission, Submissions};
use crate::world::World;
use std::collections::BTreeMap;

/// All violations in the results that submitters received or have on disk. `calm`: there was no fault, so nothing may be
/// missing.
pub fn violations(world: &World, submissions: &Submissions, calm: bool) -> Vec<String> {
    submissions.all.iter().flat_map(|submission| violations_of(world, submission, calm)).collect()
}

fn violations_of(world: &World, submission: &Submission, calm: bool) -> Vec<String> {
    let Some(end) = submission.end.as_ref().map(|(_, end)| end) else { return Vec::new() };
    let simulation = &submission.simulation;
    let expected = grids::alone(submission.seed, simulation.size, simulation.periodic, simulation.steps);
    let mut wrong = wrong_reports(submission, &expected);
    let last =
        submission.reports.iter().any(|reported| reported.step == simulation.steps && reported.report.hash.is_some());
    if *end == End::Done && !last {
        wrong.push("it ends without a report of its last step".into());
    }
    let whole = |cells: &Saved| cells.len() as u64 == simulation.cells();
    let right = |cells: &Saved, step: u32| {
        let hash = grids::hash(cells.iter().map(|(at, value)| (*at, *value)));
        expected.get(step as usize).is_some_and(|(_, expected)| *expected == hash)
    };
    let mut frames: BTreeMap<(u16, u32), bool> = BTreeMap::new();
    for host in world.hosts() {
        let ours = |job| submission.jobs.contains(job);
        for ((_, step), cells) in host.disk.checkpoints().filter(|((job, _), _)| ours(job)) {
            if !whole(cells) || !right(cells, *step) {
                let cells = cells.len();
                wrong.push(format!("host {} has a wrong checkpoint of step {step}, {cells} cells", host.id.0));
            }
        }
        for ((_, output, step), cells) in host.outputs.iter().filter(|((job, ..), _)| ours(job)) {
            if whole(cells) && !right(cells, *step) {
                wrong.push(format!("host {} has a wrong frame of step {step} of output {output}", host.id.0));
            }
            *frames.entry((*output, *step)).or_default() |= whole(cells);
        }
    }
    for (output, every) in (0..).zip(&simulation.outputs).filter(|_| calm && *end == End::Done) {
        let due = (*every..=simulation.steps).step_by(*every as usize);
        let lacks = due.filter(|step| frames.get(&(output, *step)) != Some(&true)).collect::<Vec<_>>();
        if !lacks.is_empty() {
            wrong.push(format!("output {output} lacks frames of the steps {lacks:?}"));
        }
    }
    wrong.into_iter().map(|what| format!("{}: {what}", submission.name())).collect()
}

/// Reports that are wrong or repeated.
fn wrong_reports(submission: &Submission, expected: &[(i128, u128)]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut last = BTreeMap::new();
    for reported in &submission.reports {
        let (step, report, host) = (reported.step, &reported.report, reported.host.0);
        let Some((total, hash)) = expected.get(step as usize) else {
            wrong.push(format!("host {host} reports step {step}, expected at most {}", expected.len() - 1));
            continue;
        };
        if report.totals != [*total] {
            wrong.push(format!("the sum of step {step} is {:?}, expected {total}", report.totals));
        }
        let due = step == submission.simulation.steps;
        if report.hash.is_some() != due || report.hash.is_some_and(|reported| reported != *hash) {
            wrong.push(format!("the hash of step {step} is {:?}, expected {hash}, at the last step only", report.hash));
        }
        let before = last.insert((reported.job, reported.host, reported.life, reported.epoch), step);
        if let Some(before) = before.filter(|before| *before >= step) {
            let epoch = reported.epoch.map_or(0, |epoch| epoch.counter);
            wrong.push(format!("host {host} reports step {step} after {before} under epoch {epoch}"));
        }
    }
    wrong
}
