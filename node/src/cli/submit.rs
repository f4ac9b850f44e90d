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
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode submit node/examples/karman.toml --out karman --wait
  meshnode submit sim.toml --out run1 --wait --json | tail -n 1
  meshnode submit sim.toml --out run1 --resume --wait

Outputs and checkpoints go to --out; without it, nothing is kept but the summary. With --json: JSON lines while it runs, the
last one with state_hash, mlups, steps, halo_bytes, communication_hidden and what else there is to know. Ctrl-C ends a job
that is waited for; its checkpoints stay. Where no node listens, --wait runs the job in this process, alone.")]
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
    if !args.wait {
        answer(global, &submitted, |submitted| {
            let job = submitted["job"].as_str().unwrap_or("?");
            format!("{job}\nlook at it with `meshnode jobs`, end it with `meshnode cancel {job}`")
        });
        return Ok(());
    }
    let job = submitted["job"].as_str().unwrap_or_default().to_owned();
    follow(global, &service, &interrupts, &job)
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
    let mut waiting = None;
    loop {
        let report: Value = match receiver.recv_timeout(GLANCE) {
            Ok(line) => line.map_err(|_| left())?,
            Err(RecvTimeoutError::Timeout) => {
                if interrupts.came() {
                    bar.finish_and_clear();
                    let _ = service.client.delete(&format!("/api/v1/grids/{job}"));
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
        bar.set_length(report["steps"].as_u64().unwrap_or(0));
        bar.set_position(report["step"].as_u64().unwrap_or(0));
        let left = report["seconds_left"].as_f64().map_or_else(String::new, |s| {
            format!(", {} left", indicatif::HumanDuration(Duration::from_secs_f64(s.clamp(0.0, 1e9))))
        });
        let mlups = report["mlups"].as_f64().unwrap_or(0.0);
        bar.set_message(format!("{} {}{left}", report["name"].as_str().unwrap_or(""), rate(mlups * 1e6)));
        match report["state"].as_str() {
            Some("done") => {
                bar.finish_and_clear();
                if !global.json {
                    say(summary(&report).trim_end());
                }
                return Ok(());
            }
            Some("failed") => {
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

fn rate(cells_per_s: f64) -> String {
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
            "  {tiles} tiles, halos of {} steps, {} sent, {hidden:.0} % of communication hidden",
            report["depth"],
            Size(report["halo_bytes"].as_u64().unwrap_or(0)),
        );
    }
    for total in report["totals"].as_array().into_iter().flatten() {
        if let (Some(first), Some(last)) = (total["first"].as_f64(), total["last"].as_f64()) {
            let _ = writeln!(text, "  {} {first:.9} -> {last:.9}", total["name"].as_str().unwrap_or("total"));
        }
    }
    if let Some(force) = force(report) {
        let _ = writeln!(text, "  {force}");
    }
    if report["losses"].as_u64().unwrap_or(0) > 0 {
        let _ = writeln!(text, "  {} nodes lost, longest pause {:.0} ms", report["losses"], number("longest_stall_ms"));
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
