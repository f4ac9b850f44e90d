//! `meshnode submit`, `cancel`: a job file in, progress while it runs, a summary at the end.
use super::interrupt::{GLANCE, Interrupts};
use super::model::{ComputeArgs, Service};
use super::{Failure, Global, answer, remark, say};
use crate::client::ClientError;
use crate::config::Size;
use crate::folders::Claim;
use crate::submissions::run_folder::{Existing, check};
use crate::views::count;
use data_encoding::BASE64;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kernels::grid::simulation::Simulation;
use serde_json::{Value, json};
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

Outputs and checkpoints go to --out; without it, nothing is kept but the summary. --out is any folder of yours where the node \
runs as you on this machine; else one below --output-dir of the node, or a relative one, which is below `outputs` of its \
--data-dir. A folder that holds anything is refused without --resume or --overwrite; only what the manifest of a run there names \
is ever removed. Ctrl-C ends a job that is waited for; its checkpoints stay. Where no node listens, --wait runs the job in this \
process, alone.

With --json: JSON lines while it runs, the last one with state_hash, mlups, steps, halo_bytes, communication_hidden and what \
else there is to know.")]
pub(super) struct SubmitArgs {
    /// The job file
    job: PathBuf,
    /// Folder for outputs and checkpoints
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on from the last checkpoint in --out
    #[arg(long, requires = "out", conflicts_with = "overwrite")]
    resume: bool,
    /// Replace the run in --out. It is removed once the new one has a checkpoint or is done
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// Stay until it is done
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    compute: ComputeArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  meshnode cancel 4f2a      its checkpoints stay")]
pub(super) struct CancelArgs {
    /// The job's id, or the beginning of it
    job: String,
}

/// Reads a job file, and says what is odd about it.
pub(super) fn read(path: &std::path::Path) -> Result<Simulation, Failure> {
    let simulation = Simulation::read(path).map_err(Failure::usage)?;
    for warning in simulation.warnings() {
        remark(format!("warning: {warning}"));
    }
    Ok(simulation)
}

/// The simulation as the API takes it.
pub(super) fn packed(simulation: &Simulation) -> String {
    BASE64.encode(&simulation.to_bytes())
}

pub(super) fn submit(global: &Global, args: &SubmitArgs) -> Result<(), Failure> {
    let simulation = read(&args.job)?;
    if args.out.is_none() && (!simulation.outputs().is_empty() || simulation.checkpoint_every().is_some()) {
        remark("nothing is kept of outputs and checkpoints: say where, with --out DIR");
    }
    let existing = match (args.resume, args.overwrite) {
        (true, _) => Existing::Resume,
        (false, true) => Existing::Overwrite,
        (false, false) => Existing::Refuse,
    };
    if !global.client()?.listens() {
        if !args.wait {
            return Err(ClientError::Nobody { base: global.client()?.base().to_owned() }.into());
        }
        // The node that is started below says the same, a moment later.
        if let Some(out) = &args.out {
            check(out, existing).map_err(Failure::usage)?;
        }
    }
    let (out, claim) = match &args.out {
        Some(out) if global.api().is_none_or(|api| super::model::is_local(&api)) => {
            let out = std::path::absolute(out).unwrap_or_else(|_| out.clone());
            match lay_claim(&out) {
                Ok((out, claim)) => (Some(out), Some(claim)),
                // This user may not, but the node may: it knows its folders.
                Err(_) => (Some(out), None),
            }
        }
        out => (out.clone(), None), // as the other machine understands it
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
            return Err(ClientError::Nobody { base: client.base().to_owned() }.into());
        }
        let service = Service::find(&for_service, &compute, None, None)?;
        let submitted = match service.client.post("/api/v1/grids", &body) {
            // The request is wrong: a folder that is not to be touched, nothing to go on from.
            Err(ClientError::Refused { status: 400, message }) => return Err(Failure::usage(message)),
            submitted => submitted?,
        };
        Ok((service, submitted))
    })?;
    drop(claim);
    let job = submitted["job"].as_str().unwrap_or_default().to_owned();
    if !args.wait {
        placed(&service, &job)?;
        answer(global, &submitted, |_| {
            format!("{job}\nlook at it with `meshnode watch {job}`, end it with `meshnode cancel {job}`")
        });
        return Ok(());
    }
    follow(global, &service, &interrupts, &job)
}

/// Makes the folder, and shows the node that this user may write there; the path then has no links.
fn lay_claim(out: &Path) -> std::io::Result<(PathBuf, Claim)> {
    std::fs::create_dir_all(out)?;
    let out = out.canonicalize()?;
    let claim = Claim::lay(&out)?;
    Ok((out, claim))
}

/// So long a submission waits to hear that there is no place for the grid, or whatever else ends it at once.
const PLACED_MAX: Duration = Duration::from_secs(2);

