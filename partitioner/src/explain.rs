//! Explanations of a plan: why each node is or is not used, as sentences and as a human-readable table. Next: the tests,
//! `tests/brute_force.rs`.
use crate::cost::{self, ram::Room};
use crate::fleet::{Device, DeviceId, Fleet, NodeKey};
use crate::plan::{Goal, Options, Plan, REASONS_MAX, Stage};
use crate::work::Work;
use alloc::{format, string::String, vec::Vec};
use core::fmt::Write;
use core::ops::Range;

/// Why the plan does not use a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Takes no new work.
    Excluded,
    /// Its speed was never measured.
    NoSpeed,
    /// Cannot hold the smallest stage.
    TooSmall { need: u64, offered: Room },
    /// Excluded by the shortlist before the search.
    NotShortlisted,
    /// In the search; the best placement with it takes this long.
    Considered { best_with_ns: u64, exact: bool },
    /// In the search; no placement with it was found.
    NoPlacement { exact: bool },
    /// In a repair: a placement with it would move more bytes or take longer.
    MovesMore,
}

/// For each device of the fleet, in the fleet's order, why it is or is not used; at most [`REASONS_MAX`].
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
        Some(stage) => used(work, plan, device, stage),
        None => match verdicts.iter().find(|(id, _)| *id == device.id) {
            Some((_, verdict)) => unused(verdict, options, least_ns),
            None => String::from("not used; not a candidate"),
        },
    };
    // In a larger fleet: the devices in use, and the first of the other devices.
    let mut others = REASONS_MAX.saturating_sub(plan.stages().len());
    let mut has_room = |device: &&Device| {
        let used = plan.stage_of(device.id).is_some();
        let room = used || others > 0;
        others = others.saturating_sub(usize::from(!used));
        room
    };
    fleet.devices.iter().filter(|device| has_room(device)).map(|device| (device.id, why(device))).collect()
}

fn used(work: &Work, plan: &Plan, device: &Device, stage: &Stage) -> String {
    let first = stage.layers.start == 0;
    let last = stage.layers.end as usize == work.layers.len();
    let ends = match (first, last) {
        (true, true) => " with embedding and output head",
        (true, false) => " with the embedding",
        (false, true) => " with the output head",
        (false, false) => "",
    };
    let solo = if plan.stages().len() == 1 { "; one node is fastest" } else { "" };
    let in_ram = match stage.ram {
        0 => String::new(),
        ram => format!(" and {} of experts in RAM of {}", bytes(ram), bytes(device.ram)),
    };
    format!(
        "used: layers {}{ends}, {} of {}{in_ram}, {} per token{solo}",
        layers(&stage.layers),
        bytes(stage.bytes),
        bytes(device.memory),
        time(stage.step_ns),
    )
}

fn unused(verdict: &Verdict, options: &Options, least_ns: u64) -> String {
    let measure = match options.goal {
        Goal::Latency => "per token",
        Goal::Throughput => "in its slowest step",
    };
    match verdict {
        Verdict::Excluded => "not used; it takes no new work (draining)".into(),
        Verdict::NoSpeed => "not used; its speed is not measured yet".into(),
        Verdict::TooSmall { need, offered } => {
            let ram = match offered.ram {
                0 => String::new(),
                ram => format!(" and {} of RAM for experts", bytes(ram)),
            };
            format!("not used; it offers {}{ram}, the smallest stage needs {}", bytes(offered.memory), bytes(*need))
        }
        Verdict::NotShortlisted => {
            "not used; other nodes are faster or larger, and the search is limited to those".into()
        }
        Verdict::Considered { best_with_ns, exact } if *best_with_ns > least_ns => {
            let which = if *exact { "the best plan" } else { "the best plan found" };
            format!(
                "not used; {which} including it would take {} {measure} instead of {}",
                time(*best_with_ns),
                time(least_ns)
            )
        }
        Verdict::Considered { .. } => "not used; no plan including it is better than this one".into(),
        Verdict::NoPlacement { exact: true } => "not used; no placement including it fits (memory or links)".into(),
        Verdict::NoPlacement { exact: false } => "not used; the search found no plan including it".into(),
        Verdict::MovesMore => "not used; more weights would move, or tokens would take longer".into(),
    }
}

