//! Fault schedules as data: they can be written by hand, printed, replayed and minimised.
//!
//! Most faults end by themselves, so that removing one leaves a valid schedule. Next: `faults/draw.rs`.
mod draw;

use crate::host::HostId;
use crate::units;
use node_core::codec;
use node_core::id::NodeId;
use node_core::message::{Message, ToCoordinator, ToParticipant};
use node_core::output::{Event, Output};
use node_core::time::{Duration, Instant};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

pub use draw::{Ground, any, disks, forgeries, gone_devices, losses, mend, swarm};

/// A fault, or the end of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Fault {
    /// The process crashes. Peers notice only its silence.
    Crash(HostId),
    /// The process starts again, with or without its disk.
    Restart {
        /// The host.
        host: HostId,
        /// Synced records are kept.
        keep_disk: bool,
    },
    /// Hosts crash together (a rack, a fuse) and restart after a while.
    Outage {
        /// The hosts.
        hosts: Vec<HostId>,
        /// Time until they restart.
        #[serde(with = "units")]
        lasts: Duration,
        /// Synced records are kept.
        keep_disk: bool,
    },
    /// The host is paused (SIGSTOP, a laptop lid); datagrams wait in its socket buffers.
    Pause {
        /// The host.
        host: HostId,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The device takes this percentage of its nominal time.
    Slow {
        /// The host.
        host: HostId,
        /// 100 is nominal.
        percent: u32,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The device returns no results for a while, then continues.
    Stall {
        /// The host.
        host: HostId,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The next batches on the device fail.
    Device {
        /// The host.
        host: HostId,
        /// Number of batches.
        failures: u32,
    },
    /// A device disappears: its parts fail, and its node reports it as gone. It is back when the process starts again, or at
    /// `Mend`.
    DeviceGone {
        /// The host.
        host: HostId,
        /// The device, by its place in the node's advert.
        device: u8,
    },
    /// The next stages or tiles to load are rejected as out of memory, whatever the host advertised.
    Refuse {
        /// The host.
        host: HostId,
        /// Number of loads.
        loads: u32,
    },
    /// The disk is full for a while: all writes fail, and a process that starts ends at once.
    DiskFull {
        /// The host.
        host: HostId,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The next writes to the disk fail.
    DiskFails {
        /// The host.
        host: HostId,
        /// Number of writes.
        writes: u32,
    },
    /// The clock drifts from now on.
    Drift {
        /// The host.
        host: HostId,
        /// Drift in parts per million; negative is slow.
        ppm: i32,
    },
    /// Traffic from the first group does not reach the second, with `both` nor in the reverse direction. Lasts until
    /// `Heal`.
    Partition {
        /// Senders cut off.
        from: Vec<HostId>,
        /// Receivers cut off from them.
        to: Vec<HostId>,
        /// In both directions.
        both: bool,
    },
    /// A partition that ends by itself.
    Cut {
        /// Senders cut off.
        from: Vec<HostId>,
        /// Receivers cut off from them.
        to: Vec<HostId>,
        /// In both directions.
        both: bool,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// A link flaps: cut in both directions for half of each period.
    Flap {
        /// The two hosts.
        between: (HostId, HostId),
        /// Time from one cut to the next.
        #[serde(with = "units")]
        period: Duration,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// All partitions end.
    #[serde(with = "unit")]
    Heal,
    /// The connection of two hosts breaks; parcels in flight are lost. Either host may connect again.
    Break(HostId, HostId),
    /// Sets the datagram loss, parts per million.
    Loss(u32),
    /// Datagram loss for a while.
    LossBurst {
        /// Parts per million.
        ppm: u32,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Datagrams are duplicated for a while.
    Duplicate {
        /// Parts per million.
        ppm: u32,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Datagrams are reordered for a while.
    Reorder {
        /// Parts per million.
        ppm: u32,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Datagrams are truncated for a while. A real node drops them by their seal; here decoders receive them.
    Corrupt {
        /// Parts per million.
        ppm: u32,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The bandwidth of all traffic of a host collapses for a while.
    Collapse {
        /// The host.
        host: HostId,
        /// Remaining bandwidth.
        bytes_per_second: u64,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The operator asks the node to leave.
    Leave(HostId),
    /// The node leaves, its process ends two seconds later and starts again after a while.
    Depart {
        /// The host.
        host: HostId,
        /// Time from the end of the process to its restart.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The operator drains the node for a while: its stages move to standbys.
    Drain {
        /// The host.
        host: HostId,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// All other members ban the node, and readmit it after a while.
    Ban {
        /// The host.
        host: HostId,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// A member forges messages and frames in the names of others, spread over a time.
    Lies {
        /// The host.
        host: HostId,
        /// Number of messages.
        messages: u32,
        /// Duration.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// New hosts of the first one's kind join at the same time.
    JoinStorm {
        /// Number of hosts.
        hosts: u32,
    },
    /// A host that takes part in the next such moment crashes a little later, and restarts after a while.
    Ambush {
        /// The moment to wait for.
        moment: Moment,
        /// Time from the moment to the crash.
        #[serde(with = "units")]
        after: Duration,
        /// Time until it restarts.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Heals everything: all of the above ends, and hosts that are down start.
    #[serde(with = "unit")]
    Mend,
}

/// A protocol moment at which an ambush kills a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// A coordinator asks for a plan: kills the coordinator.
    Plan,
    /// A coordinator issues an epoch, before it orders parts under it: kills the coordinator.
    Mint,
    /// A coordinator orders parts under a higher epoch: kills the receiver of an order.
    Promotion,
    /// A participant reports that its part is ready: kills the participant.
    Prepared,
    /// A coordinator sends `Go`: kills the receiver.
    Go,
}

impl Moment {
    /// The node to kill, if this output of `host` is the moment.
    pub fn victim(self, host: NodeId, output: &Output) -> Option<NodeId> {
        let message = |bytes: &[u8]| codec::decode_message(bytes).ok();
        match (self, output) {
            (Moment::Plan, Output::Plan { .. }) => Some(host),
            (Moment::Mint, Output::Notify(Event::JobPlaced { .. })) => Some(host),
            (Moment::Promotion, Output::SendMessage { to, bytes }) => match message(bytes) {
                Some(Message::ToParticipant { epoch, say: ToParticipant::Prepare(_), .. }) if epoch.counter > 1 => {
                    Some(*to)
                }
                _ => None,
            },
            (Moment::Prepared, Output::SendMessage { bytes, .. }) => {
                matches!(message(bytes), Some(Message::ToCoordinator { say: ToCoordinator::Prepared { .. }, .. }))
                    .then_some(host)
            }
            (Moment::Go, Output::SendMessage { to, bytes }) => {
                matches!(message(bytes), Some(Message::ToParticipant { say: ToParticipant::Go { .. }, .. }))
                    .then_some(*to)
            }
            _ => None,
        }
    }

    /// Whether it kills the coordinator.
    pub fn kills_coordinator(self) -> bool {
        matches!(self, Moment::Plan | Moment::Mint)
    }
}

impl Fault {
    /// Duration of a fault that ends by itself; zero for others.
    pub fn lasts(&self) -> Duration {
        match self {
            Fault::Outage { lasts, .. }
            | Fault::Pause { lasts, .. }
            | Fault::Slow { lasts, .. }
            | Fault::Stall { lasts, .. }
            | Fault::DiskFull { lasts, .. }
            | Fault::Cut { lasts, .. }
            | Fault::Flap { lasts, .. }
            | Fault::LossBurst { lasts, .. }
            | Fault::Duplicate { lasts, .. }
            | Fault::Reorder { lasts, .. }
            | Fault::Corrupt { lasts, .. }
            | Fault::Collapse { lasts, .. }
            | Fault::Depart { lasts, .. }
            | Fault::Drain { lasts, .. }
            | Fault::Ban { lasts, .. }
            | Fault::Lies { lasts, .. }
            | Fault::Ambush { lasts, .. } => *lasts,
            Fault::Crash(_)
            | Fault::Restart { .. }
            | Fault::Device { .. }
            | Fault::DeviceGone { .. }
            | Fault::Refuse { .. }
            | Fault::DiskFails { .. }
            | Fault::Drift { .. }
            | Fault::Partition { .. }
            | Fault::Heal
            | Fault::Break(..)
            | Fault::Loss(_)
            | Fault::Leave(_)
            | Fault::JoinStorm { .. }
            | Fault::Mend => Duration::ZERO,
        }
    }

    /// The hosts that it names; empty if it concerns the whole network, or depends on the run.
    pub fn hosts(&self) -> Vec<HostId> {
        match self {
            Fault::Crash(host)
            | Fault::Leave(host)
            | Fault::Restart { host, .. }
            | Fault::Pause { host, .. }
            | Fault::Slow { host, .. }
            | Fault::Stall { host, .. }
            | Fault::Device { host, .. }
            | Fault::DeviceGone { host, .. }
            | Fault::Refuse { host, .. }
            | Fault::DiskFull { host, .. }
            | Fault::DiskFails { host, .. }
            | Fault::Drift { host, .. }
            | Fault::Collapse { host, .. }
            | Fault::Depart { host, .. }
            | Fault::Drain { host, .. }
            | Fault::Lies { host, .. }
            | Fault::Ban { host, .. } => vec![*host],
            Fault::Outage { hosts, .. } => hosts.clone(),
            Fault::Partition { from, to, .. } | Fault::Cut { from, to, .. } => from.iter().chain(to).copied().collect(),
            Fault::Flap { between: (a, b), .. } | Fault::Break(a, b) => vec![*a, *b],
            Fault::Heal
            | Fault::Loss(_)
            | Fault::LossBurst { .. }
            | Fault::Duplicate { .. }
            | Fault::Reorder { .. }
            | Fault::Corrupt { .. }
            | Fault::JoinStorm { .. }
            | Fault::Ambush { .. }
            | Fault::Mend => Vec::new(),
        }
    }
}

impl std::fmt::Display for Fault {
    /// As in a scenario file, on one line.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let toml::Value::Table(table) = toml::Value::try_from(self).map_err(|_| std::fmt::Error)? else {
            return Err(std::fmt::Error);
        };
        for (name, value) in table {
            if value == toml::Value::Boolean(true) { f.write_str(&name)? } else { write!(f, "{name} = {value}")? }
        }
        Ok(())
    }
}

/// A fault and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timed {
    /// When it strikes.
    pub at: Instant,
    /// The fault.
    pub fault: Fault,
}

/// All faults of a run.
pub type Schedule = Vec<Timed>;

/// `{ at = "3s", pause = { … } }`: the fault's name is the other key.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(with = "units::moment")]
    at: Instant,
    #[serde(flatten)]
    fault: BTreeMap<String, serde_json::Value>,
}

impl Serialize for Timed {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let fault = serde_json::to_value(&self.fault).map_err(serde::ser::Error::custom)?;
        let fault =
            fault.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())).collect();
        Line { at: self.at, fault }.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Timed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Line { at, fault } = Line::deserialize(from)?;
        if fault.len() != 1 {
            let found: Vec<&String> = fault.keys().collect();
            let text = format!("expected a time (`at`) and one fault such as `crash = 3`, found the faults {found:?}");
            return Err(serde::de::Error::custom(text));
        }
        let fault = serde_json::Value::Object(fault.into_iter().collect());
        let fault = serde_json::from_value(fault).map_err(serde::de::Error::custom)?;
        Ok(Timed { at, fault })
    }
}

/// A fault without parameters is written `heal = true`.
mod unit {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bool(true)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<(), D::Error> {
        match bool::deserialize(from)? {
            true => Ok(()),
            false => Err(serde::de::Error::custom("expected `true`, found `false`: remove the line instead")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct File {
        fault: Schedule,
    }

    #[test]
    fn a_schedule_round_trips_through_toml() {
        let at = Instant(1_500_000_000);
        let lasts = Duration::from_millis(300);
        let (a, b) = (HostId(1), HostId(2));
        let faults = [
            Fault::Crash(a),
            Fault::Heal,
            Fault::Mend,
            Fault::Break(a, b),
            Fault::Cut { from: vec![a], to: vec![b], both: true, lasts },
            Fault::Flap { between: (a, b), period: lasts, lasts },
            Fault::Drift { host: a, ppm: -200 },
            Fault::Ambush { moment: Moment::Promotion, after: Duration::ZERO, lasts },
        ];
        let file = File { fault: faults.into_iter().map(|fault| Timed { at, fault }).collect() };
        let text = toml::to_string(&file).unwrap();
        assert_eq!(toml::from_str::<File>(&text).unwrap(), file, "{text}");
        assert_eq!(Fault::Crash(a).to_string(), "crash = 1");
        assert_eq!(Fault::Heal.to_string(), "heal");
    }

    #[test]
    fn the_error_names_an_unknown_fault() {
        let wrong = |text: &str| toml::from_str::<File>(text).unwrap_err().to_string();
        let error = wrong("[[fault]]\nat = \"1s\"\nearthquake = 3\n");
        assert!(error.contains("earthquake") && error.contains("outage"), "{error}");
        let error = wrong("[[fault]]\nat = \"1s\"\ncrash = 3\nheal = true\n");
        assert!(error.contains("one fault"), "{error}");
    }
}
