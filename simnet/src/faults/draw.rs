//! Random fault schedules from a seed (swarm testing): each seed enables only some kinds of faults, so that a fault that
//! hides another one does not always occur with it.
use super::{Fault, Moment, Schedule, Timed};
use crate::host::HostId;
use crate::options::chance;
use node_core::time::{Duration, Instant};
use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;

/// Bounds of a random schedule.
#[derive(Clone, Copy, Debug)]
pub struct Ground {
    /// Hosts 0 to one less than this.
    pub hosts: u32,
    /// Time span of the faults.
    pub span: Duration,
    /// Whether host 0, the callers' entry node, may die.
    pub entry_mortal: bool,
}

/// Faults of every kind at random times, from time 0 on.
pub fn any(seed: u64, ground: &Ground) -> Schedule {
    let mut rng = chance(seed, "any fault");
    let kinds: Vec<u32> = (0..ANY_KINDS).filter(|_| rng.random_bool(0.4)).collect();
    let count = rng.random_range(1..=14);
    let span_us = u64::try_from(ground.span.as_micros()).unwrap_or(u64::MAX).max(1);
    let mut schedule: Schedule = Vec::new();
    for _ in 0..count {
        let Some(kind) = kinds.get(rng.random_range(0..kinds.len().max(1))) else { break };
        let at = Instant(0) + Duration::from_micros(rng.random_range(0..span_us));
        let fault = draw_any(*kind, ground, &mut rng);
        schedule.push(Timed { at, fault });
    }
    schedule.sort_by_key(|timed| timed.at);
    schedule
}

/// Losses of one host, of two hosts within a lease, or of all connections, with quiet periods between them. Host 0 never
/// dies.
pub fn losses(seed: u64, ground: &Ground) -> Schedule {
    let mut rng = chance(seed, "losses");
    let hosts = ground.hosts.max(3);
    let mut schedule: Schedule = Vec::new();
    let mut at = Instant(0) + QUIET;
    while at.since(Instant(0)) < ground.span {
        let one = rng.random_range(1..hosts);
        let other = (one - 1 + rng.random_range(1..hosts - 1)) % (hosts - 1) + 1;
        let lasts = Duration::from_millis(rng.random_range(500..4_000));
        if rng.random_bool(0.4) {
            // A switch restarts: every connection breaks.
            let pairs = (0..hosts).flat_map(|a| (0..a).map(move |b| Fault::Break(HostId(b), HostId(a))));
            schedule.extend(pairs.map(|fault| Timed { at, fault }));
            at = at + QUIET + Duration::from_millis(rng.random_range(0..2_000));
            continue;
        }
        let loss = |host| Fault::Outage { hosts: vec![HostId(host)], lasts, keep_disk: true };
        schedule.push(Timed { at, fault: loss(one) });
        if rng.random_bool(0.5) {
            let apart = Duration::from_millis(rng.random_range(0..400));
            schedule.push(Timed { at: at + apart, fault: loss(other) });
        }
        at = at + QUIET + Duration::from_millis(rng.random_range(0..2_000));
    }
    schedule
}

/// A member that forges messages all the time, in one seed of five.
pub fn forgeries(seed: u64, ground: &Ground) -> Schedule {
    let mut rng = chance(seed, "liar");
    let host = HostId(rng.random_range(1..ground.hosts.max(2)));
    let fault = Fault::Lies { host, messages: rng.random_range(20..120), lasts: ground.span };
    let forgeries = rng.random_bool(0.2).then_some(Timed { at: Instant(0), fault });
    forgeries.into_iter().filter(|_| ground.hosts > 1).collect()
}

/// In half of the worlds with hosts of several devices, one of these disappears. `devices`: their number on each host.
pub fn gone_devices(seed: u64, ground: &Ground, devices: &[u32]) -> Schedule {
    let mut rng = chance(seed, "gone devices");
    let several: Vec<usize> = (0..devices.len()).filter(|&host| devices[host] > 1).collect();
    if several.is_empty() || rng.random_bool(0.5) {
        return Vec::new();
    }
    let span_us = u64::try_from(ground.span.as_micros()).unwrap_or(u64::MAX).max(1);
    let at = Instant(0) + Duration::from_micros(rng.random_range(0..span_us));
    let host = several[rng.random_range(0..several.len())];
    let device = rng.random_range(0..devices[host]) as u8;
    Vec::from([Timed { at, fault: Fault::DeviceGone { host: HostId(host as u32), device } }])
}

/// Disks that are full for a while or fail, in 15 % of the seeds.
pub fn disks(seed: u64, ground: &Ground) -> Schedule {
    let mut rng = chance(seed, "disks");
    let count = if rng.random_bool(0.15) { rng.random_range(1..=4) } else { 0 };
    let span_us = u64::try_from(ground.span.as_micros()).unwrap_or(u64::MAX).max(1);
    let draw = |_| {
        let at = Instant(0) + Duration::from_micros(rng.random_range(0..span_us));
        let host = HostId(rng.random_range(0..ground.hosts.max(1)));
        let fault = if rng.random_bool(0.5) {
            Fault::DiskFull { host, lasts: Duration::from_millis(rng.random_range(500..12_000)) }
        } else {
            Fault::DiskFails { host, writes: rng.random_range(1..6) }
        };
        Timed { at, fault }
    };
    (0..count).map(draw).collect()
}

