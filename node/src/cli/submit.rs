//! `meshnode submit`, `cancel`: a job file in, progress while it runs, a summary at the end.
use super::interrupt::{GLANCE, Interrupts};
use super::model::{ComputeArgs, Service};
use super::{Failure, Global, answer, remark, say};
use crate::config::Size;
use data_encoding::BASE64;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kernels::grid::simulation::Simulation;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode submit node/examples/karman.toml --out karman --wait
  meshnode submit sim.toml --out run1 --wait --json | tail -n 1
  meshnode submit sim.toml --out run1 --resume --wait

Outputs and checkpoints go to --out; without it, nothing is kept but the summary. Ctrl-C ends a job that is waited for; its \
checkpoints stay. Where no node listens, --wait runs the job in this process, alone.

With --json: JSON lines while it runs, the last one with state_hash, mlups, steps, halo_bytes, communication_hidden and what \
else there is to know.")]
pub(super) struct SubmitArgs {
    /// The job file
    job: PathBuf,
    /// Folder for outputs and checkpoints
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on from the last checkpoint in --out
    #[arg(long, requires = "out")]
    resume: bool,
    /// Stay until it is done
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    compute: ComputeArgs,
}

#[derive(Debug, clap::Args)]
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
    let out = args.out.as_ref().map(|out| std::path::absolute(out).unwrap_or_else(|_| out.clone()));
    let body = json!({"simulation": packed(&simulation), "out": out, "resume": args.resume});
    let interrupts = Interrupts::listen()?;
    let (for_service, compute, wait) = (global.clone(), args.compute.clone(), args.wait);
    let (service, submitted) = interrupts.during(move || {
        let client = for_service.client();
        if !wait && !client.listens() {
            return Err(crate::client::ClientError::Nobody { base: client.base().to_owned() }.into());
        }
        let service = Service::find(&for_service, &compute, None, None)?;
        let submitted = service.client.post("/api/v1/grids", &body)?;
        Ok((service, submitted))
    })?;
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
                    let _ = service.client.delete(&format!("/api/v1/grids/{job}"));
                    remark(match checkpoint {
                        Some(step) => format!("ended: --resume goes on from the checkpoint of step {step}"),
                        None => "ended; there is no checkpoint to go on from".to_owned(),
                    });
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

/// More than so many names nobody reads in a line.
const NODES_NAMED: usize = 6;

pub(super) fn rate(cells_per_s: f64) -> String {
    match cells_per_s {
        rate if rate >= 1e12 => format!("{:.2} T cells/s", rate / 1e12),
        rate if rate >= 1e9 => format!("{:.2} G cells/s", rate / 1e9),
        rate => format!("{:.1} M cells/s", rate / 1e6),
    }
}

/// What a run came to.
fn summary(report: &Value) -> String {
    let number = |name: &str| report[name].as_f64().unwrap_or(0.0);
    let size: Vec<String> = report["size"].as_array().into_iter().flatten().map(ToString::to_string).collect();
    let mut text = format!(
        "{}: {} steps of {} cells in {:.2} s\n  {:.1} steps/s, {}, {:.1} GB/s effective\n",
        report["name"].as_str().unwrap_or("simulation"),
        number("step") - number("from_step"),
        size.join(" x "),
        number("seconds"),
        number("steps_per_s"),
        rate(number("cells_per_s")),
        number("t_eff_gb_s"),
    );
    let tiles = report["tiles"].as_array().map_or(0, Vec::len);
    if tiles > 1 {
        let hidden = report["communication_hidden"].as_f64().map_or(0.0, |share| share * 100.0);
        let _ = writeln!(
            text,
            "  {tiles} tiles on {}, halos of {} steps, {} sent, {hidden:.0} % of communication hidden",
            nodes(report),
            report["depth"],
            Size(report["halo_bytes"].as_u64().unwrap_or(0)),
        );
    }
    for total in report["totals"].as_array().into_iter().flatten() {
        if let (Some(first), Some(last)) = (total["first"].as_f64(), total["last"].as_f64()) {
            let name = match total["name"].as_str() {
                // What it has above density 1, which is where round-off shows.
                Some("mass") => "mass beyond density 1:",
                name => name.unwrap_or("total"),
            };
            // Living cells are counted.
            let digits = if first.fract() == 0.0 && last.fract() == 0.0 { 0 } else { 9 };
            let _ = writeln!(text, "  {name} {first:.digits$} -> {last:.digits$}");
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
    let ended = global.client().delete(&format!("/api/v1/grids/{}", args.job))?;
    answer(global, &ended, |ended| format!("{} is cancelled", ended["job"].as_str().unwrap_or("?")));
    Ok(())
}
