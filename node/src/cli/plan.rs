//! `meshnode plan`: predicted placement and cost of a model or simulation, with the reasons.
use super::failure::Failure;
use super::global::{Global, answer};
use super::interrupt::Interrupts;
use super::model::{ModelArgs, display_name};
use super::service::Service;
use super::table::{render, row};
use crate::config::Size;
use crate::report::{PlannedStandby, SimulationPlan, ZoneThen, ZoneView};
use crate::views::{PlanReport, ReasonView, StageView, StandbyView, count};
use node_core::limits;
use partitioner::explain::layers;
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
    let (_service, plan): (_, PlanReport) =
        Service::ask(&Interrupts::listen()?, global, &args.model, None, ("/api/v1/plan", false))?;
    answer(global, &plan, |plan| text(&display_name(&args.model.model), plan));
    Ok(())
}

/// Plans the decomposition of a simulation.
fn simulation(global: &Global, args: &PlanArgs) -> Result<(), Failure> {
    let simulation = super::submit::read(std::path::Path::new(&args.model.model))?;
    let body = serde_json::json!({"simulation": super::submit::packed(&simulation)});
    let (for_service, compute) = (global.clone(), args.model.compute.clone());
    let (_service, plan) = Interrupts::listen()?.during(move || {
        let service = Service::find(&for_service, &compute, None, None)?;
        let plan: SimulationPlan = service.client.post_as("/api/v1/grids/plan", &body)?;
        Ok((service, plan))
    })?;
    answer(global, &plan, simulation_text);
    Ok(())
}

fn simulation_text(plan: &SimulationPlan) -> String {
    let mut text = format!(
        "{}: predicted {:.3} ms/step, {:.0} million cells/s, {} for {}\n",
        plan.simulation,
        plan.step_ms,
        plan.mlups,
        duration(plan.duration_s),
        count(plan.steps as usize, "step"),
    );
    if plan.tiles.len() > 1 {
        let _ = writeln!(
            text,
            "halo depth: {}; the slowest tile spends {} % of the time computing",
            count(plan.depth as usize, "step"),
            plan.busy_percent
        );
    }
    let mut rows = vec![row(["TILE", "NODE", "CELLS", "MEMORY", "COMPUTE", "HALO"])];
    for (i, tile) in plan.tiles.iter().enumerate() {
        let range = |axis: usize| format!("{}-{}", tile.from[axis], tile.to[axis].saturating_sub(1));
        let axes = if plan.size[2] == 1 { 2 } else { 3 };
        let ms = |ms: f64| format!("{ms:.3} ms");
        rows.push(vec![
            i.to_string(),
            known(tile.name.as_deref()).to_owned(),
            (0..axes).map(range).collect::<Vec<_>>().join(" x "),
            Size(tile.bytes).to_string(),
            ms(tile.compute_ms),
            ms(tile.halo_ms),
        ]);
    }
    let _ = write!(text, "\n{}", render(&rows));
    if !plan.standbys.is_empty() {
        let mut rows = vec![row(["TILE", "STANDBY", "TIER", "STALL IF LOST"])];
        rows.extend(plan.standbys.iter().map(tile_standby));
        let _ = write!(text, "\n{}", render(&rows));
    }
    text.push_str(&zones(&plan.zones, &SIMULATION));
    text
}

/// The cells of a table's row.
fn tile_standby(standby: &PlannedStandby) -> Vec<String> {
    match standby {
        PlannedStandby::Missing { tile, back_to, .. } => vec![
            tile.to_string(),
            "none: no node has the memory".into(),
            "none".into(),
            format!("all tiles roll back to {back_to}"),
        ],
        PlannedStandby::Found { tile, name, tier, stall_ms, stall_max_ms, snapshot_every_s, .. } => {
            let usual = format!("about {stall_ms:.0} ms");
            let stall = match snapshot_every_s {
                Some(every) => format!("{usual}, at most {stall_max_ms:.0} ms: a snapshot every {every:.1} s"),
                None => usual,
            };
            vec![tile.to_string(), known(name.as_deref()).to_owned(), tier.clone(), stall]
        }
    }
}

/// A name, or `?` if the node does not know it.
fn known(name: Option<&str>) -> &str {
    name.unwrap_or("?")
}

