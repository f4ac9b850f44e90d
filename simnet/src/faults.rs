//! What goes wrong and when: a schedule is data, so that it can be printed, replayed and made smaller.
use crate::host::HostId;
use node_core::time::{Duration, Instant};

/// One thing that goes wrong, or right again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process dies without a word. Peers notice by silence only.
    Crash(HostId),
    /// It starts again, with or without its disk.
    Restart {
        /// Which host.
        host: HostId,
        /// Synced records are still there.
        keep_disk: bool,
    },
    /// Everything on the host stops for a while (SIGSTOP, a laptop lid); datagrams wait in its socket.
    Pause {
        /// Which host.
        host: HostId,
        /// How long.
        lasts: Duration,
    },
    /// Nothing sent by the first group reaches the second; with `both` nor the other way.
    Partition {
        /// Senders cut off.
        from: Vec<HostId>,
        /// Receivers cut off from them.
        to: Vec<HostId>,
        /// Both ways.
        both: bool,
    },
    /// All partitions end.
    Heal,
    /// The data-plane connection of two hosts breaks; what is on its way is lost. Either may connect again.
    Break(HostId, HostId),
    /// The next so many batches of the host's device fail.
    Device {
        /// Which host.
        host: HostId,
        /// How many.
        failures: u32,
    },
    /// Datagram loss becomes this many parts per million.
    Loss(u32),
    /// The operator asks the node to leave.
    Leave(HostId),
}

/// A fault and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timed {
    /// When.
    pub at: Instant,
    /// What.
    pub fault: Fault,
}

/// All that will go wrong in a run.
pub type Schedule = Vec<Timed>;
