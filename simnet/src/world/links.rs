//! Measures links to connected hosts, as `node/src/links.rs` does: one at a time, only while they are idle.
use super::{Happening, World};
use crate::host::HostId;
use crate::network::{Pair, pair};
use node_core::input::Input;
use node_core::time::{Duration, Instant};
use std::collections::BTreeMap;

/// The measurement schedule of each host's links.
#[derive(Default)]
pub(super) struct Links(BTreeMap<(HostId, HostId), Link>);

struct Link {
    /// A new connection counts as a new link.
    connection: u64,
    due: Instant,
    /// Bytes in both directions at the last check.
    bytes: u64,
}

impl World {
    /// Starts a measurement on each host that has an idle link due.
    pub(super) fn glance_at_links(&mut self) {
        let now = self.now;
        let (network, hosts) = (&self.network, &self.hosts);
        self.links.0.retain(|&(host, other), link| {
            network
                .connection(pair(host, other))
                .is_some_and(|connection| connection.up && connection.id == link.connection)
        });
        let mut idle: BTreeMap<HostId, (Instant, HostId, u64)> = BTreeMap::new();
        for ((a, b), connection) in network.standing() {
            let quiet = connection.frame_at.is_none_or(|at| now.since(at) >= FRAMES_SILENT);
            for (host, other) in [(a, b), (b, a)] {
                let fresh = Link { connection: connection.id, due: now, bytes: connection.bytes };
                let link = self.links.0.entry((host, other)).or_insert(fresh);
                let moved = connection.bytes - std::mem::replace(&mut link.bytes, connection.bytes);
                let moves = &hosts[host.index()];
                if quiet && moved <= IDLE_BYTES && link.due <= now && moves.runs() && moves.paused_until.is_none() {
                    let candidate = (link.due, other, link.connection);
                    idle.entry(host).and_modify(|least| *least = (*least).min(candidate)).or_insert(candidate);
                }
            }
        }
        for (host, (_, other, connection)) in idle {
            if let Some(link) = self.links.0.get_mut(&(host, other)) {
                link.due = now + AGAIN;
            }
            let life = self.hosts[host.index()].life;
            self.queue.push(now + BURST, Happening::Measured { host, life, other, connection });
        }
        self.queue.push(now + GLANCE, Happening::Glance);
    }

    /// A measurement ends; without a result if the connection broke meanwhile.
    pub(super) fn measured(&mut self, host: HostId, other: HostId, connection: u64) {
        let pair: Pair = pair(host, other);
        let stands = self.network.connection(pair).is_some_and(|now| now.id == connection && now.up);
        if stands && self.network.reaches(host, other) && self.network.reaches(other, host) {
            let node = self.hosts[other.index()].node_id;
            let rtt_ns = u64::try_from(self.network.rtt(host, other).as_nanos()).unwrap_or(u64::MAX);
            let bytes_per_second = self.network.bandwidth(host, other);
            self.deliver(host, Input::LinkMeasured { node, rtt_ns, bytes_per_second });
        } else if let Some(link) = self.links.0.get_mut(&(host, other)) {
            link.due = self.now + RETRY;
        }
    }
}

/// Interval of checks for due measurements.
pub(super) const GLANCE: Duration = Duration::from_secs(1);
/// Duration of a measurement.
const BURST: Duration = Duration::from_millis(500);
/// Interval between measurements of a link.
const AGAIN: Duration = Duration::from_secs(600);
/// Retry delay after a failed measurement.
const RETRY: Duration = Duration::from_secs(30);
/// Without a frame for this long no job generates over the link.
const FRAMES_SILENT: Duration = Duration::from_secs(10);
/// More bytes than this between two checks are a transfer of weights or a prompt.
const IDLE_BYTES: u64 = 64 << 10;
