//! Commands that query or administer a running node: thin clients of `/api/v1`.
use super::failure::Failure;
use super::global::{Global, answer, is_local};
use super::interrupt::GLANCE;
use super::plan::{stages, standbys};
use super::print::{remark, say, say_json};
use super::submit::progress;
use super::table::{render, row};
use crate::api::INVITE_TTL_MAX;
use crate::config::{Size, parse_duration};
use crate::process::Process;
use crate::report::SimulationReport;
use crate::views::{JobView, MoveView, PeerView, StateView, count};
use partitioner::explain::layers;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// How long `leave` waits for the process to end: the node gives running requests ten seconds, then announces that it
/// leaves.
const LEAVE_MAX: Duration = Duration::from_secs(20);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode invite                       one machine, within one hour
  meshnode invite --ttl 1d --uses 20    20 machines, within one day
  ssh other meshnode join $(meshnode invite)")]
pub(super) struct InviteArgs {
    /// How long the ticket is valid: 90s, 15m, 1h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = lifetime)]
    ttl: Duration,
    /// Number of machines that may join with the ticket
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    uses: u32,
}

/// Parses a lifetime. The unit is required, because 5 could mean minutes or days.
fn lifetime(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("`{text}` has no unit: expected {text}s, {text}m, {text}h or {text}d"));
    }
    let span = parse_duration(text)?;
    match (1..=INVITE_TTL_MAX.as_secs()).contains(&span.as_secs()) {
        true => Ok(span),
        false => Err(format!("expected 1s to {}d", INVITE_TTL_MAX.as_secs() / 86_400)),
    }
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  meshnode status        lists the waiting peers
  meshnode approve 12D3KooWQ…")]
