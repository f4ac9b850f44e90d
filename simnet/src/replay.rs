//! Replays a recording of `meshnode up --record` through the node core, and prints what the node decides.
use crate::timeline::{Line, describe};
use node_core::Node;
use node_core::id::{Epoch, NodeId};
use node_core::input::Input;
use node_core::output::Output;
use node_core::record::{DriverCall, Header, Reader, RecordError};
use node_core::time::Instant;
use node_core::work::{JobSpec, Order, PartWork};
use partitioner::explain::{bytes, layers};

/// The result of a replay.
pub struct Replayed {
    /// The header of the recording.
    pub header: Header,
    /// Number of inputs.
    pub inputs: u64,
    /// Number of outputs.
    pub outputs: u64,
    /// From the first to the last input, nanoseconds.
    pub lasted_ns: u64,
    /// Hash of all outputs, in order: equal for programs that decide alike.
    pub hash: String,
    /// Relevant inputs and outputs, timed from the first input.
    pub timeline: Vec<Line>,
    /// Why the recording ends early, if it does: everything before that was replayed.
    pub cut: Option<RecordError>,
}

/// Replays a recording.
pub fn replay(bytes: &[u8]) -> Result<Replayed, RecordError> {
    let (header, reader) = Reader::open(bytes)?;
    let mut node = Node::new(header.config.clone(), header.seed);
    let mut replayed =
        Replayed { header, inputs: 0, outputs: 0, lasted_ns: 0, hash: String::new(), timeline: Vec::new(), cut: None };
    let mut digest = Digest::default();
    let (mut first, mut now) = (None, Instant(0));
    for entry in reader {
        match entry {
            Ok(DriverCall::Input { at, input }) => {
                now = now.max(at);
                let began = *first.get_or_insert(now);
                replayed.inputs += 1;
                replayed.lasted_ns = now.0 - began.0;
                replayed.log(worth_input(&input, &|id| name(&node, id)));
                node.handle(at, input);
            }
            Ok(DriverCall::Polled) => {
                while let Some(output) = node.poll() {
                    replayed.outputs += 1;
                    digest.add(&output);
                    replayed.log(worth_output(&output, &|id| name(&node, id)));
                }
            }
            Err(error) => replayed.cut = Some(error),
        }
    }
    replayed.hash = digest.hash();
    Ok(replayed)
}

impl Replayed {
    fn log(&mut self, what: Option<String>) {
        if let Some(what) = what
            && self.timeline.len() < LINES_MAX
        {
            self.timeline.push(Line { at_us: (self.lasted_ns / 1000) as i64, host: None, what });
        }
    }
}

/// A hash over outputs.
#[derive(Clone, Default)]
pub struct Digest {
    hasher: blake3::Hasher,
}

impl Digest {
    /// Adds an output.
    pub fn add(&mut self, output: &Output) {
        let text = format!("{output:?}");
        self.hasher.update(&(text.len() as u64).to_le_bytes());
        self.hasher.update(text.as_bytes());
    }

    /// The hash so far.
    pub fn hash(&self) -> String {
        self.hasher.finalize().to_hex()[..16].to_string()
    }
}