fn text(model: &str, plan: &PlanReport) -> String {
    let search = if plan.exact { "best plan, exact search" } else { "best plan found, beam search" };
    let mut text = format!(
        "{model}: predicted {:.2} ms/token ({search}); cache for {} of {} tokens\n\n{}",
        plan.token_ms,
        count(plan.sequences as usize, "context"),
        plan.context,
        stages(&plan.stages)
    );
    if plan.stages.len() > 1 {
        let _ = writeln!(text, "\nrows between stages: {}, {} bytes each", plan.boundary, plan.row_bytes);
    }
    if let Some(change) = &plan.change {
        let _ = match change.moved_bytes {
            0 => writeln!(text, "\nThe model is running with this placement."),
            bytes => writeln!(
                text,
                "\nThe model is running with another placement, at {:.2} ms/token; {} of weights would move. It moves automatically \
                 if the predicted gain, at least a fifth of the time, lasts {} s.",
                change.before_ms,
                Size(bytes),
                (limits::MOVE_EVERY * limits::MOVE_REVIEWS).as_secs(),
            ),
        };
    }
    if !plan.reasons.is_empty() {
        text.push('\n');
        for ReasonView { node, reason } in &plan.reasons {
            let _ = writeln!(text, "{node}: {reason}");
        }
    }
    text.push_str(&standbys(&plan.standbys));
    for loss in &plan.losses {
        let _ = match &loss.error {
            Some(error) => writeln!(text, "\nWithout {}: {error}", loss.node),
            None => write!(text, "\nWithout {}:\n{}", loss.node, stages(&loss.stages)),
        };
    }
    text.push_str(&zones(&plan.zones, &MODEL));
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
fn zones(zones: &[ZoneView], kind: &Kind) -> String {
    let mut text = String::new();
    for zone in zones {
        let numbers: Vec<String> = zone.parts.iter().map(u16::to_string).collect();
        let s = if numbers.len() == 1 { "" } else { "s" };
        let parts = format!("{}{s} {}", kind.part, numbers.join(", "));
        let then = match zone.then {
            ZoneThen::Standbys => format!("{parts}: continued by the standby{s}"),
            ZoneThen::Placed => format!("{parts}: {}", kind.placed),
            ZoneThen::Ends => format!("{parts}: the job could not continue: {}", known(zone.error.as_deref())),
            ZoneThen::Untouched => format!("no {} affected", kind.part),
        };
        let stall = zone.stall_ms.map_or_else(String::new, |ms| format!(", stall about {ms:.0} ms"));
        let coordinator = match zone.coordinator {
            true => format!("; {}", kind.coordinator),
            false => String::new(),
        };
        let _ = writeln!(text, "if zone {} is lost: {then}{stall}{coordinator}", zone.zone);
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// The stages of a plan or a job.
pub(super) fn stages(stages: &[StageView]) -> String {
    let mut rows = vec![row(["STAGE", "NODE", "LAYERS", "MEMORY", "MS/TOKEN"])];
    for (i, stage) in stages.iter().enumerate() {
        let memory = match (stage.bytes, stage.ram) {
            (0, _) => "–".into(),
            (bytes, 0) => Size(bytes).to_string(),
            (bytes, ram) => format!("{} + {} RAM", Size(bytes), Size(ram)),
        };
        let step = stage.step_ms.filter(|ms| *ms > 0.0);
        rows.push(vec![
            i.to_string(),
            format!("{} {}", stage.name, stage.device).trim_end().to_owned(),
            layers(&(stage.first_layer..stage.end_layer)),
            memory,
            step.map_or_else(|| "–".into(), |ms| format!("{ms:.2}")),
        ]);
    }
    render(&rows)
}

/// As `12 seconds`; below one second in milliseconds.
fn duration(seconds: f64) -> String {
    match seconds {
        short if short < 1.0 => format!("{:.0} ms", short.max(0.0) * 1e3),
        long => indicatif::HumanDuration(std::time::Duration::from_secs_f64(long.min(1e12))).to_string(),
    }
}

/// The standby of each stage.
pub(super) fn standbys(standbys: &[StandbyView]) -> String {
    if standbys.is_empty() {
        return String::new();
    }
    let mut rows = vec![row(["STAGE", "STANDBY", "TIER", "STATE", "STALL IF LOST"])];
    for standby in standbys {
        let name = standby.name.as_deref().unwrap_or(match standby.tier.as_str() {
            "none" => "none: without this node the model does not fit",
            _ => "none reserved: any node with free memory",
        });
        let stall = standby.stall_ms.map_or_else(|| "–".into(), |ms| format!("about {ms:.0} ms"));
        let (tier, state) = (standby.tier.clone(), standby.state.clone());
        let name = format!("{name} {}", standby.device).trim_end().to_owned();
        rows.push(vec![standby.stage.to_string(), name, tier, state, stall]);
    }
    format!("\n{}", render(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_zone_shows_the_effect_of_its_loss() {
        let known = serde_json::from_value::<Vec<ZoneView>>(serde_json::json!([
            {"zone": "attic", "coordinator": true, "parts": [0], "then": "standbys", "stall_ms": 405.4, "error": null},
            {"zone": "cellar", "coordinator": false, "parts": [1, 2], "then": "ends", "error": "3 GiB are missing"},
            {"zone": "shed", "coordinator": false, "parts": [], "then": "untouched"},
        ]))
        .unwrap();
        assert_eq!(
            zones(&known, &MODEL),
            "\nif zone attic is lost: stage 0: continued by the standby, stall about 405 ms; it includes the coordinator: a \
             successor takes over if more than half of the participating nodes remain\n\
             if zone cellar is lost: stages 1, 2: the job could not continue: 3 GiB are missing\n\
             if zone shed is lost: no stage affected\n"
        );
        assert_eq!(zones(&[], &MODEL), "");
    }

    #[test]
    fn short_durations_are_shown_in_milliseconds() {
        assert_eq!([0.0, 0.25, 12.0].map(duration), ["0 ms", "250 ms", "12 seconds"]);
    }
}
