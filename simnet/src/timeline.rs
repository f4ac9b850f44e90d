//! The human-readable timeline of a run: one line per event, in virtual time.
use crate::faults::Fault;
use crate::host::HostId;
use crate::workload::{Call, Workload};
use crate::world::{Observer, World};
use node_core::codec;
use node_core::id::{CallId, NodeId};
use node_core::message::{FrameHeader, FromTile, Message, ToCoordinator, ToParticipant};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use node_core::work::DownReason;
use node_core::work::serve::DoneReason;
use node_core::work::steps::StepsEvent;
use node_core::work::{Ending, Placement};
use partitioner::explain::{bytes, layers};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Line {
    /// Virtual microseconds since the model was first served; negative before.
    pub at_us: i64,
    /// The host that reported it, if one did.
    pub host: Option<u32>,
    /// The text.
    pub what: String,
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = self.host.map_or(String::new(), |host| format!("host {host}"));
        write!(f, "{:>11.1} ms  {host:<8}  {}", self.at_us as f64 / 1000.0, self.what)
    }
}

/// Collects events for the timeline. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Timeline {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    events: Vec<(Instant, Option<HostId>, What)>,
    /// Members that a node reported down and none reported up since: only the first report counts.
    down: BTreeSet<NodeId>,
    /// Also log control messages and frames.
    messages: bool,
}

enum What {
    Fault(Fault),
    Died,
    Event(Box<Event>),
    Message(NodeId, String),
    Note(String),
}

impl Timeline {
    /// Also logs every control message of jobs and every frame when it is sent, and every membership change that a node
    /// reports.
    pub fn with_messages() -> Self {
        let timeline = Timeline::default();
        timeline.seen.borrow_mut().messages = true;
        timeline
    }

    /// Adds a line that belongs to no host.
    pub fn note(&self, at: Instant, what: String) {
        self.seen.borrow_mut().events.push((at, None, What::Note(what)));
    }

    /// All lines in order of time, with the pauses that callers saw.
    pub fn lines(&self, world: &World, workloads: &[&Workload], origin: Instant) -> Vec<Line> {
        let at_us = |at: Instant| (at.0 as i64 - origin.0 as i64) / 1000;
        let seen = self.seen.borrow();
        let mut lines: Vec<Line> = seen
            .events
            .iter()
            .filter_map(|(at, host, what)| {
                let what = match what {
                    What::Fault(Fault::Mend) => "** all faults healed".into(),
                    What::Fault(fault) => format!("** {fault}"),
                    What::Died => "its process has died".into(),
                    What::Note(note) => note.clone(),
                    What::Event(event) => describe(event, &|node| host_name(world, node), &name)?,
                    What::Message(to, text) => {
                        let to = world.host_of(*to).map_or_else(|| to.to_string(), |host| host.0.to_string());
                        format!("  -> {to}: {text}")
                    }
                };
                Some(Line { at_us: at_us(*at), host: host.map(|host| host.0), what })
            })
            .collect();
        for (id, call) in workloads.iter().flat_map(|workload| &workload.calls) {
            let pauses = pauses(call).filter(|(_, _, pause)| *pause >= PAUSE_TOLD);
            lines.extend(pauses.map(|(at, position, pause)| Line {
                at_us: at_us(at),
                host: None,
                what: format!("call {} continues at position {position} after {} ms", name(*id), pause.as_millis()),
            }));
        }
        lines.sort_by_key(|line| line.at_us);
        lines
    }
}

