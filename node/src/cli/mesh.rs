//! Commands that ask a running node about its mesh or tell it something: thin clients of `/api/v1`.
use super::plan::{stages, standbys};
use super::table::{render, row};
use super::{Failure, Global, answer, remark, say};
use crate::config::{Size, parse_duration};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode invite                       one machine, within an hour
  meshnode invite --ttl 1d --uses 20    a room full
  ssh other meshnode join $(meshnode invite)")]
pub(super) struct InviteArgs {
    /// How long the ticket is good for: 90s, 15m, 1h, 7d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    ttl: Duration,
    /// How many machines may join with it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    uses: u32,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  meshnode status        shows who waits
  meshnode approve 12D3KooWQ…")]
pub(super) struct ApproveArgs {
    /// PeerId of a peer that waits, or the beginning of it
    peer: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode peers                  shows names and ids
  meshnode ban old-laptop         by its name, if only one member has it
  meshnode ban 12D3KooWQ…         by its PeerId

The ban reaches all members within a second, those that are away when they come back. The key of the mesh is changed, and
the banned are not told the new one. Whoever joined by a ticket of the banned member is out with it: invite them again.
There is no way back for the banned key; its machine can join anew with a ticket and a fresh --data-dir. Of two members
that ban each other the first one's word holds, and the founder's before all others'.")]
pub(super) struct BanArgs {
    /// Name, id or PeerId of a member; PeerId of one that is away
    peer: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode drain          before an update: what runs goes on, new work goes elsewhere
  meshnode drain --off    takes work again

`meshnode jobs` shows what still runs; when it is empty of running requests, `meshnode leave`.")]
pub(super) struct DrainArgs {
    /// Take new work again
    #[arg(long)]
    off: bool,
}

pub(super) fn drain(global: &Global, args: &DrainArgs) -> Result<(), Failure> {
    let value = global.client().post("/api/v1/drain", &json!({"on": !args.off}))?;
    let text = if args.off { "the node takes work again" } else { "the node takes no new work; what runs goes on" };
    answer(global, &value, |_| text.into());
    Ok(())
}

pub(super) fn leave(global: &Global) -> Result<(), Failure> {
    let value = global.client().post("/api/v1/leave", &json!({}))?;
    answer(global, &value, |_| "the node says goodbye and ends".into());
    Ok(())
}

pub(super) fn invite(global: &Global, args: &InviteArgs) -> Result<(), Failure> {
    let body = json!({"ttl_s": args.ttl.as_secs(), "uses": args.uses});
    let value = global.client().post("/api/v1/invite", &body)?;
    if !global.json {
        remark("on the other machine: meshnode join TICKET, with this ticket:");
    }
    answer(global, &value, |v| v["ticket"].as_str().unwrap_or_default().to_owned());
    Ok(())
}

pub(super) fn approve(global: &Global, args: &ApproveArgs) -> Result<(), Failure> {
    let value = global.client().post("/api/v1/approve", &json!({"peer": args.peer}))?;
    answer(global, &value, |_| format!("{} may join", args.peer));
    Ok(())
}

pub(super) fn ban(global: &Global, args: &BanArgs) -> Result<(), Failure> {
    let value = global.client().post("/api/v1/ban", &json!({"peer": args.peer}))?;
    answer(global, &value, |v| {
        let mut text = format!("{} is banned, and the key of the mesh is changed", string(&v["banned"]));
        for guest in list(&v["with_it"]) {
            let _ = write!(text, "\nout with it, because it was invited by it: {}", string(guest));
        }
        text
    });
    Ok(())
}

pub(super) fn status(global: &Global) -> Result<(), Failure> {
    let state = global.client().get("/api/v1/state")?;
    answer(global, &state, status_text);
    let degraded = list(&state["jobs"]).any(|j| j["state"] == "degraded");
    if degraded { Err(Failure::failed("a job is degraded: see `meshnode jobs`")) } else { Ok(()) }
}

pub(super) fn peers(global: &Global) -> Result<(), Failure> {
    let peers = global.client().get("/api/v1/peers")?;
    answer(global, &peers, peers_text);
    Ok(())
}

pub(super) fn jobs(global: &Global) -> Result<(), Failure> {
    let client = global.client();
    let (jobs, simulations) = (client.get("/api/v1/jobs")?, client.get("/api/v1/grids")?);
    if global.json {
        let all: Vec<&Value> = list(&jobs).chain(list(&simulations)).collect();
        say(serde_json::json!(all));
        return Ok(());
    }
    let models = if list(&simulations).next().is_some() && list(&jobs).next().is_none() { None } else { Some(&jobs) };
    let text = models.map_or_else(String::new, jobs_text) + &simulations_text(&simulations);
    say(text.trim_end());
    Ok(())
}

fn status_text(state: &Value) -> String {
    let cache = |of: &str| Size(state["weights"][of].as_u64().unwrap_or(0));
    let mut text = render(&[
        row(["node", string(&state["name"])]),
        row(["id", string(&state["node"])]),
        row(["peer id", string(&state["peer_id"])]),
        row(["mesh", string(&state["mesh"])]),
        vec!["weights cache".to_owned(), format!("{} of {}", cache("cache_used"), cache("cache_limit"))],
    ]);
    let _ = write!(text, "\n{}", peers_text(&state["peers"]));
    if list(&state["jobs"]).next().is_some() {
        let _ = write!(text, "\n{}", jobs_text(&state["jobs"]));
    }
    let bytes = |value: &Value| Size(value.as_u64().unwrap_or(0));
    for transfer in list(&state["weights"]["transfers"]) {
        let _ = writeln!(
            text,
            "\nfetching {} layers {}..{}: {} of {} from {} peers",
            string(&transfer["model"]),
            transfer["first_layer"],
            transfer["end_layer"],
            bytes(&transfer["bytes_done"]),
            bytes(&transfer["bytes_total"]),
            transfer["peers"]
        );
    }
    if let Some(advice) = state["membership_ends"].as_u64().and_then(crate::renewal::advice) {
        let _ = writeln!(text, "\n{advice}");
    }
    for peer in list(&state["waiting"]) {
        let _ = writeln!(text, "\nwaits to be let in: meshnode approve {}", string(peer));
    }
    text
}

fn peers_text(peers: &Value) -> String {
    let mut rows = vec![row(["NAME", "STATE", "DEVICE", "FREE", "OF", "RTT", "LINK", "NODE"])];
    for peer in list(peers) {
        let mut state = string(&peer["state"]).to_owned();
        if peer["draining"] == true {
            state.push_str(", draining");
        }
        let rtt = match (peer["this_node"] == true, peer["rtt_ms"].as_f64()) {
            (true, _) => "this node".into(),
            (false, Some(millis)) => format!("{millis:.2} ms"),
            (false, None) => "–".into(),
        };
        rows.push(vec![
            string(&peer["name"]).to_owned(),
            state,
            string(&peer["device"]).to_owned(),
            Size(peer["memory_free"].as_u64().unwrap_or(0)).to_string(),
            Size(peer["memory_total"].as_u64().unwrap_or(0)).to_string(),
            rtt,
            peer["link_bytes_per_second"].as_u64().map_or_else(|| "–".into(), |bytes| format!("{}/s", Size(bytes))),
            string(&peer["node"]).chars().take(12).collect(),
        ]);
    }
    render(&rows)
}

fn jobs_text(jobs: &Value) -> String {
    if list(jobs).next().is_none() {
        return "no jobs: start one with `meshnode serve MODEL` or `meshnode submit JOB.toml`\n".into();
    }
    list(jobs)
        .map(|job| {
            let role = if job["head"] == true { "headed here" } else { "headed elsewhere" };
            format!(
                "{} {} ({role}, epoch {}, {} running, {} queued)\n{}{}{}",
                string(&job["model"]),
                string(&job["state"]),
                job["epoch"],
                job["running"],
                job["queued"],
                stages(&job["stages"]),
                standbys(&job["standbys"]),
                moved(&job["moved"]),
            )
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// Simulations submitted to the node, one a line.
fn simulations_text(simulations: &Value) -> String {
    let mut rows = vec![row(["SIMULATION", "NAME", "STATE", "STEP", "SPEED", "TILES"])];
    for job in list(simulations) {
        rows.push(vec![
            string(&job["job"]).to_owned(),
            string(&job["name"]).to_owned(),
            string(&job["state"]).to_owned(),
            format!("{} of {}", job["step"], job["steps"]),
            format!("{:.1} M cells/s", job["mlups"].as_f64().unwrap_or(0.0)),
            list(&job["tiles"]).count().to_string(),
        ]);
    }
    let mut text = if rows.len() == 1 { String::new() } else { format!("\n{}", render(&rows)) };
    for job in list(simulations) {
        if let Some(why) = job["error"].as_str().or(job["waiting"].as_str()) {
            let id: String = string(&job["job"]).chars().take(8).collect();
            let _ = writeln!(text, "{id}: {why}");
        }
    }
    text
}

/// The last move of a job.
fn moved(moved: &Value) -> String {
    let ms = |name: &str| moved[name].as_f64().unwrap_or(0.0);
    let bytes = |name: &str| Size(moved[name].as_u64().unwrap_or(0));
    if moved.is_null() {
        return String::new();
    }
    format!(
        "moved here for {:.2} ms a token instead of {:.2}: {} of weights, {} of them from peers\n",
        ms("after_ms"),
        ms("before_ms"),
        bytes("moved_bytes"),
        bytes("fetched_bytes")
    )
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}
