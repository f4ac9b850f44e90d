//! `meshnode plan`: who would hold which layers, what it costs, and why.
use super::interrupt::Interrupts;
use super::model::{ModelArgs, Service, display_name};
use super::table::{render, row};
use super::{Failure, Global, answer};
use crate::config::Size;
use node_core::limits;
use serde_json::Value;
use std::fmt::Write;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode plan smollm2-135m
  meshnode plan smollm2-135m --context 8192 --json")]
pub(super) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
}

pub(super) fn plan(global: &Global, args: &PlanArgs) -> Result<(), Failure> {
    let (_service, report) = Service::ask(&Interrupts::listen()?, global, &args.model, None, "/api/v1/plan")?;
    answer(global, &report, |report| text(&display_name(&args.model.model), report));
    Ok(())
}

fn text(model: &str, report: &Value) -> String {
    let millis = report["token_ms"].as_f64().unwrap_or(0.0);
    let search = if report["exact"] == true { "the best there is" } else { "the best that was found (beam search)" };
    let mut text = format!("{model}: {millis:.2} ms a token predicted, {search}\n\n{}", stages(&report["stages"]));
    if report["change"].is_object() {
        let change = &report["change"];
        let number = |name: &str| change[name].as_f64().unwrap_or(0.0);
        let _ = match change["moved_bytes"].as_u64().unwrap_or(0) {
            0 => writeln!(text, "\nThat is where it runs."),
            bytes => writeln!(
                text,
                "\nIt runs elsewhere now, with {:.2} ms a token: {} of weights would move. It moves by itself when that saves a \
                 fifth of the time for {} s.",
                number("before_ms"),
                Size(bytes),
                (limits::RESHAPE_EVERY * limits::RESHAPE_LOOKS).as_secs(),
            ),
        };
    }
    let reasons = report["reasons"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !reasons.is_empty() {
        let rows: Vec<_> = reasons.iter().map(|r| row([string(&r["node"]), string(&r["reason"])])).collect();
        let _ = write!(text, "\nWhy:\n{}", render(&rows));
    }
    text.push_str(&standbys(&report["standbys"]));
    for loss in report["losses"].as_array().into_iter().flatten() {
        let _ = match loss["error"].as_str() {
            Some(error) => writeln!(text, "\nWithout {}: {error}", string(&loss["node"])),
            None => write!(text, "\nWithout {}:\n{}", string(&loss["node"]), stages(&loss["stages"])),
        };
    }
    text
}

/// The stages of a plan or a job.
pub(super) fn stages(stages: &Value) -> String {
    let mut rows = vec![row(["STAGE", "NODE", "LAYERS", "MEMORY", "MS/TOKEN"])];
    for (i, stage) in stages.as_array().into_iter().flatten().enumerate() {
        let (first, end) = (stage["first_layer"].as_u64().unwrap_or(0), stage["end_layer"].as_u64().unwrap_or(0));
        rows.push(vec![
            i.to_string(),
            string(&stage["name"]).to_owned(),
            format!("{first}–{}", end.saturating_sub(1)),
            Size(stage["bytes"].as_u64().unwrap_or(0)).to_string(),
            stage["step_ms"].as_f64().filter(|ms| *ms > 0.0).map_or_else(|| "–".into(), |ms| format!("{ms:.2}")),
        ]);
    }
    render(&rows)
}

/// Who steps in for which stage.
pub(super) fn standbys(standbys: &Value) -> String {
    let mut rows = vec![row(["STAGE", "STANDBY", "TIER", "STATE", "STALL IF LOST"])];
    for standby in standbys.as_array().into_iter().flatten() {
        let name = standby["name"].as_str().unwrap_or(match standby["tier"].as_str() {
            Some("none") => "nobody: without this node there is no plan",
            _ => "whoever has memory then",
        });
        let stall = standby["stall_ms"].as_f64().map_or_else(|| "–".into(), |ms| format!("about {ms:.0} ms"));
        rows.push(vec![
            standby["stage"].to_string(),
            name.to_owned(),
            string(&standby["tier"]).to_owned(),
            string(&standby["state"]).to_owned(),
            stall,
        ]);
    }
    if rows.len() == 1 { String::new() } else { format!("\n{}", render(&rows)) }
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}
