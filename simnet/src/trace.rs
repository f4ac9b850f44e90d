//! The trace hash of a run: a rolling hash over all inputs of all hosts and all faults, in order.
use crate::faults::Fault;
use crate::host::HostId;
use node_core::input::Input;
use node_core::time::Instant;

/// A rolling hash. Equal hashes mean the same inputs at the same times.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    hasher: blake3::Hasher,
    events: u64,
}

impl Trace {
    /// Adds an input of a host.
    pub fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        self.header(at, host, kind(input));
        match input {
            Input::Datagram { from, bytes, .. } | Input::Message { from, bytes } => {
                self.hasher.update(&from.0);
                self.hasher.update(bytes);
            }
            Input::PeerFound { node, .. } | Input::Disconnected { node } => {
                self.hasher.update(&node.0);
            }
            Input::Connected { node, rtt_ns } => {
                self.hasher.update(&node.0);
                self.hasher.update(&rtt_ns.to_le_bytes());
            }
            Input::Frame { from, header, tensor } => {
                self.hasher.update(&from.0);
                self.numbers(&[header.job.0, u64::from(header.part.0), header.channel, u64::from(header.cursor)]);
                self.numbers(&[u64::from(header.epoch.counter), u64::from(header.count)]);
                self.hasher.update(format!("{tensor:?}").as_bytes());
            }
            Input::Ran { work, result, .. } => {
                self.numbers(&[work.0]);
                self.hasher.update(format!("{result:?}").as_bytes());
            }
            Input::Signed { token, .. } | Input::Verified { token, .. } => self.numbers(&[*token]),
            Input::Planned { asked, .. } => {
                self.hasher.update(format!("{asked:?}").as_bytes());
            }
            Input::Loaded { job, part, load, result } => {
                self.numbers(&[job.0, part.0.into(), load.0, u64::from(result.is_ok())]);
            }
            Input::Fetched { job, epoch, result, .. } | Input::Challenged { job, epoch, result, .. } => {
                self.numbers(&[job.0, epoch.counter.into(), result.as_ref().map_or(u64::MAX, |bytes| *bytes)]);
            }
            Input::Start { call, .. }
            | Input::Plan { call, .. }
            | Input::Submit { call, .. }
            | Input::Ask { call, .. }
            | Input::Cancel { call }
            | Input::Survey { call, .. } => {
                self.numbers(&[call.0]);
            }
            Input::End { job } => self.numbers(&[job.0]),
            Input::LinkMeasured { node, rtt_ns, bytes_per_second } => {
                self.hasher.update(&node.0);
                self.numbers(&[*rtt_ns, *bytes_per_second]);
            }
            Input::Halos { .. } | Input::Collected { .. } | Input::CheckpointKept { .. } | Input::Mirrored { .. } => {
                self.hasher.update(format!("{input:?}").as_bytes());
            }
            Input::Banned(nodes) => {
                for node in nodes {
                    self.hasher.update(&node.0);
                }
            }
            Input::Wakeup | Input::CapacityChanged(_) | Input::Holdings(_) | Input::Leave | Input::Drain(_) => {}
        }
    }

    /// Adds a fault.
    pub fn fault(&mut self, at: Instant, fault: &Fault) {
        self.events += 1;
        self.numbers(&[at.0]);
        self.hasher.update(format!("{fault:?}").as_bytes());
    }

    /// The hash so far.
    pub fn hash(&self) -> String {
        self.hasher.finalize().to_hex()[..16].to_string()
    }

    /// Number of events so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    fn header(&mut self, at: Instant, host: HostId, kind: u8) {
        self.events += 1;
        let mut header = [0; 13];
        header[..8].copy_from_slice(&at.0.to_le_bytes());
        header[8..12].copy_from_slice(&host.0.to_le_bytes());
        header[12] = kind;
        self.hasher.update(&header);
    }

    fn numbers(&mut self, numbers: &[u64]) {
        for number in numbers {
            self.hasher.update(&number.to_le_bytes());
        }
    }
}

fn kind(input: &Input) -> u8 {
    match input {
        Input::Wakeup => 0,
        Input::PeerFound { .. } => 1,
        Input::Datagram { .. } => 2,
        Input::Connected { .. } => 3,
        Input::Disconnected { .. } => 4,
        Input::Message { .. } => 5,
        Input::Signed { .. } => 6,
        Input::Verified { .. } => 7,
        Input::LinkMeasured { .. } => 8,
        Input::CapacityChanged(_) => 9,
        Input::Holdings(_) => 10,
        Input::Leave => 11,
        Input::Drain(_) => 12,
        Input::Start { .. } => 13,
        Input::Planned { .. } => 14,
        Input::Submit { .. } => 15,
        Input::Ask { .. } => 30,
        Input::Cancel { .. } => 16,
        Input::End { .. } => 17,
        Input::Loaded { .. } => 18,
        Input::Frame { .. } => 19,
        Input::Ran { .. } => 20,
        Input::Banned(_) => 21,
        Input::Fetched { .. } => 22,
        Input::Challenged { .. } => 23,
        Input::Halos { .. } => 24,
        Input::Survey { .. } => 25,
        Input::Plan { .. } => 26,
        Input::Collected { .. } => 27,
        Input::CheckpointKept { .. } => 28,
        Input::Mirrored { .. } => 29,
    }
}
