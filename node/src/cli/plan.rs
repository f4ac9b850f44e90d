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
  meshnode plan smollm2-135m --context 8192 --json
  meshnode plan node/examples/karman.toml          a simulation")]
pub(super) struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
}

pub(super) fn plan(global: &Global, args: &PlanArgs) -> Result<(), Failure> {
    if args.model.model.ends_with(".toml") {
        return simulation(global, args);
    }
    let (_service, report) = Service::ask(&Interrupts::listen()?, global, &args.model, None, "/api/v1/plan")?;
    answer(global, &report, |report| text(&display_name(&args.model.model), report));
    Ok(())
}

/// How a simulation would be shared.
fn simulation(global: &Global, args: &PlanArgs) -> Result<(), Failure> {
    let simulation = super::submit::read(std::path::Path::new(&args.model.model))?;
    let body = serde_json::json!({"simulation": super::submit::packed(&simulation)});
    let (for_service, compute) = (global.clone(), args.model.compute.clone());
    let (_service, report) = Interrupts::listen()?.during(move || {
        let service = Service::find(&for_service, &compute, None, None)?;
        let report = service.client.post("/api/v1/grids/plan", &body)?;
        Ok((service, report))
    })?;
    answer(global, &report, simulation_text);
    Ok(())
}

fn simulation_text(report: &Value) -> String {
    let number = |name: &str| report[name].as_f64().unwrap_or(0.0);
    let mut text = format!(
        "{}: {:.3} ms a step predicted, {:.0} million cells a second, {} for {} steps\n",
        string(&report["simulation"]),
        number("step_ms"),
        number("mlups"),
        indicatif::HumanDuration(std::time::Duration::from_secs_f64(number("duration_s").clamp(0.0, 1e12))),
        report["steps"],
    );
    let tiles = report["tiles"].as_array().map(Vec::as_slice).unwrap_or_default();
    if tiles.len() > 1 {
        let _ = writeln!(
            text,
            "halos serve {} steps; the slowest tile computes {} % of the time",
            report["depth"], report["busy_percent"]
        );
    }
    let mut rows = vec![row(["TILE", "NODE", "CELLS", "MEMORY", "COMPUTE", "HALO"])];
    for (i, tile) in tiles.iter().enumerate() {
        let range = |axis: usize| format!("{}..{}", tile["from"][axis], tile["to"][axis]);
        let axes = if report["size"][2] == 1 { 2 } else { 3 };
        let ms = |name: &str| format!("{:.3} ms", tile[name].as_f64().unwrap_or(0.0));
        rows.push(vec![
            i.to_string(),
            string(&tile["name"]).to_owned(),
            (0..axes).map(range).collect::<Vec<_>>().join(" x "),
            Size(tile["bytes"].as_u64().unwrap_or(0)).to_string(),
            ms("compute_ms"),
            ms("halo_ms"),
        ]);
    }
    let _ = write!(text, "\n{}", render(&rows));
    let standbys = report["standbys"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !standbys.is_empty() {
        let mut rows = vec![row(["TILE", "STANDBY", "TIER", "STALL IF LOST"])];
        for standby in standbys {
            if let Some(back_to) = standby["back_to"].as_str() {
                let cells = [standby["tile"].to_string(), "nobody has the room".into(), "none".into()];
                rows.push(cells.into_iter().chain([format!("all go back to {back_to}")]).collect());
                continue;
            }
            let (usual, most) = (standby["stall_ms"].as_f64(), standby["stall_max_ms"].as_f64());
            let usual = format!("about {:.0} ms", usual.unwrap_or(0.0));
            let stall = match standby["snapshot_every_s"].as_f64().zip(most) {
                Some((every, most)) => format!("{usual}, at most {most:.0} ms: a snapshot every {every:.1} s"),
                None => usual,
            };
            rows.push(vec![
                standby["tile"].to_string(),
                string(&standby["name"]).to_owned(),
                string(&standby["tier"]).to_owned(),
                stall,
            ]);
        }
        let _ = write!(text, "\n{}", render(&rows));
    }
    text
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
