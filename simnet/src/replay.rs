//! What a node lived through, once more: feeds a recording of `meshnode up --record` to the same code and tells what it
//! decides.
use crate::timeline::Line;
use node_core::Node;
use node_core::input::Input;
use node_core::output::{Event, Output};
use node_core::record::{Entry, Header, Reader, RecordError};
use node_core::time::Instant;

/// What a recording came to.
pub struct Replayed {
    /// With what the node began.
    pub header: Header,
    /// Inputs that it handled.
    pub inputs: u64,
    /// Outputs that it made.
    pub outputs: u64,
    /// From the first to the last input, nanoseconds.
    pub lasted_ns: u64,
    /// Hash of all outputs, in order: two programs that decide alike have the same.
    pub hash: String,
    /// Inputs and outputs worth telling, since the first input.
    pub timeline: Vec<Line>,
    /// Why it ends early, if it does: everything before was replayed.
    pub cut: Option<RecordError>,
}

/// Runs it.
pub fn replay(bytes: &[u8]) -> Result<Replayed, RecordError> {
    let (header, reader) = Reader::open(bytes)?;
    let mut node = Node::new(header.config.clone(), header.seed);
    let mut replayed =
        Replayed { header, inputs: 0, outputs: 0, lasted_ns: 0, hash: String::new(), timeline: Vec::new(), cut: None };
    let mut digest = Digest::default();
    let (mut first, mut now) = (None, Instant(0));
    for entry in reader {
        match entry {
            Ok(Entry::Input { at, input }) => {
                now = now.max(at);
                let began = *first.get_or_insert(now);
                replayed.inputs += 1;
                replayed.lasted_ns = now.0 - began.0;
                replayed.tell(worth_input(&input));
                node.handle(at, input);
            }
            Ok(Entry::Polled) => {
                while let Some(output) = node.poll() {
                    replayed.outputs += 1;
                    digest.add(&output);
                    replayed.tell(worth_output(&output));
                }
            }
            Err(error) => replayed.cut = Some(error),
        }
    }
    replayed.hash = digest.hash();
    Ok(replayed)
}

impl Replayed {
    fn tell(&mut self, what: Option<String>) {
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
    /// One more.
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

/// Inputs that people follow; the rest is chatter.
fn worth_input(input: &Input) -> Option<String> {
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
        | Input::Computed { .. }
        | Input::PeerFound { .. }
        | Input::Planned { .. }
        | Input::Challenged { .. }
        | Input::Grid(_)
        | Input::Persisted { .. } => None,
        Input::Deploy { call, model, .. } => Some(format!("> deploy {} (call {})", model.name, call.0)),
        Input::Submit { call, request, .. } => Some(format!("> request {} of {} tokens", call.0, request.prompt.len())),
        Input::Connected { .. }
        | Input::Disconnected { .. }
        | Input::Leave
        | Input::Banned(_)
        | Input::Drain(_)
        | Input::Cancel { .. }
        | Input::Undeploy { .. }
        | Input::Loaded { .. }
        | Input::Fetched { .. }
        | Input::PersistFailed { .. } => Some(format!("> {input:?}")),
    }
}

fn worth_output(output: &Output) -> Option<String> {
    match output {
        Output::SendDatagram { .. }
        | Output::SendMessage { .. }
        | Output::SendFrame { .. }
        | Output::Sign { .. }
        | Output::Verify { .. }
        | Output::Plan { .. }
        | Output::Compute { .. }
        | Output::Challenge { .. }
        | Output::Grid(_)
        | Output::Release { .. }
        | Output::Discard { .. }
        | Output::Persist { .. } => None,
        Output::Connect { node, .. } => Some(format!("< connect to {node}")),
        Output::Disconnect { node } => Some(format!("< disconnect from {node}")),
        Output::Load { epoch, stage, .. } => Some(format!("< load layers {:?}, epoch {}", stage.layers, epoch.counter)),
        Output::Keep { epoch, stage, .. } => Some(format!("< keep layers {:?}, epoch {}", stage.layers, epoch.counter)),
        Output::Fetch { epoch, stage, .. } => {
            Some(format!("< fetch layers {:?}, epoch {}", stage.layers, epoch.counter))
        }
        Output::Unload { job } => Some(format!("< unload the stage of job {:x}", job.0)),
        Output::Notify(Event::Token { .. }) => None,
        Output::Notify(Event::JobPlaced { epoch, plan, .. }) => {
            let stages = plan.stages().iter();
            let stages =
                stages.map(|stage| format!("{} {:?}", node_core::id::NodeId::from(stage.device), stage.layers));
            Some(format!("< placed epoch {}: {}", epoch.counter, stages.collect::<Vec<_>>().join(", ")))
        }
        Output::Notify(event) => Some(format!("< {event:?}")),
    }
}

/// A timeline longer than this is read by nobody.
const LINES_MAX: usize = 100_000;
