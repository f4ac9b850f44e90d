//! Why each node is or is not used, in words and as a table for people.
//! Next: the tests, `tests/brute_force.rs`.
use crate::cost;
use crate::fleet::{Device, DeviceId, Fleet};
use crate::plan::{Goal, Options, Plan, Stage};
use crate::work::Work;
use alloc::{format, string::String, vec::Vec};
use core::fmt::Write;

/// What became of a device that the plan does not use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Takes no new work.
    Excluded,
    /// Never measured.
    NoSpeed,
    /// Cannot hold the smallest stage.
    TooSmall { need: u64, offered: u64 },
    /// Left out before the search.
    NotShortlisted,
    /// In the search; the best placement that uses it takes this long.
    Considered { best_with_ns: u64, exact: bool },
    /// In the search; no placement with it was found.
    NoPlacement { exact: bool },
    /// In a repair; using it would move more bytes or take longer.
    MovesMore,
}

/// For each device of the fleet, why it is or is not used, in the fleet's order.
pub(crate) fn reasons(
    work: &Work,
    fleet: &Fleet,
    options: &Options,
    plan: &Plan,
    verdicts: &[(DeviceId, Verdict)],
) -> Vec<(DeviceId, String)> {
    let least_ns = match options.goal {
        Goal::Latency => plan.token_ns(),
        Goal::Throughput => {
            cost::bottleneck_ns(work, fleet, options.head, &plan.placement()).unwrap_or(plan.slowest_step_ns())
        }
    };
    let why = |device: &Device| match plan.stage_of(device.id) {
        Some(stage) => used(work, options, plan, device, stage),
        None => match verdicts.iter().find(|(id, _)| *id == device.id) {
            Some((_, verdict)) => unused(verdict, options, least_ns),
            None => String::from("not used: not a candidate"),
        },
    };
    fleet.devices.iter().map(|device| (device.id, why(device))).collect()
}

fn used(work: &Work, options: &Options, plan: &Plan, device: &Device, stage: &Stage) -> String {
    let first = stage.layers.start == 0;
    let last = stage.layers.end as usize == work.layers.len();
    let ends = match (first, last) {
        (true, true) => " with embedding and output head",
        (true, false) => " with the embedding",
        (false, true) => " with the output head",
        (false, false) => "",
    };
    let solo = if plan.stages().len() == 1 { "; alone it is fastest" } else { "" };
    format!(
        "used: layers {}..{}{ends}, {} of {}, {} per token{solo}",
        stage.layers.start,
        stage.layers.end,
        bytes(stage.bytes),
        bytes(cost::usable_bytes(device, options.headroom_percent)),
        time(stage.step_ns),
    )
}

fn unused(verdict: &Verdict, options: &Options, least_ns: u64) -> String {
    let measure = match options.goal {
        Goal::Latency => "per token",
        Goal::Throughput => "in its slowest step",
    };
    match verdict {
        Verdict::Excluded => "not used: it takes no new work (draining)".into(),
        Verdict::NoSpeed => "not used: its speed is not measured yet".into(),
        Verdict::TooSmall { need, offered } => {
            format!("not used: it offers {}, the smallest stage needs {}", bytes(*offered), bytes(*need))
        }
        Verdict::NotShortlisted => "not used: others are faster or larger, and only so many are searched".into(),
        Verdict::Considered { best_with_ns, exact } if *best_with_ns > least_ns => {
            let which = if *exact { "the best plan with it" } else { "the best plan seen with it" };
            format!("not used: {which} takes {} {measure} instead of {}", time(*best_with_ns), time(least_ns))
        }
        Verdict::Considered { .. } => "not used: no plan with it is better than this one".into(),
        Verdict::NoPlacement { exact: true } => "not used: no arrangement with it fits (memory or links)".into(),
        Verdict::NoPlacement { exact: false } => "not used: no plan with it was among the promising ones".into(),
        Verdict::MovesMore => "not used: with it more weights would move, or tokens would take longer".into(),
    }
}

