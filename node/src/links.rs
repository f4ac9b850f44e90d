//! Measures the links to connected peers, one at a time and only while they are idle, and reports the results to the
//! core. Plans use the measured rates, and weight transfers keep to their share of them.
use crate::driver::queue::DriverHandle;
use node_core::id::NodeId;
use node_core::input::Input;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transport::{Endpoint, PeerStats};

/// How often to check whether a measurement is due.
const GLANCE: Duration = Duration::from_secs(1);
/// Time until a link is measured again: half a second of load on a slow link every ten minutes goes unnoticed.
const AGAIN: Duration = Duration::from_secs(600);
/// Time until a failed measurement is retried.
const RETRY: Duration = Duration::from_secs(30);
/// No frame for this long: no job generates tokens over the link, or so slowly that a burst of half a second does not
/// matter.
const FRAMES_SILENT: Duration = Duration::from_secs(10);
/// More bytes than this per second are a weight transfer or a prompt, which would disturb the measurement and be
/// disturbed by it.
const IDLE_BYTES: u64 = 64 << 10;

/// The measuring task; dropping this aborts it.
pub(crate) struct Links(tokio::task::JoinHandle<()>);

impl Links {
    /// Starts to watch the connections of `endpoint`.
    pub(crate) fn watch(endpoint: Arc<Endpoint>, driver: DriverHandle) -> Self {
        Self(tokio::spawn(async move {
            let mut schedule = Schedule::default();
            loop {
                tokio::time::sleep(GLANCE).await;
                let Some(peer) = schedule.next(Instant::now(), &endpoint.peers()) else { continue };
                match endpoint.measure(peer).await {
                    Ok(link) => {
                        tracing::debug!(
                            "{}: {:?} there and back, {} B/s",
                            NodeId(peer),
                            link.rtt,
                            link.bytes_per_second
                        );
                        driver.input(Input::LinkMeasured {
                            node: NodeId(peer),
                            rtt_ns: u64::try_from(link.rtt.as_nanos()).unwrap_or(u64::MAX),
                            bytes_per_second: link.bytes_per_second,
                        });
                    }
                    Err(e) => {
                        tracing::debug!("the link to {} could not be measured: {e}", NodeId(peer));
                        schedule.failed(Instant::now(), peer);
                    }
                }
            }
        }))
    }
}