fn placed(service: &Service, job: &str) -> Result<(), Failure> {
    let end = Instant::now() + PLACED_MAX;
    while Instant::now() < end {
        let report = service.client.get(&format!("/api/v1/grids/{job}"))?;
        match report["state"].as_str() {
            Some("failed" | "cancelled") => {
                return Err(Failure::failed(report["error"].as_str().unwrap_or("the simulation failed")));
            }
            Some("starting") if report["tiles"].as_array().is_none_or(Vec::is_empty) => std::thread::sleep(GLANCE),
            _ => return Ok(()),
        }
    }
    Ok(())
}

/// Shows how a job gets on until it is over.
fn follow(global: &Global, service: &Service, interrupts: &Interrupts, job: &str) -> Result<(), Failure> {
    let lines = service.client.get_stream(&format!("/api/v1/grids/{job}/events"))?;
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
    let (mut waiting, mut checkpoint) = (None, None);
    loop {
        let report: Value = match receiver.recv_timeout(GLANCE) {
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
        if report["waiting"] != waiting.clone().unwrap_or_default() {
            waiting = Some(report["waiting"].clone());
            if let Some(why) = report["waiting"].as_str() {
                bar.suspend(|| remark(format!("waiting: {why}")));
            }
        }
        if global.json {
            say(&report);
        }
        checkpoint = report["checkpoint"].as_u64().or(checkpoint);
        bar.set_length(report["steps"].as_u64().unwrap_or(0));
        bar.set_position(report["step"].as_u64().unwrap_or(0));
        let left = report["seconds_left"].as_f64().map_or_else(String::new, |s| {
            format!(", {} left", indicatif::HumanDuration(Duration::from_secs_f64(s.clamp(0.0, 1e9))))
        });
        bar.set_message(format!("{} {}{left}", report["name"].as_str().unwrap_or(""), rate(cells_per_s_now(&report))));
        match report["state"].as_str() {
            Some("done") => {
                bar.finish_and_clear();
                if !global.json {
                    say(summary(&report).trim_end());
                }
                return Ok(());
            }
            Some("failed" | "cancelled") => {
                bar.finish_and_clear();
                return Err(Failure::failed(report["error"].as_str().unwrap_or("the simulation failed")));
            }
            _ => {}
        }
    }
}

/// Ends a job; in words, what is left of it in its folder.
fn ended(service: &Service, job: &str, checkpoint: Option<u64>) -> String {
    let path = format!("/api/v1/grids/{job}");
    let _ = service.client.delete(&path);
    let end = Instant::now() + PLACED_MAX;
    let mut report = Value::Null;
    // What was being written is complete when it says that it has ended.
    while Instant::now() < end && !matches!(report["state"].as_str(), Some("cancelled" | "failed" | "done")) {
        std::thread::sleep(GLANCE);
        report = service.client.get(&path).unwrap_or_default();
    }
    let checkpoint = report["checkpoint"].as_u64().or(checkpoint);
    match (checkpoint, report["replaced"].as_str(), report["out"].as_str()) {
        (Some(step), _, _) => format!("ended: --resume goes on from the checkpoint of step {step}"),
        (None, Some(before), _) => format!(
            "ended before the first checkpoint; the folder still holds what was to be replaced, {before}: --resume takes that back, \
             --overwrite begins again"
        ),
        (None, None, Some(_)) => "ended before the first checkpoint: --overwrite begins again".to_owned(),
        (None, None, None) => "ended; without --out nothing is kept".to_owned(),
    }
}

/// The node that it was submitted to is gone.
fn left() -> Failure {
    Failure::failed(
        "the node ended before the simulation did. Where more than half of those that compute it are left, one of them goes on \
         with it and keeps what it makes: see `meshnode jobs` there. Else take it up from its checkpoints, with --resume",
    )
}

/// Of late while it runs, on the whole when it is over.
pub(super) fn cells_per_s_now(report: &Value) -> f64 {
    let number = |name: &str| report[name].as_f64();
    let all = number("cells_per_s").unwrap_or(0.0);
    match (number("steps_per_s_now"), number("steps_per_s")) {
        (Some(now), Some(steps)) if steps > 0.0 => all * now / steps,
        _ => all,
    }
}

/// Nodes that compute tiles, each once.
pub(super) fn nodes(report: &Value) -> String {
    let mut names: Vec<&str> = Vec::new();
    for tile in report["tiles"].as_array().into_iter().flatten() {
        let name =
            tile["name"].as_str().or_else(|| tile["node"].as_str().and_then(|node| node.get(..8))).unwrap_or("?");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.len() {
        0..=NODES_NAMED => names.join(", "),
        more => format!("{} and {} more", names[..NODES_NAMED].join(", "), more - NODES_NAMED),
    }
}

/// How many nodes a line names.
const NODES_NAMED: usize = 6;

pub(super) fn rate(cells_per_s: f64) -> String {
    match cells_per_s {
        rate if rate >= 1e12 => format!("{:.2} T cells/s", rate / 1e12),
        rate if rate >= 1e9 => format!("{:.2} G cells/s", rate / 1e9),
        rate => format!("{:.1} M cells/s", rate / 1e6),
    }
}

/// Bytes of state that the steps read and write, a second: `gigabytes` as the report has it.
pub(super) fn bandwidth(gigabytes: f64) -> String {
    crate::measure::per_second(Some((gigabytes * 1e9) as u64), "B")
}

/// What a run came to.
fn summary(report: &Value) -> String {
    let number = |name: &str| report[name].as_f64().unwrap_or(0.0);
    let size: Vec<String> = report["size"].as_array().into_iter().flatten().map(ToString::to_string).collect();
    let mut text = format!(
        "{}: {} of {} cells in {:.2} s\n  {:.1} steps/s, {}, {} effective memory bandwidth\n",
        report["name"].as_str().unwrap_or("simulation"),
        count((number("step") - number("from_step")) as usize, "step"),
        size.join(" x "),
        number("seconds"),
        number("steps_per_s"),
        rate(number("cells_per_s")),
        bandwidth(number("t_eff_gb_s")),
    );
    let tiles = report["tiles"].as_array().map_or(0, Vec::len);
    if tiles > 1 {
        let hidden = report["communication_hidden"].as_f64().map_or(0.0, |share| share * 100.0);
        let _ = writeln!(
            text,
            "  {tiles} tiles on {}, halo depth {}, {} sent, {hidden:.0} % of communication hidden",
            nodes(report),
            report["depth"],
            Size(report["halo_bytes"].as_u64().unwrap_or(0)),
        );
    }
    for total in report["totals"].as_array().into_iter().flatten() {
        if let (Some(first), Some(last)) = (total["first"].as_f64(), total["last"].as_f64()) {
            let name = match total["name"].as_str() {
                // Of a number near 1 a cell, round-off would not show.
                Some("mass") => "excess mass (relative to density 1)".to_owned(),
                Some("population") => "living cells".to_owned(),
                name => format!("sum of {}", name.unwrap_or("the field")),
            };
            // Living cells are counted.
            let digits = if first.fract() == 0.0 && last.fract() == 0.0 { 0 } else { 9 };
            let _ = writeln!(text, "  {name}: start {first:.digits$}, end {last:.digits$}");
        }
    }
    if let Some(force) = force(report) {
        let _ = writeln!(text, "  {force}");
    }
    if report["losses"].as_u64().unwrap_or(0) > 0 {
        let nodes = if report["losses"] == 1 { "node" } else { "nodes" };
        let pause = number("longest_stall_ms");
        let _ = writeln!(text, "  {} {nodes} lost, longest pause {pause:.0} ms", report["losses"]);
    }
    if let Some(out) = report["out"].as_str() {
        let _ = writeln!(text, "  outputs in {out}");
    }
    let _ = writeln!(text, "  state hash {}", report["state_hash"].as_str().unwrap_or("-"));
    text
}

/// The force on solid cells, if the job asks for it.
fn force(report: &Value) -> Option<String> {
    let list = |name: &str, digits: usize| {
        let list = report["force"][name].as_array()?;
        let numbers = list.iter().map(|number| format!("{:.digits$}", number.as_f64().unwrap_or(f64::NAN)));
        Some(numbers.collect::<Vec<_>>().join(", "))
    };
    let coefficients = list("coefficients", 4).map_or_else(String::new, |list| format!("; coefficients {list}"));
    Some(format!("force on solid cells {}{coefficients} (step {})", list("force", 9)?, report["force"]["step"]))
}

pub(super) fn cancel(global: &Global, args: &CancelArgs) -> Result<(), Failure> {
    let ended = global.client()?.delete(&format!("/api/v1/grids/{}", args.job))?;
    answer(global, &ended, |ended| format!("{} is cancelled", ended["job"].as_str().unwrap_or("?")));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_small_run_is_summed_up_without_zeros_and_wrong_plurals() {
        let tile = json!({"name": "a"});
        let report = json!({"name": "drop", "size": [64, 64], "step": 1, "from_step": 0, "seconds": 0.5, "steps_per_s": 2.0,
            "cells_per_s": 8192.0, "t_eff_gb_s": 0.0006, "tiles": [tile, tile], "depth": 1});
        let text = summary(&report);
        assert!(text.starts_with("drop: 1 step of 64 x 64 cells"), "{text}");
        assert!(text.contains("halo depth 1,") && !text.contains("0.0 GB/s"), "{text}");
    }
}