impl Observer for Timeline {
    fn output(&mut self, at: Instant, host: HostId, output: &Output) {
        let mut seen = self.seen.borrow_mut();
        if seen.messages
            && let Some((to, text)) = message(output)
        {
            seen.events.push((at, Some(host), What::Message(to, text)));
        }
        let Output::Notify(event) = output else { return };
        let worth = match event {
            Event::PeerUp { node } => seen.down.remove(node) || seen.messages,
            Event::PeerDown { node, .. } => seen.down.insert(*node) || seen.messages,
            Event::Token { .. } => false,
            Event::Begun { cached, .. } => *cached > 0 && seen.messages,
            Event::Steps { event, .. } => !matches!(event, StepsEvent::Progress { .. } | StepsEvent::Report { .. }),
            Event::PlanReady { .. }
            | Event::Fleet { .. }
            | Event::GridPlan { .. }
            | Event::JobPlaced { .. }
            | Event::JobReady { .. }
            | Event::JobDegraded { .. }
            | Event::JobEnded { .. }
            | Event::Done { .. }
            | Event::Preempted { .. }
            | Event::Lost { .. }
            | Event::Standby { .. }
            | Event::Promoted { .. }
            | Event::JobMoves { .. }
            | Event::JobInherited { .. }
            | Event::Measured { .. }
            | Event::Rejected { .. } => true,
        };
        if worth && seen.events.len() < EVENTS_MAX {
            seen.events.push((at, Some(host), What::Event(Box::new(event.clone()))));
        }
    }

    fn fault(&mut self, at: Instant, fault: &Fault) {
        self.seen.borrow_mut().events.push((at, None, What::Fault(fault.clone())));
    }

    fn died(&mut self, at: Instant, host: HostId) {
        self.seen.borrow_mut().events.push((at, Some(host), What::Died));
    }
}

/// A short text of a message or frame of a job.
#[expect(clippy::wildcard_enum_match_arm, reason = "all but a few are printed as they are")]
fn message(output: &Output) -> Option<(NodeId, String)> {
    if let Output::SendFrame { to, header, .. } = output {
        let FrameHeader { epoch, part, channel, cursor, count, last, continues, drafts, .. } = header;
        let what = match (last, drafts.rows) {
            (false, _) => String::from("chunk"),
            (true, 0) => String::from("sample"),
            (true, rows) => format!("{rows} drafts"),
        };
        let after = continues.map_or_else(String::new, |from| format!(" after those of {from}"));
        let text = format!("frame e{} part {part} channel {channel} {cursor}+{count} {what}{after}", epoch.counter);
        return Some((*to, text));
    }
    let Output::SendMessage { to, bytes } = output else { return None };
    match codec::decode_message(bytes).ok()? {
        Message::PushPull { .. }
        | Message::ToParticipant { say: ToParticipant::Held { again: false, .. }, .. }
        | Message::ToCoordinator {
            say: ToCoordinator::Held { .. } | ToCoordinator::Tile(FromTile::Progress { .. }),
            ..
        } => None,
        Message::ToParticipant { epoch, say: ToParticipant::Prepare(order), .. } => {
            let role = if order.standby.is_some() { "standby of" } else { "owner of" };
            Some((*to, format!("Prepare e{} {role} part {}", epoch.counter, order.part)))
        }
        other => Some((*to, format!("{other:?}").chars().take(MESSAGE_CHARS).collect())),
    }
}

/// Waits between two tokens of a call: time and position of the second token, and the length of the wait.
pub fn pauses(call: &Call) -> impl Iterator<Item = (Instant, u32, Duration)> + '_ {
    call.tokens.windows(2).map(|pair| (pair[1].0, pair[1].1, pair[1].0.since(pair[0].0)))
}

/// The number of a call in messages, from 1.
pub fn name(call: CallId) -> u64 {
    call.0.saturating_sub(crate::workload::DEPLOY)
}

fn host_name(world: &World, node: NodeId) -> String {
    world.host_of(node).map_or_else(|| node.to_string(), |host| format!("host {}", host.0))
}