impl Links {
    /// The task, for checking that it still runs.
    pub(crate) fn task(&self) -> tokio::task::AbortHandle {
        self.0.abort_handle()
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The measurement schedule of all links.
#[derive(Default)]
struct Schedule(BTreeMap<transport::NodeId, NextProbe>);

struct NextProbe {
    /// When the connection was established, from its age: a new connection counts as a new link.
    since: Instant,
    due: Instant,
    /// Bytes in both directions at the last check.
    bytes: u64,
}

/// Two readings of one connection's age differ by less than this.
const SAME: Duration = Duration::from_millis(500);

impl Schedule {
    /// The link to measure now, if any: among the idle links that are due, the one due longest.
    fn next(&mut self, now: Instant, peers: &[PeerStats]) -> Option<transport::NodeId> {
        self.0.retain(|node, _| peers.iter().any(|p| p.node == *node));
        let mut idle = Vec::new();
        for peer in peers {
            let since = now.checked_sub(peer.connected_for).unwrap_or(now);
            let bytes = peer.bytes_sent + peer.bytes_received;
            let entry = self.0.entry(peer.node).or_insert(NextProbe { since, due: now, bytes });
            if since.saturating_duration_since(entry.since) > SAME {
                *entry = NextProbe { since, due: now, bytes };
            }
            let quiet = peer.since_last_frame.is_none_or(|silent| silent >= FRAMES_SILENT);
            if quiet && bytes.saturating_sub(entry.bytes) <= IDLE_BYTES && entry.due <= now {
                idle.push((entry.due, peer.node));
            }
            entry.bytes = bytes;
        }
        let (_, node) = idle.into_iter().min()?;
        if let Some(entry) = self.0.get_mut(&node) {
            entry.due = now + AGAIN;
        }
        Some(node)
    }

    /// A measurement failed: retries it sooner than usual.
    fn failed(&mut self, now: Instant, node: transport::NodeId) {
        if let Some(entry) = self.0.get_mut(&node) {
            entry.due = now + RETRY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transport::Identity;

    fn peer(n: u8, connected_for: Duration) -> PeerStats {
        PeerStats {
            node: [n; 16],
            peer_id: Identity::generate().peer_id(),
            addr: ([10, 0, 0, n], 1).into(),
            rtt: Duration::ZERO,
            bytes_per_second: None,
            bytes_per_second_in: None,
            since_last_frame: None,
            bytes_sent: 0,
            bytes_received: 0,
            packets_lost: 0,
            mtu: 1200,
            queued_bytes: 0,
            connected_for,
            dialed_here: true,
        }
    }

    #[test]
    fn each_link_is_measured_again_after_an_interval() {
        let (mut schedule, start) = (Schedule::default(), Instant::now() + 2 * AGAIN);
        let at = |seconds: u64| (start + Duration::from_secs(seconds), Duration::from_secs(1 + seconds));
        let mut measured = Vec::new();
        for second in 0..=AGAIN.as_secs() {
            let (now, age) = at(second);
            measured.extend(schedule.next(now, &[peer(1, age), peer(2, age)]).map(|node| (second, node[0])));
        }
        assert_eq!(measured, [(0, 1), (1, 2), (AGAIN.as_secs(), 1)]);
        let (now, _) = at(AGAIN.as_secs() + 1);
        let reconnected = schedule.next(now, &[peer(1, Duration::ZERO)]);
        assert_eq!(reconnected, Some([1; 16]), "a new connection is a new link");
        schedule.failed(now, [1; 16]);
        assert_eq!(schedule.next(now + RETRY, &[peer(1, RETRY)]), Some([1; 16]));
    }

    #[test]
    fn a_link_in_use_is_not_measured() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let look = |schedule: &mut Schedule, second: u64, frames: Option<u64>, bytes: u64| {
            let age = Duration::from_secs(second);
            let frames_silent_for = frames.map(Duration::from_secs);
            let peer = PeerStats { since_last_frame: frames_silent_for, bytes_received: bytes, ..peer(1, age) };
            schedule.next(start + age, &[peer]).is_some()
        };
        assert!(!look(&mut schedule, 0, Some(0), 0), "a job generates");
        assert!(!look(&mut schedule, 1, None, 10 << 20), "weights arrive");
        assert!(!look(&mut schedule, 2, Some(9), 10 << 20), "a slow job");
        assert!(look(&mut schedule, 3, Some(10), 10 << 20));
    }

    #[test]
    fn the_link_that_is_due_longest_is_measured_first() {
        let (mut schedule, start) = (Schedule::default(), Instant::now() + 2 * AGAIN);
        let age = Duration::from_secs(100);
        let at = |seconds: u64| (start + Duration::from_secs(seconds), age + Duration::from_secs(seconds));
        let next = |schedule: &mut Schedule, seconds: u64, known: &[u8]| {
            let (now, age) = at(seconds);
            let peers: Vec<PeerStats> = known.iter().map(|n| peer(*n, age)).collect();
            schedule.next(now, &peers).map(|node| node[0])
        };
        assert_eq!(next(&mut schedule, 0, &[9]), Some(9));
        assert_eq!(next(&mut schedule, 1, &[9]), None, "it was measured a second ago");
        // Both are new; the one that was seen first goes first, whatever its id.
        schedule.0.insert([5; 16], NextProbe { since: start - age, due: start, bytes: 0 });
        assert_eq!(next(&mut schedule, 2, &[9, 5, 1]), Some(5));
        assert_eq!(next(&mut schedule, 3, &[9, 5, 1]), Some(1));
        assert_eq!(next(&mut schedule, 4, &[9, 5, 1]), None);
    }

    #[test]
    fn a_peer_that_left_is_forgotten() {
        let (mut schedule, now) = (Schedule::default(), Instant::now() + 2 * AGAIN);
        assert!(schedule.next(now, &[peer(1, AGAIN)]).is_some());
        assert_eq!(schedule.next(now, &[]), None);
        assert!(schedule.0.is_empty(), "the schedule does not grow with every peer that ever connected");
        schedule.failed(now, [1; 16]);
        assert!(schedule.0.is_empty(), "its measurement fails after it left");
    }

    #[test]
    fn an_imprecise_age_is_not_a_new_connection() {
        let (mut schedule, start) = (Schedule::default(), Instant::now() + 2 * AGAIN);
        assert!(schedule.next(start, &[peer(1, AGAIN)]).is_some());
        let second = Duration::from_secs(1);
        let about = |late: Duration| [peer(1, AGAIN + second - late)];
        assert_eq!(schedule.next(start + second, &about(SAME / 2)), None);
        assert_eq!(schedule.next(start + second, &about(2 * SAME)), Some([1; 16]), "it reconnected");
    }

    #[test]
    fn a_failed_link_does_not_delay_the_others() {
        let (mut schedule, now) = (Schedule::default(), Instant::now() + 2 * AGAIN);
        let after = |passed: Duration| [peer(1, AGAIN + passed), peer(2, AGAIN + passed)];
        assert_eq!(schedule.next(now, &after(Duration::ZERO)), Some([1; 16]));
        schedule.failed(now, [1; 16]);
        assert_eq!(schedule.next(now, &after(Duration::ZERO)), Some([2; 16]));
        assert_eq!(schedule.next(now + RETRY / 2, &after(RETRY / 2)), None);
        assert_eq!(schedule.next(now + RETRY, &after(RETRY)), Some([1; 16]));
    }
}
