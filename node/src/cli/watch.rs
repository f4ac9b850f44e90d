//! `meshnode watch`: shows a running simulation in the terminal as coloured half blocks.
use super::interrupt::{GLANCE, Interrupts};
use super::submit::{bandwidth, cells_per_s_now, nodes, rate};
use super::{Failure, Global, remark, say};
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode watch 4f2a                      in this terminal; Ctrl-C stops watching, not the simulation
  meshnode watch 4f2a --json               reports as JSON lines
The web page at the printed address shows the same.")]
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
    let first = client.get(&path)?;
    let page = format!("{}/watch/{}", client.base(), first["job"].as_str().unwrap_or(&args.job));
    let terminal = std::io::stdout().is_terminal() && !global.json;
    if terminal {
        let _ = console::Term::stdout().clear_screen();
    } else {
        remark(&page);
    }
    loop {
        let report = client.get(&path)?;
        if global.json {
            say(&report);
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
        match report["state"].as_str() {
            Some("done") => return Ok(()),
            Some("failed" | "cancelled") => {
                return Err(Failure::failed(report["error"].as_str().unwrap_or("the simulation failed")));
            }
            _ => {}
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
fn caption(report: &Value) -> String {
    let left = report["seconds_left"].as_f64().filter(|_| report["state"] == "running");
    let left = left.map_or_else(String::new, |s| {
        format!(", {} left", indicatif::HumanDuration(Duration::from_secs_f64(s.clamp(0.0, 1e9))))
    });
    let state = match report["waiting"].as_str() {
        Some(why) => format!("waiting: {why}"),
        None => report["state"].as_str().unwrap_or("").to_owned(),
    };
    let name = report["name"].as_str().unwrap_or("");
    let coordinator = report["coordinator"]["name"].as_str();
    let coordinator = coordinator.map_or_else(String::new, |name| format!(", coordinated by {name}"));
    format!("{name}: {state}, step {} of {}{left}{coordinator}", report["step"], report["steps"])
}

/// Speed, and the nodes that compute.
fn speed(report: &Value) -> String {
    let number = |name: &str| report[name].as_f64().unwrap_or(0.0);
    if report["cells_per_s"].is_null() {
        return "the coordinator does not answer: this is the partial report of one of its nodes".into();
    }
    let cells = cells_per_s_now(report);
    let now = if number("cells_per_s") > 0.0 { cells / number("cells_per_s") } else { 0.0 };
    let tiles = report["tiles"].as_array().map_or(0, Vec::len);
    let tiles = if tiles == 1 { "one tile".to_owned() } else { format!("{tiles} tiles") };
    format!(
        "{:.1} steps/s, {}, {} effective memory bandwidth; {tiles} on {}",
        number("steps_per_s") * now,
        rate(cells),
        bandwidth(number("t_eff_gb_s") * now),
        nodes(report),
    )
}