/// The plan as a human-readable table: a line per stage, the total, and why each other node is not used.
pub fn table(plan: &Plan, fleet: &Fleet) -> String {
    let name = |id: DeviceId| fleet.device(id).map_or_else(|| hex(id.node), Device::shown);
    let width = plan.stages().iter().map(|stage| name(stage.device).chars().count()).max().unwrap_or(0).max(4);
    let mut out = String::new();
    let mut line = |text: core::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = out.write_fmt(text);
        out.push('\n');
    };
    line(format_args!(
        "{:>5}  {:<width$}  {:>11}  {:>10}  {:>10}  {:>10}  {:>10}  {:>12}",
        "stage", "node", "layers", "memory", "per token", "decode", "attention", "prefill"
    ));
    for (index, stage) in plan.stages().iter().enumerate() {
        let layers = layers(&stage.layers);
        let (memory, step) = (bytes(stage.bytes), time(stage.step_ns));
        let [decode, attention, prefill] = fleet.device(stage.device).map(speeds).unwrap_or_default();
        line(format_args!(
            "{index:>5}  {:<width$}  {layers:>11}  {memory:>10}  {step:>10}  {decode:>10}  {attention:>10}  {prefill:>12}",
            name(stage.device)
        ));
    }
    for (index, stage) in plan.stages().iter().enumerate().filter(|(_, stage)| stage.ram > 0) {
        line(format_args!("stage {index}: {} of its experts lie in RAM, computed by the processor", bytes(stage.ram)));
    }
    let stages: u64 = plan.stages().iter().map(|stage| stage.step_ns).sum();
    let (links, token) = (time(plan.token_ns().saturating_sub(stages)), time(plan.token_ns()));
    let search = if plan.exact() { "exact search" } else { "beam search, or not every node considered" };
    line(format_args!("links {links}, total {token} per token ({search})"));
    for (id, reason) in plan.reasons().iter().filter(|(id, _)| plan.stage_of(*id).is_none()) {
        line(format_args!("{}: {reason}", name(*id)));
    }
    if !one_numerics(plan, fleet) {
        line(format_args!("the nodes used differ in numerics: tokens may differ from those of another plan"));
    }
    for loss in plan.losses() {
        let node = fleet.devices.iter().find(|device| device.id.node == loss.lost);
        let lost = node.map_or_else(|| hex(loss.lost), |device| device.name.clone());
        match &loss.plan {
            Ok(next) => {
                let stages = next.stages().iter();
                let places = stages.map(|s| format!("{} {}", name(s.device), layers(&s.layers)));
                let places: Vec<String> = places.collect();
                line(format_args!("if {lost} is lost: {}, {} per token", places.join(", "), time(next.token_ns())));
            }
            Err(error) => line(format_args!("if {lost} is lost: {error}")),
        }
    }
    out
}

/// A device's measured figures: weight bytes per second in decode, cache bytes per second in attention, flops per second in
/// prefill.
fn speeds(device: &Device) -> [String; 3] {
    let shown = |speed: u64, units: &[&str]| match speed {
        0 => String::from("unmeasured"),
        speed => scaled(speed, units),
    };
    let bytes = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s", "EB/s"];
    let flops = ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s", "EFLOP/s"];
    [
        shown(device.bytes_per_second, &bytes),
        shown(device.cache_bytes_per_second, &bytes),
        shown(device.flops_per_second, &flops),
    ]
}

/// Whether all devices in use compute the same bits.
fn one_numerics(plan: &Plan, fleet: &Fleet) -> bool {
    let mut ids = plan.stages().iter().filter_map(|stage| fleet.device(stage.device)).map(|device| device.numerics);
    let first = ids.next();
    ids.all(|numerics| Some(numerics) == first)
}

/// First and last layer, both inclusive: `0-13`.
pub fn layers(range: &Range<u32>) -> String {
    match range.end.saturating_sub(1) {
        last if last <= range.start => format!("{}", range.start),
        last => format!("{}-{last}", range.start),
    }
}

/// `402.8 MiB`: one decimal, binary units, as on the command line.
pub fn bytes(count: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1 << 10 {
        return format!("{count} B");
    }
    let mut shift = 10u32;
    while shift < 60 && count >> shift >= 1 << 10 {
        shift += 10;
    }
    let tenths_of = |shift: u32| (u128::from(count) * 10 + (1 << (shift - 1))) >> shift;
    // 1023.96 KiB print as 1.0 MiB.
    if shift < 60 && tenths_of(shift) >= 10_240 {
        shift += 10;
    }
    let tenths = tenths_of(shift);
    format!("{}.{} {}", tenths / 10, tenths % 10, units[shift as usize / 10 - 1])
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

/// The first bytes of an id, for a node that has left the fleet.
fn hex(node: NodeKey) -> String {
    let mut out = String::new();
    for byte in &node.0[..4] {
        let _ = write!(out, "{byte:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let shown: Vec<String> =
            [0, 1023, 1024, 2047, 1_048_575, 98_362_432, 422_356_224, 900 << 30, u64::MAX].map(bytes).into();
        let binary =
            ["0 B", "1023 B", "1.0 KiB", "2.0 KiB", "1.0 MiB", "93.8 MiB", "402.8 MiB", "900.0 GiB", "16.0 EiB"];
        assert_eq!(shown, binary);
        assert_eq!(time(61_000_000_000), "61.0 s");
        assert_eq!(time(3_600_000_000_000), "3600 s");
    }

    #[test]
    fn layer_ranges_name_the_first_and_the_last_layer() {
        assert_eq!([layers(&(0..14)), layers(&(14..15)), layers(&(3..3))], ["0-13", "14", "3"]);
    }
}
