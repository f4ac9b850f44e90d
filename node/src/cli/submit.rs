//! `meshnode submit` and `cancel`: submits a job file, shows progress, and prints a summary at the end.
use super::compute::ComputeArgs;
use super::failure::Failure;
use super::global::{Global, answer, is_local};
use super::interrupt::{GLANCE, Interrupts};
use super::print::{remark, say, say_json};
use super::service::Service;
use crate::client::ClientError;
use crate::config::Size;
use crate::folders::Claim;
use crate::report::{Cancelled, ForceReport, RunReport, RunState, SimulationReport, Submitted};
use crate::submissions::run_folder::{Existing, check};
use crate::views::count;
use data_encoding::BASE64;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kernels_simulations::Simulation;
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode submit node/examples/karman.toml --out karman --wait
  meshnode submit sim.toml --out run1 --wait --json | tail -n 1
  meshnode submit sim.toml --out run1 --resume --wait

Outputs and checkpoints are written to --out; without it, only the summary is printed. If the node runs as you on this machine, \
--out may be any folder of yours. Otherwise it must be below --output-dir of the node, or relative, which means below `outputs` in \
its --data-dir. A folder that is not empty is rejected without --resume or --overwrite; only files named in the manifest of a run \
there are ever removed. With --wait, Ctrl-C cancels the job and keeps its checkpoints. If no node is running, --wait runs the job \
in this process, without peers.

