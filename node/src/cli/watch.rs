//! `meshnode watch`: a simulation as it is now, in half blocks of colour, until it is over.
use super::interrupt::{GLANCE, Interrupts};
use super::{Failure, Global, remark, say};
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode watch 4f2a                      in this terminal; Ctrl-C ends the watching, not the simulation
  meshnode watch 4f2a --json               its figures as JSON lines
A browser shows the same: the address is printed first.")]
pub(super) struct WatchArgs {
    /// The job's id, or the beginning of it, as `meshnode jobs` shows it
    job: String,
    /// How often the picture changes
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = crate::config::parse_duration)]
    every: Duration,
}

pub(super) fn watch(global: &Global, args: &WatchArgs) -> Result<(), Failure> {
    let (client, path) = (global.client(), format!("/api/v1/grids/{}", args.job));
    let interrupts = Interrupts::listen()?;
    let first = client.get(&path)?;
    remark(format!("{}/watch/{}", client.base(), first["job"].as_str().unwrap_or(&args.job)));
    let terminal = std::io::stdout().is_terminal() && !global.json;
    loop {
        let report = client.get(&path)?;
        if global.json {
            say(&report);
        } else if terminal {
            let (lines, columns) = console::Term::stdout().size();
            let picture = client.get_text(&format!("{path}/text?columns={columns}&lines={}", lines.saturating_sub(4)));
            let mut out = std::io::stdout().lock();
            // Over what was there: a screen that is cleared first flickers.
            let _ = write!(out, "\x1b[H{}\x1b[0m{}\x1b[J", picture.unwrap_or_default(), caption(&report));
            let _ = out.flush();
        } else {
            say(caption(&report).trim());
        }
        match report["state"].as_str() {
            Some("done") => return Ok(()),
            Some("failed") => {
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

fn caption(report: &Value) -> String {
    let number = |name: &str| report[name].as_f64().unwrap_or(0.0);
    let left = report["seconds_left"].as_f64().map_or_else(String::new, |s| format!(", {s:.0} s left"));
    format!(
        "\n{}: step {} of {}, {:.1} steps/s, {:.1} M cells/s, {:.1} GB/s effective{left}; {} tiles, {}\n",
        report["name"].as_str().unwrap_or(""),
        report["step"],
        report["steps"],
        number("steps_per_s"),
        number("mlups"),
        number("t_eff_gb_s"),
        report["tiles"].as_array().map_or(0, Vec::len),
        report["waiting"].as_str().or(report["state"].as_str()).unwrap_or(""),
    )
}