pub(super) struct ApproveArgs {
    /// PeerId of a waiting peer, or a prefix of it
    peer: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode peers                  lists names and ids
  meshnode ban old-laptop         by name, if only one member has it
  meshnode ban 12D3KooWQ…         by PeerId

The ban reaches all connected members within a second, others when they reconnect. The mesh key is rotated, and banned \
nodes do not receive the new one. Nodes that joined with a ticket of the banned member are banned with it: invite them \
again. Tickets that members created before the ban become void.

A ban of a key is permanent; the machine can join again with a new ticket and a new --data-dir. If two members ban \
each other, the first ban takes effect; the founder's overrides all others.")]
pub(super) struct BanArgs {
    /// Name, id or PeerId of a member; for one that is not connected, its PeerId
    peer: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode drain          before an update: running work continues, new work goes to other nodes
  meshnode drain --off    accepts work again

`meshnode jobs` shows the running requests; when there are none left, run `meshnode leave`.")]
pub(super) struct DrainArgs {
    /// Accept new work again
    #[arg(long)]
    off: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode peers          members of the mesh
  meshnode peers --all    also nodes that left it

--json prints all of them, each with its `state`.")]
pub(super) struct PeersArgs {
    /// Also show nodes that left the mesh
    #[arg(long)]
    all: bool,
}

pub(super) fn drain(global: &Global, args: &DrainArgs) -> Result<(), Failure> {
    let value = global.client()?.post("/api/v1/drain", &json!({"on": !args.off}))?;
    let text = if args.off {
        "the node accepts new work again"
    } else {
        "the node accepts no new work; running work continues"
    };
    answer(global, &value, |_| text.into());
    Ok(())
}

pub(super) fn leave(global: &Global) -> Result<(), Failure> {
    let value = global.client()?.post("/api/v1/leave", &json!({}))?;
    let process: Option<Process> = serde_json::from_value(value["process"].clone()).ok();
    // The process can be observed only on this machine.
    let here = global.api().is_none_or(|api| is_local(&api));
    let Some(process) = process.filter(|_| here) else {
        answer(global, &value, |_| "the node is leaving the mesh; its process will exit".into());
        return Ok(());
    };
    let end = Instant::now() + LEAVE_MAX;
    while process.runs() {
        if Instant::now() > end {
            let (pid, seconds) = (process.pid, LEAVE_MAX.as_secs());
            return Err(Failure::failed(format!(
                "the node is leaving the mesh, but its process {pid} is still running after {seconds} s: it may be finishing requests; see its log"
            )));
        }
        std::thread::sleep(GLANCE);
    }
    answer(global, &json!({"left": true}), |_| "the node has left the mesh, and its process has ended".into());
    Ok(())
}

pub(super) fn open(global: &Global) -> Result<(), Failure> {
    let client = global.client()?;
    let value = client.post("/api/v1/open", &json!({}))?;
    let url = format!("{}/#{}", client.base(), string(&value["fragment"]));
    if !global.json {
        let minutes = value["seconds"].as_u64().unwrap_or(0) / 60;
        remark(format!("open this link in a browser (valid once, for {minutes} minutes):"));
    }
    answer(global, &json!({"url": url, "seconds": value["seconds"]}), |v| string(&v["url"]).to_owned());
    Ok(())
}

pub(super) fn invite(global: &Global, args: &InviteArgs) -> Result<(), Failure> {
    let body = json!({"ttl_s": args.ttl.as_secs(), "uses": args.uses});
    let value = global.client()?.post("/api/v1/invite", &body)?;
    if !global.json {
        remark("on the other machine run `meshnode join TICKET` with this ticket:");
    }
    answer(global, &value, |v| v["ticket"].as_str().unwrap_or_default().to_owned());
    Ok(())
}

pub(super) fn approve(global: &Global, args: &ApproveArgs) -> Result<(), Failure> {
    let value = global.client()?.post("/api/v1/approve", &json!({"peer": args.peer}))?;
    answer(global, &value, |_| format!("{} may join", args.peer));
    Ok(())
}

pub(super) fn ban(global: &Global, args: &BanArgs) -> Result<(), Failure> {
    let value = global.client()?.post("/api/v1/ban", &json!({"peer": args.peer}))?;
    if let Some(warning) = value["warning"].as_str() {
        remark(format!("warning: {warning}"));
    }
    answer(global, &value, |v| {
        let mut text = format!("{} is banned, and the mesh key has been rotated", string(&v["banned"]));
        for guest in list(&v["with_it"]) {
            let _ = write!(text, "\nalso banned, because the banned node invited it: {}", string(guest));
        }
        for ticket in list(&v["void_tickets"]) {
            let _ = write!(text, "\nvoid, because the banned node may have it: {}", string(ticket));
        }
        text
    });
    Ok(())
}

pub(super) fn status(global: &Global, args: &PeersArgs) -> Result<(), Failure> {
    let state: StateView = global.client()?.get_as("/api/v1/state")?;
    answer(global, &state, |state| status_text(state, args.all));
    let degraded = state.jobs.iter().any(|job| job.state == "degraded");
    if degraded { Err(Failure::failed("a job is degraded: see `meshnode jobs`")) } else { Ok(()) }
}

pub(super) fn peers(global: &Global, args: &PeersArgs) -> Result<(), Failure> {
    let state: StateView = global.client()?.get_as("/api/v1/state")?;
    if let Some(notice) = &state.banned {
        remark(notice);
    }
    answer(global, &state.peers, |peers| peers_text(peers, args.all));
    Ok(())
}

pub(super) fn jobs(global: &Global) -> Result<(), Failure> {
    let client = global.client()?;
    let jobs: Vec<JobView> = client.get_as("/api/v1/jobs")?;
    let simulations: Vec<SimulationReport> = client.get_as("/api/v1/grids")?;
    if global.json {
        let models = jobs.iter().map(|job| json!(job));
        say_json(&models.chain(simulations.iter().map(|simulation| json!(simulation))).collect::<Vec<_>>());
        return Ok(());
    }
    let models = if jobs.is_empty() && !simulations.is_empty() { String::new() } else { jobs_text(&jobs) };
    say((models + &simulations_text(&simulations)).trim_end());
    Ok(())
}

fn status_text(state: &StateView, all: bool) -> String {
    let weights = &state.weights;
    let mut text = render(&[
        row(["node", &state.name]),
        row(["id", &state.node]),
        row(["peer id", &state.peer_id]),
        row(["mesh", &state.mesh]),
        vec!["weights cache".to_owned(), format!("{} of {}", Size(weights.cache_used), Size(weights.cache_limit))],
    ]);
    let _ = write!(text, "\n{}", peers_text(&state.peers, all));
    if !state.jobs.is_empty() {
        let _ = write!(text, "\n{}", jobs_text(&state.jobs));
    }
    for transfer in &weights.transfers {
        let _ = writeln!(
            text,
            "\nfetching {}, layers {}: {} of {} from {}",
            transfer.model,
            layers(&(transfer.first_layer as u32..transfer.end_layer as u32)),
            Size(transfer.bytes_done),
            Size(transfer.bytes_total),
            count(transfer.peers, "peer"),
        );
    }
    if let Some(notice) = &state.banned {
        let _ = writeln!(text, "\n{notice}");
    }
    if let Some(advice) = crate::renewal::advice(state.membership_ends) {
        let _ = writeln!(text, "\n{advice}");
    }
    for peer in &state.waiting {
        let _ = writeln!(text, "\na peer waits for approval; to admit it: meshnode approve {peer}");
    }
    text
}

/// The table of peers. Nodes that left are listed only with `all`, because they need no action.
fn peers_text(peers: &[PeerView], all: bool) -> String {
    let mut rows =
        vec![row(["NAME", "STATE", "DEVICE", "DECODE", "ATTENTION", "PREFILL", "FREE", "OF", "RTT", "LINK", "NODE"])];
    // The column is shown only if any zone is known.
    let zones = peers.iter().any(|peer| !peer.zone.is_empty());
    if zones {
        rows[0].insert(3, "ZONE".into());
    }
    // Likewise RAM for experts.
    let experts = peers.iter().any(|peer| peer.ram_total > 0);
    if experts {
        rows[0].push("EXPERT RAM".into());
    }
    for peer in peers.iter().filter(|peer| all || peer.state != "left") {
        let mut state = peer.state.clone();
        if peer.draining {
            state.push_str(", draining");
        }
        let memory = |bytes: u64| if peer.state == "banned" { "–".into() } else { Size(bytes).to_string() };
        let rtt = match (peer.this_node, peer.rtt_ms) {
            (true, _) => "this node".into(),
            (false, Some(millis)) => format!("{millis:.2} ms"),
            (false, None) => "–".into(),
        };
        let mut cells = vec![
            peer.name.clone(),
            state,
            peer.device.clone(),
            crate::measure::per_second(Some(peer.bytes_per_second), "B"),
            crate::measure::per_second(Some(peer.cache_bytes_per_second), "B"),
            crate::measure::per_second(Some(peer.flops_per_second), "FLOP"),
            memory(peer.memory_free),
            memory(peer.memory_total),
            rtt,
            peer.link_bytes_per_second.map_or_else(|| "–".into(), |bytes| format!("{}/s", Size(bytes))),
            peer.node.chars().take(12).collect(),
        ];
        if zones {
            cells.insert(3, if peer.zone.is_empty() { "–".into() } else { peer.zone.clone() });
        }
        if experts {
            cells.push(match peer.ram_total {
                0 => "–".into(),
                total => format!("{} free of {}", Size(peer.ram_free), Size(total)),
            });
        }
        rows.push(cells);
    }
    render(&rows)
}

fn jobs_text(jobs: &[JobView]) -> String {
    if jobs.is_empty() {
        return "no jobs: start one with `meshnode serve MODEL` or `meshnode submit JOB.toml`\n".into();
    }
    jobs.iter()
        .map(|job| {
            let role = match (&job.replica_of, job.head) {
                (Some(_), _) => "replica, coordinated here".to_owned(),
                (None, true) => "coordinated here".to_owned(),
                (None, false) => format!("coordinated by {}", job.coordinator),
            };
            let figures = match (job.context, job.sequences) {
                (Some(context), Some(sequences)) => {
                    let room = format!("cache for {}", count(sequences as usize, "context"));
                    let used = job.pages.saturating_sub(job.pages_free);
                    let drafts = match (job.draft_tokens_right * 100).checked_div(job.draft_tokens) {
                        Some(share) => format!(", {share} % of {} draft tokens right", job.draft_tokens),
                        None => String::new(),
                    };
                    let of_model = match job.model_draft_tokens {
                        0 => String::new(),
                        tokens => format!(" ({tokens} of the draft model)"),
                    };
                    let percent = |share: f64| (100.0 * share).round();
                    let bubble = match (job.bubble, job.bubble_predicted) {
                        (Some(measured), Some(predicted)) => {
                            format!(", bubble {} % ({} % predicted)", percent(measured), percent(predicted))
                        }
                        _ => String::new(),
                    };
                    let rows = match (&job.boundary, job.row_bytes) {
                        (Some(encoding), Some(bytes)) if job.stages.len() > 1 => {
                            format!(", {encoding} rows of {bytes} bytes")
                        }
                        _ => String::new(),
                    };
                    let pages = job.pages;
                    format!(", context {context}, {room}, {used} of {pages} pages used{rows}{drafts}{of_model}{bubble}")
                }
                _ => String::new(),
            };
            let reason = job.reason.as_ref().map_or_else(String::new, |reason| format!("  {reason}\n"));
            format!(
                "{} {} ({role}{figures}, epoch {}, {} running, {} queued)\n{reason}{}{}{}",
                job.model,
                job.state,
                job.epoch,
                job.running,
                job.queued,
                if job.stages.is_empty() { String::new() } else { stages(&job.stages) },
                standbys(&job.standbys),
                job.moved.as_ref().map_or_else(String::new, moved),
            )
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// The simulations that the node coordinates or takes part in, one per line.
fn simulations_text(simulations: &[SimulationReport]) -> String {
    let mut rows = vec![row(["SIMULATION", "NAME", "STATE", "STEP", "SPEED", "TILES", "ROLE", "COORDINATOR"])];
    for report in simulations {
        rows.push(vec![
            report.job().to_owned(),
            report.name().to_owned(),
            report.state().to_string(),
            progress(report),
            report.run().map_or_else(|| "–".into(), |run| format!("{:.1} M cells/s", run.mlups)),
            report.tiles().to_string(),
            report.role().to_string(),
            report.coordinator().and_then(|node| node.name.clone()).unwrap_or_else(|| "?".into()),
        ]);
    }
    let mut text = if rows.len() == 1 { String::new() } else { format!("\n{}", render(&rows)) };
    for report in simulations {
        if let Some(why) = report.error().or(report.waiting()) {
            let id: String = report.job().chars().take(8).collect();
            let _ = writeln!(text, "{id}: {why}");
        }
    }
    text
}

/// The last migration of a job.
fn moved(moved: &MoveView) -> String {
    format!(
        "moved to this placement for {:.2} ms/token instead of {:.2}: {} of weights moved, {} of them fetched from peers\n",
        moved.change.after_ms,
        moved.change.before_ms,
        Size(moved.change.moved_bytes),
        Size(moved.fetched_bytes)
    )
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_degraded_model_shows_the_reason() {
        let job = JobView {
            model: "tiny".into(),
            state: "degraded".into(),
            head: true,
            epoch: 3,
            queued: 2,
            reason: Some("no plan fits: 12 MiB are missing".into()),
            ..JobView::default()
        };
        let text = jobs_text(&[job]);
        assert!(text.contains("tiny degraded (coordinated here"), "{text}");
        assert!(text.contains("no plan fits: 12 MiB are missing"), "{text}");
    }

    fn peer(name: &str, state: &str, zone: &str) -> PeerView {
        PeerView { name: name.into(), state: state.into(), zone: zone.into(), ..PeerView::default() }
    }

    #[test]
    fn nodes_that_left_are_listed_on_request() {
        let peers = [peer("here", "alive", ""), peer("gone", "left", "")];
        assert!(!peers_text(&peers, false).contains("gone"));
        assert!(peers_text(&peers, true).contains("gone"));
    }

    #[test]
    fn the_zone_column_is_shown_if_a_zone_is_known() {
        let peers = [peer("here", "alive", ""), peer("there", "alive", "")];
        assert!(!peers_text(&peers, false).contains("ZONE"));
        let peers = [peer("here", "alive", "attic"), peer("there", "alive", "")];
        let text = peers_text(&peers, false);
        assert!(text.contains("ZONE") && text.contains("attic"), "{text}");
    }
}
