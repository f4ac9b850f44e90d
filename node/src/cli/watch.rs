//! `meshnode watch`: shows a running simulation in the terminal as coloured half blocks.
use super::failure::Failure;
use super::global::Global;
use super::interrupt::{GLANCE, Interrupts};
use super::print::{remark, say, say_json};
use super::submit::{bandwidth, cells_per_s_now, failed, nodes, progress, rate, time_left};
use crate::report::{RunState, SimulationReport};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode watch 4f2a
  meshnode watch 4f2a --json    reports as JSON lines

Ctrl-C stops watching, not the simulation. The web page at the printed address shows the same.")]
pub(super) struct WatchArgs {
    /// Job id as shown by `meshnode jobs`, or a prefix of it
    job: String,
    /// Refresh interval
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = interval)]
    every: Duration,
}

/// Parses a duration of at least [`GLANCE`], so that watching does not keep the machine busy.
fn interval(text: &str) -> Result<Duration, String> {
    let every = crate::config::parse_duration(text).map_err(|e| e.to_string())?;
    if every >= GLANCE { Ok(every) } else { Err(format!("expected {GLANCE:?} or more, found {every:?}")) }
}

pub(super) fn watch(global: &Global, args: &WatchArgs) -> Result<(), Failure> {
    let (client, path) = (global.client()?, format!("/api/v1/grids/{}", args.job));
    let interrupts = Interrupts::listen()?;
    let first: SimulationReport = client.get_as(&path)?;
    let page = format!("{}/watch/{}", client.base(), first.job());
    let terminal = std::io::stdout().is_terminal() && !global.json;
    if terminal {
        let _ = console::Term::stdout().clear_screen();
    } else {
        remark(&page);
    }
    loop {
        let report: SimulationReport = client.get_as(&path)?;
        if global.json {
            say_json(&report);
        } else if terminal {
            let (lines, columns) = console::Term::stdout().size();
            let caption = [caption(&report), speed(&report), page.clone()];
            let rest = lines.saturating_sub(caption.len() as u16 + 2);
            let picture = client.get_text(&format!("{path}/text?columns={columns}&lines={rest}"));
            let mut out = std::io::stdout().lock();
            // Overwrite in place: clearing the screen first would flicker.
            let _ = writeln!(out, "\x1b[H{}\x1b[0m\x1b[K", picture.unwrap_or_default());
            for line in caption {
                let _ = writeln!(out, "{}\x1b[K", console::truncate_str(&line, usize::from(columns), "…"));
            }
            let _ = write!(out, "\x1b[J");
            let _ = out.flush();
        } else {
            say(format!("{}; {}", caption(&report), speed(&report)));
        }
        match report.state() {
            RunState::Done => return Ok(()),
            RunState::Failed | RunState::Cancelled => return Err(failed(&report)),
            RunState::Starting | RunState::Running | RunState::Waiting | RunState::Computing | RunState::Lost => {}
        }
        let next = Instant::now() + args.every;
        while Instant::now() < next {
            if interrupts.came() {
                return Ok(());
            }
            std::thread::sleep(GLANCE.min(args.every));
        }
    }
}

/// State and progress.
fn caption(report: &SimulationReport) -> String {
    let left = report.run().and_then(|run| run.seconds_left).filter(|_| report.state() == RunState::Running);
    let left = left.map_or_else(String::new, time_left);
    let state = match report.waiting() {
        Some(why) => format!("waiting: {why}"),
        None => report.state().to_string(),
    };
    let coordinator = report.coordinator().and_then(|node| node.name.as_deref());
    let coordinator = coordinator.map_or_else(String::new, |name| format!(", coordinated by {name}"));
    format!("{}: {state}, step {}{left}{coordinator}", report.name(), progress(report))
}

/// Speed, and the nodes that compute.
fn speed(report: &SimulationReport) -> String {
    let Some(run) = report.run() else {
        return "the coordinator does not answer: this is the partial report of one of its nodes".into();
    };
    let cells = cells_per_s_now(run);
    let now = if run.cells_per_s > 0.0 { cells / run.cells_per_s } else { 0.0 };
    let tiles = if run.tiles.len() == 1 { "one tile".to_owned() } else { format!("{} tiles", run.tiles.len()) };
    format!(
        "{:.1} steps/s, {}, {} effective memory bandwidth; {tiles} on {}",
        run.steps_per_s * now,
        rate(cells),
        bandwidth(run.t_eff_gb_s * now),
        nodes(run),
    )
}
