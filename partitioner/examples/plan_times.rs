//! How long planning takes on this machine: prints milliseconds for fleets of several sizes.
//! Run it with `cargo run --release -p partitioner --example plan_times`.
#![allow(clippy::print_stdout)] // printing is what it is for
#[path = "../tests/fleets/mod.rs"]
mod fleets;

use fleets::{Random, fleet, options, work};
use partitioner::{Goal, Options, plan, repair};
use std::time::Instant;

fn main() {
    for (devices, layers, share) in
        [(3, 30, 2), (8, 80, 2), (10, 80, 1), (10, 80, 4), (11, 80, 2), (64, 80, 2), (64, 80, 8)]
    {
        for goal in [Goal::Latency, Goal::Throughput] {
            let mut random = Random::new(7);
            let (work, mut fleet) = (work(&mut random, layers), fleet(&mut random, devices));
            for device in &mut fleet.devices {
                device.memory = device.memory * layers as u64 * share / devices as u64;
            }
            let options = options(goal);
            let start = Instant::now();
            let found = plan(&work, &fleet, &options);
            let plan_ms = start.elapsed().as_secs_f64() * 1e3;
            let Ok(found) = found else {
                println!("{devices:>3} nodes × {layers:>3} layers, {goal:?}: no plan, {plan_ms:.1} ms");
                continue;
            };
            let mut left = fleet.clone();
            left.devices.retain(|device| device.id != found.stages()[0].device);
            let start = Instant::now();
            let repaired = repair(&found, &work, &left, &options).is_ok();
            let repair_ms = start.elapsed().as_secs_f64() * 1e3;
            let start = Instant::now();
            let all = plan(&work, &fleet, &Options { losses: true, ..options }).is_ok();
            let losses_ms = start.elapsed().as_secs_f64() * 1e3;
            println!(
                "{devices:>3} nodes × {layers:>3} layers, {goal:?}: {} stages, exact {}, plan {plan_ms:.1} ms, \
                 repair {repair_ms:.1} ms ({repaired}), with loss plans {losses_ms:.1} ms ({all}), token {:.3} ms",
                found.stages().len(),
                found.exact(),
                found.token_ns() as f64 / 1e6,
            );
        }
    }
}
