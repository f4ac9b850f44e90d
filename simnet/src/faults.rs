//! What goes wrong and when: a schedule is data, so that it can be written by people, printed, replayed and made smaller.
//!
//! Most troubles end by themselves, so that leaving one out of a schedule leaves a sound schedule. Next: `faults/draw.rs`.
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

pub use draw::{Ground, any, disks, lies, losses, mend, swarm};

/// One thing that goes wrong, or right again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
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
    /// Hosts die together (a rack, a fuse) and come back after a while.
    Outage {
        /// Which hosts.
        hosts: Vec<HostId>,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
        /// Synced records are still there when they are back.
        keep_disk: bool,
    },
    /// Everything on the host stops for a while (SIGSTOP, a laptop lid); datagrams wait in its socket.
    Pause {
        /// Which host.
        host: HostId,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Its device takes this many percent of the usual time.
    Slow {
        /// Which host.
        host: HostId,
        /// 100 is as usual.
        percent: u32,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Its device answers nothing for a while, then goes on.
    Stall {
        /// Which host.
        host: HostId,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The next so many batches of the host's device fail.
    Device {
        /// Which host.
        host: HostId,
        /// How many.
        failures: u32,
    },
    /// The next so many stages it is asked to load do not fit, whatever it had said.
    Refuse {
        /// Which host.
        host: HostId,
        /// How many.
        loads: u32,
    },
    /// Its disk is full for a while: nothing can be written, and a process that starts ends at once.
    DiskFull {
        /// Which host.
        host: HostId,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The next writes to its disk fail.
    DiskFails {
        /// Which host.
        host: HostId,
        /// How many.
        writes: u32,
    },
    /// Its clock runs this many millionths too fast (or slow) from now on.
    Drift {
        /// Which host.
        host: HostId,
        /// Millionths; negative is slow.
        ppm: i32,
    },
    /// Nothing sent by the first group reaches the second; with `both` nor the other way. Until `Heal`.
    Partition {
        /// Senders cut off.
        from: Vec<HostId>,
        /// Receivers cut off from them.
        to: Vec<HostId>,
        /// Both ways.
        both: bool,
    },
    /// The same, ending by itself.
    Cut {
        /// Senders cut off.
        from: Vec<HostId>,
        /// Receivers cut off from them.
        to: Vec<HostId>,
        /// Both ways.
        both: bool,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// A link goes up and down: cut for half of each period, both ways.
    Flap {
        /// Its ends.
        between: (HostId, HostId),
        /// From one cut to the next.
        #[serde(with = "units")]
        period: Duration,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// All partitions end.
    #[serde(with = "unit")]
    Heal,
    /// The data-plane connection of two hosts breaks; what is on its way is lost. Either may connect again.
    Break(HostId, HostId),
    /// Datagram loss becomes this many parts per million.
    Loss(u32),
    /// Datagram loss for a while.
    LossBurst {
        /// Parts per million.
        ppm: u32,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Datagrams arrive twice for a while.
    Duplicate {
        /// Parts per million.
        ppm: u32,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Datagrams are overtaken for a while.
    Reorder {
        /// Parts per million.
        ppm: u32,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Datagrams lose their tail for a while. A seal would drop them; here decoders see them.
    Corrupt {
        /// Parts per million.
        ppm: u32,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Everything to and from a host has to go through this much for a while.
    Collapse {
        /// Which host.
        host: HostId,
        /// What is left.
        bytes_per_second: u64,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The operator asks the node to leave.
    Leave(HostId),
    /// It leaves, ends two seconds later, and is started again after a while.
    Depart {
        /// Which host.
        host: HostId,
        /// How long it is gone.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// The operator drains the node for a while: its stages move to standbys.
    Drain {
        /// Which host.
        host: HostId,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// All other members ban the node, and readmit it after a while.
    Ban {
        /// Which host.
        host: HostId,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// A member sends forged messages and frames in the names of others, spread over a time.
    Lies {
        /// Which host.
        host: HostId,
        /// How many.
        messages: u32,
        /// How long.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// So many new hosts of the first one's kind join at once.
    JoinStorm {
        /// How many.
        hosts: u32,
    },
    /// Whoever plays a part in the next such moment dies a little later, and comes back after a while.
    Ambush {
        /// What to wait for.
        moment: Moment,
        /// From the moment to the death.
        #[serde(with = "units")]
        after: Duration,
        /// How long it is gone.
        #[serde(with = "units")]
        lasts: Duration,
    },
    /// Everything works again: all of the above ends, and whoever is down starts.
    #[serde(with = "unit")]
    Mend,
}

/// A moment in which somebody can die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// A head asks for a plan: the head.
    Plan,
    /// A head mints an epoch, before it asks for stages under it: the head.
    Mint,
    /// A head asks for stages again, under a higher epoch: who is asked to hold one.
    Promotion,
    /// A stage says that it is ready: that stage.
    Prepared,
    /// A head says `Go`: who is told.
    Go,
}

impl Moment {
    /// Who dies, if this output of `host` makes the moment.
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

    /// Whether it is the head who dies.
    pub fn kills_head(self) -> bool {
        matches!(self, Moment::Plan | Moment::Mint)
    }
}

impl Fault {
    /// How long it lasts, where it ends by itself.
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

    /// The hosts it names; none for what happens to everybody or to whom it concerns.
    pub fn hosts(&self) -> Vec<HostId> {
        match self {
            Fault::Crash(host)
            | Fault::Leave(host)
            | Fault::Restart { host, .. }
            | Fault::Pause { host, .. }
            | Fault::Slow { host, .. }
            | Fault::Stall { host, .. }
            | Fault::Device { host, .. }
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
    /// When.
    pub at: Instant,
    /// What.
    pub fault: Fault,
}

/// All that will go wrong in a run.
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

/// A fault without figures is written `heal = true`.
mod unit {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bool(true)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<(), D::Error> {
        match bool::deserialize(from)? {
            true => Ok(()),
            false => Err(serde::de::Error::custom("expected `true`: leave the line out instead")),
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
    fn a_schedule_is_written_and_read() {
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
    fn a_fault_that_does_not_exist_is_named() {
        let wrong = |text: &str| toml::from_str::<File>(text).unwrap_err().to_string();
        let error = wrong("[[fault]]\nat = \"1s\"\nearthquake = 3\n");
        assert!(error.contains("earthquake") && error.contains("outage"), "{error}");
        let error = wrong("[[fault]]\nat = \"1s\"\ncrash = 3\nheal = true\n");
        assert!(error.contains("one fault"), "{error}");
    }
}