/// The plan as text for people: a line for each stage, the sum, and why each other node is not used.
pub fn table(plan: &Plan, fleet: &Fleet) -> String {
    let name = |id: DeviceId| fleet.device(id).map_or_else(|| hex(id), |device| device.name.clone());
    let width = plan.stages().iter().map(|stage| name(stage.device).chars().count()).max().unwrap_or(0).max(4);
    let mut out = String::new();
    let mut line = |text: core::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = out.write_fmt(text);
        out.push('\n');
    };
    line(format_args!("{:>5}  {:<width$}  {:>11}  {:>10}  {:>10}", "stage", "node", "layers", "memory", "per token"));
    for (index, stage) in plan.stages().iter().enumerate() {
        let layers = format!("{}..{}", stage.layers.start, stage.layers.end);
        let (memory, step) = (bytes(stage.bytes), time(stage.step_ns));
        line(format_args!("{index:>5}  {:<width$}  {layers:>11}  {memory:>10}  {step:>10}", name(stage.device)));
    }
    let stages: u64 = plan.stages().iter().map(|stage| stage.step_ns).sum();
    let (links, token) = (time(plan.token_ns().saturating_sub(stages)), time(plan.token_ns()));
    let search = if plan.exact() { "exact search" } else { "beam search, or not every node considered" };
    line(format_args!("links {links}, together {token} per token ({search})"));
    for (id, reason) in plan.reasons().iter().filter(|(id, _)| plan.stage_of(*id).is_none()) {
        line(format_args!("{}: {reason}", name(*id)));
    }
    if !one_numerics(plan, fleet) {
        line(format_args!("the nodes used differ in numerics: tokens may differ from those of another plan"));
    }
    for loss in plan.losses() {
        let lost = name(loss.lost);
        match &loss.plan {
            Ok(next) => {
                let stages = next.stages().iter();
                let places = stages.map(|s| format!("{} {}..{}", name(s.device), s.layers.start, s.layers.end));
                let places: Vec<String> = places.collect();
                line(format_args!("if {lost} is lost: {}, {} per token", places.join(", "), time(next.token_ns())));
            }
            Err(error) => line(format_args!("if {lost} is lost: {error}")),
        }
    }
    out
}

/// Whether all devices used compute the same bits.
fn one_numerics(plan: &Plan, fleet: &Fleet) -> bool {
    let mut ids = plan.stages().iter().filter_map(|stage| fleet.device(stage.device)).map(|device| device.numerics);
    let first = ids.next();
    ids.all(|numerics| Some(numerics) == first)
}

/// `1.5 MB`: three digits, decimal units.
fn bytes(count: u64) -> String {
    scaled(count, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// `1.50 ms`: three digits.
fn time(ns: u64) -> String {
    scaled(ns, &["ns", "µs", "ms", "s"])
}

fn scaled(count: u64, units: &[&str]) -> String {
    let (mut unit, mut divisor) = (0, 1u64);
    while unit + 1 < units.len() && count / divisor >= 1_000 {
        (unit, divisor) = (unit + 1, divisor.saturating_mul(1_000));
    }
    let (whole, rest) = (count / divisor, u128::from(count % divisor) * 100 / u128::from(divisor));
    match whole {
        _ if divisor == 1 => format!("{whole} {}", units[unit]),
        0..=9 => format!("{whole}.{rest:02} {}", units[unit]),
        10..=99 => format!("{whole}.{} {}", rest / 10, units[unit]),
        _ => format!("{whole} {}", units[unit]),
    }
}

/// The first bytes of an id, for a device that has left the fleet.
fn hex(id: DeviceId) -> String {
    let mut out = String::new();
    for byte in &id.0[..4] {
        let _ = write!(out, "{byte:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let shown: Vec<String> = [0, 999, 1_000, 1_999, 12_345, 123_456, 98_000_000, u64::MAX].map(bytes).into();
        assert_eq!(shown, ["0 B", "999 B", "1.00 kB", "1.99 kB", "12.3 kB", "123 kB", "98.0 MB", "18.4 EB"]);
        assert_eq!(time(61_000_000_000), "61.0 s");
        assert_eq!(time(3_600_000_000_000), "3600 s");
    }
}