/// A line for an input of interest; `None` for routine traffic.
fn worth_input(input: &Input, name: &dyn Fn(NodeId) -> String) -> Option<String> {
    match input {
        Input::Wakeup
        | Input::Datagram { .. }
        | Input::Message { .. }
        | Input::Signed { .. }
        | Input::Verified { .. }
        | Input::LinkMeasured { .. }
        | Input::CapacityChanged(_)
        | Input::Holdings(_)
        | Input::Frame { .. }
        | Input::Ran { .. }
        | Input::Halos { .. }
        | Input::Collected { .. }
        | Input::CheckpointKept { .. }
        | Input::Mirrored { .. }
        | Input::Plan { .. }
        | Input::PeerFound { .. }
        | Input::Planned { .. }
        | Input::Survey { .. }
        | Input::Challenged { .. } => None,
        Input::Start { call, job } => {
            let name = match &**job {
                JobSpec::Serve(model) => &model.name,
                JobSpec::Steps(grid) => &grid.name,
            };
            Some(format!("> start {name} (call {})", call.0))
        }
        Input::Submit { call, request, .. } | Input::Ask { call, request, .. } => {
            Some(format!("> request {} of {} tokens", call.0, request.prompt.len()))
        }
        Input::Connected { node, rtt_ns } => {
            Some(format!("> connected to {}, round trip {:.2} ms", name(*node), *rtt_ns as f64 / 1e6))
        }
        Input::Disconnected { node } => Some(format!("> disconnected from {}", name(*node))),
        Input::Leave => Some("> leave".into()),
        Input::Banned(nodes) => {
            let nodes: Vec<String> = nodes.iter().map(|node| name(*node)).collect();
            Some(format!("> banned: {}", if nodes.is_empty() { "none".into() } else { nodes.join(", ") }))
        }
        Input::Drain(draining) => Some(format!("> drain {}", if *draining { "on" } else { "off" })),
        Input::Cancel { call } => Some(format!("> cancel call {}", call.0)),
        Input::End { job } => Some(format!("> end job {:016x}", job.0)),
        Input::Loaded { job, result: Ok(loaded), .. } => {
            Some(format!("> loaded a part of job {:016x}, {}", job.0, bytes(loaded.bytes)))
        }
        Input::Loaded { job, result: Err(reason), .. } => {
            Some(format!("> could not load a part of job {:016x}: {reason}", job.0))
        }
        Input::Fetched { job, result: Ok(fetched), .. } => {
            Some(format!("> fetched {} of weights for job {:016x}", bytes(*fetched), job.0))
        }
        Input::Fetched { job, result: Err(reason), .. } => {
            Some(format!("> could not fetch weights for job {:016x}: {reason}", job.0))
        }
    }
}

fn worth_output(output: &Output, name: &dyn Fn(NodeId) -> String) -> Option<String> {
    match output {
        Output::SendDatagram { .. }
        | Output::SendMessage { .. }
        | Output::SendFrame { .. }
        | Output::Sign { .. }
        | Output::Verify { .. }
        | Output::Plan { .. }
        | Output::Run(_)
        | Output::Share { .. }
        | Output::Collect { .. }
        | Output::Forget { .. }
        | Output::KeepCheckpoint { .. }
        | Output::Mirror { .. }
        | Output::Restore { .. }
        | Output::Challenge { .. }
        | Output::Release { .. }
        | Output::Fork { .. }
        | Output::Discard { .. }
        | Output::Split { .. }
        | Output::Remember { .. } => None,
        Output::Connect { node, .. } => Some(format!("< connect to {}", name(*node))),
        Output::Disconnect { node } => Some(format!("< disconnect from {}", name(*node))),
        Output::Load { epoch, order, .. } => Some(about("load", order, *epoch)),
        Output::Continue { epoch, order, .. } => Some(about("keep", order, *epoch)),
        Output::Fetch { epoch, order, .. } => Some(about("fetch", order, *epoch)),
        Output::Drop { job, part } => Some(format!("< drop part {part} of job {:016x}", job.0)),
        Output::Unload { job } => Some(format!("< unload job {:016x}", job.0)),
        Output::Notify(event) => describe(event, name, &|call| call.0).map(|text| format!("< {text}")),
    }
}

fn about(what: &str, order: &Order, epoch: Epoch) -> String {
    let (name, epoch) = (&order.name, epoch.counter);
    match &order.work {
        PartWork::Stage(stage) => {
            format!("< {what} layers {} of {name}, epoch {epoch}", layers(&stage.layers_of(order.part)))
        }
        PartWork::Tile(_) => format!("< {what} tile {} of {name}, epoch {epoch}", order.part),
    }
}

/// The name of a member; its id, if its advert has not arrived.
fn name(node: &Node, id: NodeId) -> String {
    let own = node.membership().own();
    let advert = node.members().find(|member| member.node == id).and_then(|member| member.advert);
    advert.or((own.node == id).then_some(own)).map_or_else(|| id.to_string(), |advert| advert.name.clone())
}

/// Bounds the timeline.
const LINES_MAX: usize = 100_000;