--json prints JSON lines during the run; the last one is the full report, with state_hash, mlups, steps, halo_bytes, \
communication_hidden and more.")]
pub(super) struct SubmitArgs {
    /// The job file (TOML)
    job: PathBuf,
    /// Folder for outputs and checkpoints
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume from the last checkpoint in --out
    #[arg(long, requires = "out", conflicts_with = "overwrite")]
    resume: bool,
    /// Replace the run in --out. It is removed once the new run has a checkpoint or is done
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// Wait until the job is done
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    compute: ComputeArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  meshnode cancel 4f2a      checkpoints are kept")]
pub(super) struct CancelArgs {
    /// Job id as shown by `meshnode jobs`, or a prefix of it
    job: String,
}

/// Reads a job file, and prints warnings about it.
pub(super) fn read(path: &std::path::Path) -> Result<Simulation, Failure> {
    let simulation = Simulation::read(path).map_err(Failure::usage)?;
    for warning in simulation.warnings() {
        remark(format!("warning: {warning}"));
    }
    Ok(simulation)
}

/// The simulation as base64, for the API.
pub(super) fn packed(simulation: &Simulation) -> String {
    BASE64.encode(&simulation.to_bytes())
}

pub(super) fn submit(global: &Global, args: &SubmitArgs) -> Result<(), Failure> {
    let simulation = read(&args.job)?;
    if args.out.is_none() && (!simulation.outputs().is_empty() || simulation.checkpoint_every().is_some()) {
        remark("warning: outputs and checkpoints are not saved: to save them, pass --out DIR");
    }
    let existing = match (args.resume, args.overwrite) {
        (true, _) => Existing::Resume,
        (false, true) => Existing::Overwrite,
        (false, false) => Existing::Refuse,
    };
    if !global.client()?.listens() {
        if !args.wait {
            return Err(ClientError::Unreachable { base: global.client()?.base().to_owned() }.into());
        }
        // The node started below would report the same, a moment later.
        if let Some(out) = &args.out {
            check(out, existing).map_err(Failure::usage)?;
        }
    }
    let (out, claim) = match &args.out {
        Some(out) if global.api().is_none_or(|api| is_local(&api)) => {
            let out = std::path::absolute(out).unwrap_or_else(|_| out.clone());
            match create_claim(&out) {
                Ok((out, claim)) => (Some(out), Some(claim)),
                // This user may not write there, but the node may.
                Err(_) => (Some(out), None),
            }
        }
        out => (out.clone(), None), // a path on the other machine
    };
    let claimed = claim.as_ref().map(Claim::name);
    let body = json!({
        "simulation": packed(&simulation), "out": out, "claim": claimed, "resume": args.resume, "overwrite": args.overwrite,
    });
    let interrupts = Interrupts::listen()?;
    let (for_service, compute, wait) = (global.clone(), args.compute.clone(), args.wait);
    let (service, submitted) = interrupts.during(move || {
        let client = for_service.client()?;
        if !wait && !client.listens() {
            return Err(ClientError::Unreachable { base: client.base().to_owned() }.into());
        }
        let service = Service::find(&for_service, &compute, None, None)?;
        let submitted: Submitted = match service.client.post_as("/api/v1/grids", &body) {
            // A usage error: a folder that must not be written to, or no checkpoint to resume from.
            Err(ClientError::Refused { status: 400, message }) => return Err(Failure::usage(message)),
            submitted => submitted?,
        };
        Ok((service, submitted))
    })?;
    drop(claim);
    let job = &submitted.job;
    if !args.wait {
        placed(&service, job)?;
        answer(global, &submitted, |_| {
            format!("{job}\nwatch it with `meshnode watch {job}`, cancel it with `meshnode cancel {job}`")
        });
        return Ok(());
    }
    follow(global, &service, &interrupts, job)
}

/// Creates the folder, and a claim that proves to the node that this user may write there. The returned path has no
/// symbolic links.
fn create_claim(out: &Path) -> std::io::Result<(PathBuf, Claim)> {
    std::fs::create_dir_all(out)?;
    let out = out.canonicalize()?;
    let claim = Claim::create(&out)?;
    Ok((out, claim))
}

/// How long `submit` without `--wait` waits for an early failure, such as a grid that does not fit the mesh.
const PLACED_MAX: Duration = Duration::from_secs(2);

fn placed(service: &Service, job: &str) -> Result<(), Failure> {
    let end = Instant::now() + PLACED_MAX;
    while Instant::now() < end {
        let report: SimulationReport = service.client.get_as(&format!("/api/v1/grids/{job}"))?;
        match report.state() {
            RunState::Failed | RunState::Cancelled => return Err(failed(&report)),
            RunState::Starting if report.tiles() == 0 => std::thread::sleep(GLANCE),
            RunState::Starting
            | RunState::Running
            | RunState::Waiting
            | RunState::Done
            | RunState::Computing
            | RunState::Lost => return Ok(()),
        }
    }
    Ok(())
}

/// Shows the progress of a job until it ends.
fn follow(global: &Global, service: &Service, interrupts: &Interrupts, job: &str) -> Result<(), Failure> {
    let lines = service.client.get_stream::<SimulationReport>(&format!("/api/v1/grids/{job}/events"))?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in lines {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style =
        ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}").unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    let (mut waiting, mut checkpoint) = (None::<String>, None);
    loop {
        let report = match receiver.recv_timeout(GLANCE) {
            Ok(line) => line.map_err(|_| left())?,
            Err(RecvTimeoutError::Timeout) => {
                if interrupts.came() {
                    bar.finish_and_clear();
                    remark(ended(service, job, checkpoint));
                    return Err(Failure::quiet(Failure::INTERRUPTED));
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(left());
            }
        };
        if report.waiting() != waiting.as_deref() {
            waiting = report.waiting().map(str::to_owned);
            if let Some(why) = &waiting {
                bar.suspend(|| remark(format!("waiting: {why}")));
            }
        }
        if global.json {
            say_json(&report);
        }
        checkpoint = report.checkpoint().or(checkpoint);
        bar.set_length(report.steps().unwrap_or(0));
        bar.set_position(report.step().unwrap_or(0).into());
        let run = report.run();
        let left = run.and_then(|run| run.seconds_left).map_or_else(String::new, time_left);
        bar.set_message(format!("{} {}{left}", report.name(), rate(run.map_or(0.0, cells_per_s_now))));
        match report.state() {
            RunState::Done => {
                bar.finish_and_clear();
                if let Some(run) = run.filter(|_| !global.json) {
                    say(summary(run).trim_end());
                }
                return Ok(());
            }
            RunState::Failed | RunState::Cancelled => {
                bar.finish_and_clear();
                return Err(failed(&report));
            }
            RunState::Starting | RunState::Running | RunState::Waiting | RunState::Computing | RunState::Lost => {}
        }
    }
}

/// Cancels a job, and describes what its folder contains then.
fn ended(service: &Service, job: &str, checkpoint: Option<u32>) -> String {
    let path = format!("/api/v1/grids/{job}");
    let _ = service.client.delete(&path);
    let end = Instant::now() + PLACED_MAX;
    let mut report: Option<SimulationReport> = None;
    // Files being written are complete once the job reports that it has ended.
    while Instant::now() < end && !report.as_ref().is_some_and(|report| report.state().is_over()) {
        std::thread::sleep(GLANCE);
        report = service.client.get_as(&path).ok();
    }
    let run = report.as_ref().and_then(SimulationReport::run);
    let checkpoint = run.and_then(|run| run.checkpoint).or(checkpoint);
    let (replaced, out) = run.map_or((None, None), |run| (run.replaced.as_deref(), run.out.as_deref()));
    match (checkpoint, replaced, out) {
        (Some(step), _, _) => format!("cancelled: to continue from the checkpoint of step {step}, pass --resume"),
        (None, Some(before), _) => format!(
            "cancelled before the first checkpoint; the folder still holds the previous run, {before}: --resume \
             restores it, --overwrite starts again"
        ),
        (None, None, Some(_)) => "cancelled before the first checkpoint: to start again, pass --overwrite".to_owned(),
        (None, None, None) => "cancelled; nothing was saved, because --out was not given".to_owned(),
    }
}

/// The error of a simulation that ended before its last step.
pub(super) fn failed(report: &SimulationReport) -> Failure {
    Failure::failed(report.error().unwrap_or("the simulation failed"))
}

/// As `3 of 10`; `null` for what the reporting node does not know.
pub(super) fn progress(report: &SimulationReport) -> String {
    let number = |number: Option<u64>| number.map_or_else(|| "null".into(), |number| number.to_string());
    format!("{} of {}", number(report.step().map(u64::from)), number(report.steps()))
}

/// As `, 3 minutes left`.
pub(super) fn time_left(seconds: f64) -> String {
    format!(", {} left", indicatif::HumanDuration(Duration::from_secs_f64(seconds.clamp(0.0, 1e9))))
}

/// The error if the node that the simulation was submitted to ends.
fn left() -> Failure {
    Failure::failed(
        "the node ended before the simulation did. If more than half of the nodes that compute it remain, one of them takes over \
         and saves the outputs from then on: see `meshnode jobs` on those nodes. Otherwise resume from the last checkpoint with \
         --resume",
    )
}

/// The recent speed while the simulation runs, the average once it has ended.
pub(super) fn cells_per_s_now(run: &RunReport) -> f64 {
    match run.steps_per_s_now {
        Some(now) if run.steps_per_s > 0.0 => run.cells_per_s * now / run.steps_per_s,
        Some(_) | None => run.cells_per_s,
    }
}

/// The names of the nodes that compute tiles, without duplicates.
pub(super) fn nodes(run: &RunReport) -> String {
    let mut names: Vec<&str> = Vec::new();
    for tile in &run.tiles {
        let name = tile.name.as_deref().or_else(|| tile.node.get(..8)).unwrap_or("?");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.len() {
        0..=NODES_NAMED => names.join(", "),
        more => format!("{} and {} more", names[..NODES_NAMED].join(", "), more - NODES_NAMED),
    }
}

/// Most nodes named in a line.
const NODES_NAMED: usize = 6;

pub(super) fn rate(cells_per_s: f64) -> String {
    match cells_per_s {
        rate if rate >= 1e12 => format!("{:.2} T cells/s", rate / 1e12),
        rate if rate >= 1e9 => format!("{:.2} G cells/s", rate / 1e9),
        rate => format!("{:.1} M cells/s", rate / 1e6),
    }
}

/// Formats the effective bandwidth: bytes of state read and written per second. `gigabytes`: in GB/s, as in the report.
pub(super) fn bandwidth(gigabytes: f64) -> String {
    crate::measure::per_second(Some((gigabytes * 1e9) as u64), "B")
}

/// The summary of a completed run.
fn summary(run: &RunReport) -> String {
    let size: Vec<String> = run.size.iter().map(ToString::to_string).collect();
    let mut text = format!(
        "{}: {} of {} cells in {:.2} s\n  {:.1} steps/s, {}, {} effective memory bandwidth\n",
        run.name,
        count(run.step.saturating_sub(run.from_step) as usize, "step"),
        size.join(" x "),
        run.seconds,
        run.steps_per_s,
        rate(run.cells_per_s),
        bandwidth(run.t_eff_gb_s),
    );
    let tiles = run.tiles.len();
    if tiles > 1 {
        let hidden = run.communication_hidden.map_or(0.0, |share| share * 100.0);
        let _ = writeln!(
            text,
            "  {tiles} tiles on {}, halo depth {}, {} sent, {hidden:.0} % of communication hidden",
            nodes(run),
            run.depth,
            Size(run.halo_bytes),
        );
    }
    for total in &run.totals {
        if let (Some(first), Some(last)) = (total.first, total.last) {
            let name = match total.name.as_str() {
                // Relative to density 1, so that round-off is visible.
                "mass" => "excess mass (relative to density 1)".to_owned(),
                "population" => "living cells".to_owned(),
                name => format!("sum of {name}"),
            };
            // Living cells are whole numbers.
            let digits = if first.fract() == 0.0 && last.fract() == 0.0 { 0 } else { 9 };
            let _ = writeln!(text, "  {name}: start {first:.digits$}, end {last:.digits$}");
        }
    }
    if let Some(report) = &run.force {
        let _ = writeln!(text, "  {}", force(report));
    }
    if run.losses > 0 {
        let nodes = if run.losses == 1 { "node" } else { "nodes" };
        let _ = writeln!(text, "  {} {nodes} lost, longest pause {:.0} ms", run.losses, run.longest_stall_ms);
    }
    if let Some(out) = &run.out {
        let _ = writeln!(text, "  outputs in {out}");
    }
    let _ = writeln!(text, "  state hash {}", run.state_hash.as_deref().unwrap_or("-"));
    text
}

/// The force on solid cells.
fn force(report: &ForceReport) -> String {
    let list = |numbers: &[f64], digits: usize| {
        numbers.iter().map(|number| format!("{number:.digits$}")).collect::<Vec<_>>().join(", ")
    };
    let coefficients = report.coefficients.as_ref().map_or_else(String::new, |numbers| {
        let numbers: Vec<f64> = numbers.iter().map(|number| number.unwrap_or(f64::NAN)).collect();
        format!("; coefficients {}", list(&numbers, 4))
    });
    format!("force on solid cells {}{coefficients} (step {})", list(&report.force, 9), report.step)
}

pub(super) fn cancel(global: &Global, args: &CancelArgs) -> Result<(), Failure> {
    let ended: Cancelled = global.client()?.delete_as(&format!("/api/v1/grids/{}", args.job))?;
    answer(global, &ended, |ended| format!("cancelled {}", ended.job));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_of_a_small_run_has_no_zeros_or_wrong_plurals() {
        let tile = json!({
            "name": "a", "node": "00", "from": [0, 0, 0], "to": [64, 32, 1], "standby": null, "compute_s": 0.1, "wait_s": 0.0,
            "halo_bytes": 0,
        });
        let run: RunReport = serde_json::from_value(json!({
            "job": "2a", "name": "drop", "rule": "wave", "size": [64, 64], "state": "done", "step": 1, "steps": 1,
            "from_step": 0, "depth": 1, "seconds": 0.5, "steps_per_s": 2.0, "mlups": 0.0, "cells_per_s": 8192.0,
            "t_eff_gb_s": 0.0006, "halo_bytes": 0, "standby_bytes": 0, "losses": 0, "longest_stall_ms": 0.0, "totals": [],
            "tiles": [tile, tile], "role": "coordinator", "coordinator": {"name": "a", "node": "00"},
        }))
        .unwrap();
        let text = summary(&run);
        assert!(text.starts_with("drop: 1 step of 64 x 64 cells"), "{text}");
        assert!(text.contains("halo depth 1,") && !text.contains("0.0 GB/s"), "{text}");
    }
}
