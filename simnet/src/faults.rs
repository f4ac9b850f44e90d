//! What goes wrong and when: a schedule is data, so that it can be printed, replayed and made smaller.
use crate::host::HostId;
use crate::options::chance;
use node_core::time::{Duration, Instant};
use rand::{Rng, RngExt};

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

/// A bad time drawn from a seed: faults at random moments of `span`, every kind or only some, never the first host's
/// death. What is still broken at the end is mended by [`mend`].
pub fn swarm(seed: u64, hosts: &[HostId], from: Instant, span: Duration) -> Schedule {
    let mut rng = chance(seed, "faults");
    let span_ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    // Each seed turns on some kinds only: troubles that hide each other when all are on come out alone.
    let kinds: Vec<u32> = (0..KINDS).filter(|_| rng.random_bool(0.6)).collect();
    let count = rng.random_range(2..=12);
    let mut schedule: Schedule = Vec::new();
    for _ in 0..count {
        let Some(kind) = kinds.get(rng.random_range(0..kinds.len().max(1))) else { break };
        let at = from + Duration::from_millis(rng.random_range(0..span_ms));
        schedule.extend(draw(*kind, hosts, at, &mut rng));
    }
    schedule.sort_by_key(|timed| timed.at);
    schedule
}

/// Everything works again: partitions end, loss ends, whoever is down starts.
pub fn mend(hosts: &[HostId], at: Instant) -> Schedule {
    let restarts = hosts.iter().map(|&host| Fault::Restart { host, keep_disk: true });
    [Fault::Heal, Fault::Loss(0)].into_iter().chain(restarts).map(|fault| Timed { at, fault }).collect()
}

/// One trouble, with its end where it has one.
fn draw(kind: u32, hosts: &[HostId], at: Instant, rng: &mut impl Rng) -> Schedule {
    let later = at + Duration::from_millis(rng.random_range(100..8_000));
    let some = |rng: &mut dyn Rng| hosts[rng.random_range(0..hosts.len())];
    let mut mortal = || hosts[rng.random_range(1.min(hosts.len() - 1)..hosts.len())];
    match kind {
        0 => {
            let host = mortal();
            let keep_disk = rng.random_bool(0.7);
            vec![
                Timed { at, fault: Fault::Crash(host) },
                Timed { at: later, fault: Fault::Restart { host, keep_disk } },
            ]
        }
        1 => {
            let host = mortal();
            let lasts = Duration::from_millis(rng.random_range(50..5_000));
            vec![Timed { at, fault: Fault::Pause { host, lasts } }]
        }
        2 => {
            let (from, to): (Vec<HostId>, Vec<HostId>) = hosts.iter().partition(|_| rng.random_bool(0.5));
            let both = rng.random_bool(0.7);
            vec![Timed { at, fault: Fault::Partition { from, to, both } }, Timed { at: later, fault: Fault::Heal }]
        }
        3 => {
            let one = some(rng);
            let others: Vec<HostId> = hosts.iter().copied().filter(|host| *host != one).collect();
            let fault = Fault::Partition { from: vec![one], to: others, both: rng.random_bool(0.5) };
            vec![Timed { at, fault }, Timed { at: later, fault: Fault::Heal }]
        }
        4 => vec![
            Timed { at, fault: Fault::Loss(rng.random_range(10_000..300_000)) },
            Timed { at: later, fault: Fault::Loss(0) },
        ],
        _ => vec![Timed { at, fault: Fault::Break(some(rng), some(rng)) }],
    }
}

/// Kinds of trouble that `draw` knows.
const KINDS: u32 = 6;
