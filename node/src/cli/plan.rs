//! `meshnode plan`: predicted placement and cost of a model or simulation, with the reasons.
use super::interrupt::Interrupts;
use super::model::{ModelArgs, Service, display_name};
use super::table::{render, row};
use super::{Failure, Global, answer};
use crate::config::Size;
use crate::views::count;
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
    let (_service, report) = Service::ask(&Interrupts::listen()?, global, &args.model, None, ("/api/v1/plan", false))?;
    answer(global, &report, |report| text(&display_name(&args.model.model), report));
    Ok(())
}

/// Plans the decomposition of a simulation.
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
        "{}: predicted {:.3} ms/step, {:.0} million cells/s, {} for {}\n",
        string(&report["simulation"]),
        number("step_ms"),
        number("mlups"),
        duration(number("duration_s")),
        count(report["steps"].as_u64().unwrap_or(0) as usize, "step"),
    );
    let tiles = report["tiles"].as_array().map(Vec::as_slice).unwrap_or_default();
    if tiles.len() > 1 {
        let _ = writeln!(
            text,
            "halo depth: {}; the slowest tile spends {} % of the time computing",
            count(report["depth"].as_u64().unwrap_or(0) as usize, "step"),
            report["busy_percent"]
        );
    }
    let mut rows = vec![row(["TILE", "NODE", "CELLS", "MEMORY", "COMPUTE", "HALO"])];
    for (i, tile) in tiles.iter().enumerate() {
        let last = |axis: usize| tile["to"][axis].as_u64().unwrap_or(0).saturating_sub(1);
        let range = |axis: usize| format!("{}-{}", tile["from"][axis], last(axis));
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
                let cells = [standby["tile"].to_string(), "none: no node has the memory".into(), "none".into()];
                rows.push(cells.into_iter().chain([format!("all tiles roll back to {back_to}")]).collect());
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
    text.push_str(&zones(&report["zones"], &SIMULATION));
    text
}