fn draw_any(kind: u32, ground: &Ground, rng: &mut ChaCha8Rng) -> Fault {
    let hosts = ground.hosts.max(2);
    let host = HostId(rng.random_range(0..hosts));
    let mortal = HostId(rng.random_range(u32::from(!ground.entry_mortal)..hosts));
    let other = HostId((host.0 + rng.random_range(1..hosts)) % hosts);
    let all = || (0..hosts).map(HostId);
    let keep_disk = rng.random_bool(0.7);
    let lasts = Duration::from_millis(if rng.random_bool(0.5) {
        rng.random_range(50..1_500)
    } else {
        rng.random_range(1_000..15_000)
    });
    match kind {
        0 => Fault::Outage { hosts: vec![mortal], lasts, keep_disk },
        1 => {
            let rack = mortal.0 / RACK;
            let hosts = all().filter(|host| host.0 / RACK == rack && (host.0 > 0 || ground.entry_mortal)).collect();
            Fault::Outage { hosts, lasts, keep_disk }
        }
        2 => Fault::Pause { host: mortal, lasts },
        3 => Fault::Slow { host, percent: rng.random_range(150..3_000), lasts },
        4 => Fault::Stall { host, lasts },
        5 => Fault::Device { host, failures: rng.random_range(1..4) },
        6 => Fault::Refuse { host, loads: rng.random_range(1..4) },
        7 => Fault::Drift { host, ppm: rng.random_range(-20_000..20_000) },
        8 => {
            let (from, to): (Vec<HostId>, Vec<HostId>) = all().partition(|_| rng.random_bool(0.5));
            Fault::Cut { from, to, both: rng.random_bool(0.7), lasts }
        }
        9 => {
            let to = all().filter(|other| *other != host).collect();
            Fault::Cut { from: vec![host], to, both: rng.random_bool(0.5), lasts }
        }
        10 => Fault::Cut { from: vec![host], to: vec![other], both: rng.random_bool(0.6), lasts },
        11 => Fault::Flap { between: (host, other), period: Duration::from_millis(rng.random_range(20..2_000)), lasts },
        12 => Fault::Break(host, other),
        13 => Fault::LossBurst { ppm: rng.random_range(10_000..400_000), lasts },
        14 => Fault::Duplicate { ppm: rng.random_range(10_000..500_000), lasts },
        15 => Fault::Reorder { ppm: rng.random_range(10_000..500_000), lasts },
        16 => Fault::Corrupt { ppm: rng.random_range(1_000..200_000), lasts },
        17 => Fault::Collapse { host, bytes_per_second: rng.random_range(20_000..2_000_000), lasts },
        18 => Fault::Depart { host: mortal, lasts },
        19 => Fault::JoinStorm { hosts: rng.random_range(1..6) },
        20 => Fault::Drain { host, lasts },
        // Host 0 is the callers' first coordinator. A later one may be banned: it continues with the nodes that it reaches.
        21 => Fault::Ban { host: HostId(rng.random_range(1..hosts)), lasts },
        _ => {
            let ours = [Moment::Promotion, Moment::Prepared, Moment::Go];
            let coordinators = [Moment::Plan, Moment::Mint];
            let moments = if ground.entry_mortal && rng.random_bool(0.3) { &coordinators[..] } else { &ours[..] };
            let moment = moments[rng.random_range(0..moments.len())];
            let after = Duration::from_micros(if rng.random_bool(0.3) { 0 } else { rng.random_range(0..200_000) });
            Fault::Ambush { moment, after, lasts }
        }
    }
}

/// A random schedule: faults at random times of `span`, of every kind or only some; the first host never dies. [`mend`]
/// ends what is left of it.
pub fn swarm(seed: u64, hosts: &[HostId], from: Instant, span: Duration) -> Schedule {
    let mut rng = chance(seed, "faults");
    let span_ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
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

/// Heals the faults of [`swarm`]: partitions and loss end, hosts that are down start.
pub fn mend(hosts: &[HostId], at: Instant) -> Schedule {
    let restarts = hosts.iter().map(|&host| Fault::Restart { host, keep_disk: true });
    [Fault::Heal, Fault::Loss(0)].into_iter().chain(restarts).map(|fault| Timed { at, fault }).collect()
}

/// One fault, and its end if it has one.
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

/// Number of kinds that `draw` handles.
const KINDS: u32 = 6;
/// Number of kinds that `draw_any` handles.
const ANY_KINDS: u32 = 23;
/// Time between losses: new standbys load and catch up.
const QUIET: Duration = Duration::from_secs(7);
/// Number of hosts that share a fuse.
const RACK: u32 = 3;
