//! Planning time on this machine: prints milliseconds for fleets of several sizes. Run it with `cargo run --release -p
//! partitioner --example plan_times`.
#![expect(clippy::disallowed_methods, reason = "measures how fast the planner itself runs")]
#![allow(clippy::print_stdout)] // printing is its purpose
#[path = "../tests/fleets/mod.rs"]
mod fleets;

use fleets::{Random, fleet, options, with_experts, with_ram, work};
use partitioner::{Goal, Options, plan, repair};
use std::time::Instant;

fn main() {
    for (devices, layers, share) in
        [(3, 30, 2), (8, 80, 2), (10, 80, 1), (10, 80, 4), (11, 80, 2), (64, 80, 2), (64, 80, 8)]
    {
        let goals =
            [(Goal::Latency, false), (Goal::Throughput, false), (Goal::Latency, true), (Goal::Throughput, true)];
        for (goal, ram) in goals {
            let mut random = Random::new(7);
            let (mut work, mut fleet) = (work(&mut random, layers), fleet(&mut random, devices));
            for device in &mut fleet.devices {
                device.memory = device.memory * layers as u64 * share / devices as u64;
            }
            if ram {
                (work, fleet) = (with_experts(&mut random, work), with_ram(&mut random, fleet));
                fleet.devices.iter_mut().for_each(|device| device.ram *= layers as u64 * share / devices as u64);
            }
            let label = if ram { ", experts in RAM" } else { "" };
            let options = options(goal);
            let (found, plan_ms) = least_ms(|| plan(&work, &fleet, &options));
            let Ok(found) = found else {
                println!("{devices:>3} nodes × {layers:>3} layers, {goal:?}{label}: no plan, {plan_ms:.1} ms");
                continue;
            };
            let mut left = fleet.clone();
            left.devices.retain(|device| device.id != found.stages()[0].device);
            let (repaired, repair_ms) = least_ms(|| repair(&found, &work, &left, &options).is_ok());
            let with_losses = Options { losses: true, ..options.clone() };
            let (all, losses_ms) = least_ms(|| plan(&work, &fleet, &with_losses).is_ok());
            println!(
                "{devices:>3} nodes × {layers:>3} layers, {goal:?}{label}: {} stages, exact {}, plan {plan_ms:.1} ms, \
                 repair {repair_ms:.1} ms ({repaired}), with loss plans {losses_ms:.1} ms ({all}), token {:.3} ms",
                found.stages().len(),
                found.exact(),
                found.token_ns() as f64 / 1e6,
            );
        }
    }
}

/// The value, and the least time of five runs in milliseconds: other work on the machine only adds time.
fn least_ms<T>(mut run: impl FnMut() -> T) -> (T, f64) {
    let mut timed = || {
        let start = Instant::now();
        let value = run();
        (value, start.elapsed().as_secs_f64() * 1e3)
    };
    let (mut value, mut least) = timed();
    for _ in 0..4 {
        let (again, ms) = timed();
        (value, least) = (again, least.min(ms));
    }
    (value, least)
}