fn text(model: &str, report: &Value) -> String {
    let millis = report["token_ms"].as_f64().unwrap_or(0.0);
    let search = if report["exact"] == true { "best plan, exact search" } else { "best plan found, beam search" };
    let mut text = format!("{model}: predicted {millis:.2} ms/token ({search})\n\n{}", stages(&report["stages"]));
    if report["change"].is_object() {
        let change = &report["change"];
        let number = |name: &str| change[name].as_f64().unwrap_or(0.0);
        let _ = match change["moved_bytes"].as_u64().unwrap_or(0) {
            0 => writeln!(text, "\nThe model is running with this placement."),
            bytes => writeln!(
                text,
                "\nThe model is running with another placement, at {:.2} ms/token; {} of weights would move. It moves automatically \
                 once the predicted gain has been at least a fifth of the time for {} s.",
                number("before_ms"),
                Size(bytes),
                (limits::MOVE_EVERY * limits::MOVE_LOOKS).as_secs(),
            ),
        };
    }
    let reasons = report["reasons"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !reasons.is_empty() {
        text.push('\n');
        for reason in reasons {
            let _ = writeln!(text, "{}: {}", string(&reason["node"]), string(&reason["reason"]));
        }
    }
    text.push_str(&standbys(&report["standbys"]));
    for loss in report["losses"].as_array().into_iter().flatten() {
        let _ = match loss["error"].as_str() {
            Some(error) => writeln!(text, "\nWithout {}: {error}", string(&loss["node"])),
            None => write!(text, "\nWithout {}:\n{}", string(&loss["node"]), stages(&loss["stages"])),
        };
    }
    text.push_str(&zones(&report["zones"], &MODEL));
    text
}

/// Texts about the loss of a zone, by kind of job.
struct Kind {
    part: &'static str,
    /// What happens to parts without a standby.
    placed: &'static str,
    /// What happens if the coordinator is lost.
    coordinator: &'static str,
}

const MODEL: Kind = Kind {
    part: "stage",
    placed: "placed again on the remaining nodes",
    coordinator: "it includes the coordinator: a successor takes over if more than half of the participating nodes remain",
};

const SIMULATION: Kind = Kind {
    part: "tile",
    placed: "all tiles are placed again, from the last checkpoint or the beginning",
    coordinator: "it includes the coordinator: a successor takes over if more than half of the participating nodes remain",
};

/// One line per zone: the effect of losing it, and the predicted stall.
fn zones(zones: &Value, kind: &Kind) -> String {
    let mut text = String::new();
    for zone in zones.as_array().into_iter().flatten() {
        let numbers: Vec<String> = zone["parts"].as_array().into_iter().flatten().map(Value::to_string).collect();
        let s = if numbers.len() == 1 { "" } else { "s" };
        let parts = format!("{}{s} {}", kind.part, numbers.join(", "));
        let then = match zone["then"].as_str() {
            Some("standbys") => format!("{parts}: continued by the standby{s}"),
            Some("placed") => format!("{parts}: {}", kind.placed),
            Some("ends") => format!("{parts}: the job could not continue: {}", string(&zone["error"])),
            _ => format!("no {} affected", kind.part),
        };
        let stall = zone["stall_ms"].as_f64().map_or_else(String::new, |ms| format!(", stall about {ms:.0} ms"));
        let coordinator = match zone["coordinator"] == true {
            true => format!("; {}", kind.coordinator),
            false => String::new(),
        };
        let _ = writeln!(text, "if zone {} is lost: {then}{stall}{coordinator}", string(&zone["zone"]));
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// The stages of a plan or a job.
pub(super) fn stages(stages: &Value) -> String {
    let mut rows = vec![row(["STAGE", "NODE", "LAYERS", "MEMORY", "MS/TOKEN"])];
    for (i, stage) in stages.as_array().into_iter().flatten().enumerate() {
        rows.push(vec![
            i.to_string(),
            string(&stage["name"]).to_owned(),
            layers(stage),
            stage["bytes"]
                .as_u64()
                .filter(|bytes| *bytes > 0)
                .map_or_else(|| "–".into(), |bytes| Size(bytes).to_string()),
            stage["step_ms"].as_f64().filter(|ms| *ms > 0.0).map_or_else(|| "–".into(), |ms| format!("{ms:.2}")),
        ]);
    }
    render(&rows)
}

/// The layer range of a stage or a transfer.
pub(super) fn layers(of: &Value) -> String {
    let layer = |name: &str| of[name].as_u64().and_then(|layer| u32::try_from(layer).ok()).unwrap_or(0);
    partitioner::explain::layers(&(layer("first_layer")..layer("end_layer")))
}

/// As `12 seconds`; below one second in milliseconds.
fn duration(seconds: f64) -> String {
    match seconds {
        short if short < 1.0 => format!("{:.0} ms", short.max(0.0) * 1e3),
        long => indicatif::HumanDuration(std::time::Duration::from_secs_f64(long.min(1e12))).to_string(),
    }
}

/// The standby of each stage.
pub(super) fn standbys(standbys: &Value) -> String {
    let mut rows = vec![row(["STAGE", "STANDBY", "TIER", "STATE", "STALL IF LOST"])];
    for standby in standbys.as_array().into_iter().flatten() {
        let name = standby["name"].as_str().unwrap_or(match standby["tier"].as_str() {
            Some("none") => "none: without this node the model does not fit",
            _ => "none reserved: any node with free memory",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_zone_shows_the_effect_of_its_loss() {
        let known = serde_json::json!([
            {"zone": "attic", "coordinator": true, "parts": [0], "then": "standbys", "stall_ms": 405.4, "error": null},
            {"zone": "cellar", "coordinator": false, "parts": [1, 2], "then": "ends", "error": "3 GiB are missing"},
            {"zone": "shed", "coordinator": false, "parts": [], "then": "untouched"},
        ]);
        assert_eq!(
            zones(&known, &MODEL),
            "\nif zone attic is lost: stage 0: continued by the standby, stall about 405 ms; it includes the coordinator: a \
             successor takes over if more than half of the participating nodes remain\n\
             if zone cellar is lost: stages 1, 2: the job could not continue: 3 GiB are missing\n\
             if zone shed is lost: no stage affected\n"
        );
        assert_eq!(zones(&Value::Null, &MODEL), "");
    }

    #[test]
    fn short_durations_are_shown_in_milliseconds() {
        assert_eq!([0.0, 0.25, 12.0].map(duration), ["0 ms", "250 ms", "12 seconds"]);
    }
}