/// The text of an event, with nodes and calls named by `host` and `name`; `None` if it is not worth a line.
pub(crate) fn describe(event: &Event, host: &dyn Fn(NodeId) -> String, name: &dyn Fn(CallId) -> u64) -> Option<String> {
    Some(match event {
        Event::PeerUp { node } => format!("sees {} again", host(*node)),
        Event::PeerDown { node, reason: DownReason::Left } => format!("{} has left", host(*node)),
        Event::PeerDown { node, reason: DownReason::Failed } => format!("reports {} down", host(*node)),
        Event::JobPlaced { epoch, placement, .. } => match &**placement {
            Placement::Stages(stages) => {
                let stages = stages.iter().map(|(device, of)| {
                    let at = if device.index > 0 { format!("/{}", device.index) } else { String::new() };
                    format!("{}{at} {}", host((*device).into()), layers(of))
                });
                format!("places epoch {}: {}", epoch.counter, stages.collect::<Vec<_>>().join(", "))
            }
            Placement::Tiles { tiles, depth, step } => {
                let tiles: Vec<String> = tiles.iter().map(|(node, _)| host(*node)).collect();
                format!(
                    "places the tiles of epoch {} from step {step}, halo depth {depth}: {}",
                    epoch.counter,
                    tiles.join(", ")
                )
            }
        },
        Event::JobInherited { from, .. } => format!("takes over the job from {}", host(*from)),
        Event::JobReady { epoch, .. } => format!("epoch {} is ready", epoch.counter),
        Event::JobDegraded { reason, .. } => format!("cannot run now: {reason}"),
        Event::JobEnded { ending, .. } => match ending {
            Ending::Completed => "the job is complete".into(),
            Ending::Cancelled => "the job was ended".into(),
            Ending::Moved(reason) => format!("hands the job over to another node: {reason}"),
            Ending::Failed(reason) => format!("the job failed: {reason}"),
        },
        Event::Lost { node, silent_ms, .. } => format!("lost {}, silent for {silent_ms} ms", host(*node)),
        Event::Standby { part, node, current, .. } => {
            let does = if *current { "is current as" } else { "is not current as" };
            format!("{} {does} standby of part {part}", host(*node))
        }
        Event::Promoted { epoch, part, node, .. } => {
            format!("promotes {} to part {part} under epoch {}", host(*node), epoch.counter)
        }
        Event::JobMoves { change, .. } => format!(
            "moves the job: {} of weights to transfer, {:.2} ms per token or step before, {:.2} ms after",
            bytes(change.bytes),
            change.before_ns as f64 / 1e6,
            change.after_ns as f64 / 1e6
        ),
        Event::Measured { node, percent } => format!("{} takes {percent} % of its advertised time", host(*node)),
        Event::Done { call, reason } => match reason {
            DoneReason::Stop | DoneReason::Length => format!("call {} is done", name(*call)),
            DoneReason::Cancelled => format!("call {} was cancelled", name(*call)),
            DoneReason::Busy => format!("call {} is rejected: busy", name(*call)),
            DoneReason::Invalid(reason) => format!("call {} is rejected: {reason}", name(*call)),
            DoneReason::Failed(reason) => format!("call {} failed: {reason}", name(*call)),
        },
        Event::Rejected { from, what } => match from {
            Some(from) => format!("rejected, from {}: {what}", host(*from)),
            None => format!("rejected: {what}"),
        },
        Event::Steps { job, event } => format!("simulation {:04x}: {}", job.0 >> 48, describe_steps(event)),
        Event::Preempted { request, .. } => format!("request {} gives up its pages", request.0),
        Event::Begun { call, cached } => {
            format!("call {} begins, {cached} tokens of its prompt are cached", name(*call))
        }
        Event::PlanReady { .. } | Event::Fleet { .. } | Event::GridPlan { .. } | Event::Token { .. } => return None,
    })
}

fn describe_steps(event: &StepsEvent) -> String {
    match event {
        StepsEvent::Runs { step } => format!("runs from step {step}"),
        StepsEvent::Progress { step } => format!("all tiles completed step {step}"),
        StepsEvent::Report { step, .. } => format!("reports the sums of step {step}"),
        StepsEvent::Checkpoint { step } => format!("has a checkpoint of step {step} on disk"),
        StepsEvent::Waiting { reason } => format!("waits: {reason}"),
    }
}

/// Longest text of a message.
const MESSAGE_CHARS: usize = 200;
/// Shorter pauses get no line.
const PAUSE_TOLD: Duration = Duration::from_millis(250);
/// Bounds the number of events.
const EVENTS_MAX: usize = 20_000;
