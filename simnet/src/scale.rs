//! Membership at scale: many nodes join, some crash. Measures convergence in virtual time and the speed of the simulator.
#![expect(clippy::disallowed_methods, reason = "measures how fast the simulator itself runs")]
use crate::checker::membership::divergences;
use crate::faults::Fault;
use crate::host::{HostId, HostSpec};
use crate::options::Options;
use crate::world::World;
use node_core::output::Event;
use node_core::time::{Duration, Instant};

/// Results of a run.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Scale {
    /// Nodes.
    pub nodes: u32,
    /// From the first start until all views have converged, virtual milliseconds.
    pub joined_ms: u64,
    /// The same in real seconds.
    pub joining_real_s: f64,
    /// Nodes that crashed at the same time.
    pub deaths: u32,
    /// From the crash to the first report of one of them, virtual milliseconds.
    pub first_told_ms: u64,
    /// From the crash to the last report of one of them by a live node, virtual milliseconds.
    pub all_know_ms: u64,
    /// False positives: reports that a live node is down.
    pub false_deaths: usize,
    /// Views that differ from the set of live nodes at the end.
    pub wrong_views: usize,
    /// Virtual seconds observed, starting before the crash.
    pub virtual_s: u64,
    /// Real seconds of that period, on one core.
    pub real_s: f64,
    /// Inputs that nodes handled in that period.
    pub events: u64,
}

/// `nodes` join through a few seed nodes; then `deaths` of them crash within the observed time `watched`. Calls `progress`
/// about once per second of real time.
pub fn scale(seed: u64, nodes: u32, deaths: u32, watched: Duration, progress: impl Fn(&str)) -> Scale {
    let mut reported = std::time::Instant::now();
    let mut report = |text: &dyn Fn() -> String| {
        if reported.elapsed() >= PROGRESS {
            reported = std::time::Instant::now();
            progress(&text());
        }
    };
    let mut world = World::new(Options::lan(seed));
    let hosts = world.add_hosts(nodes as usize, &HostSpec::default());
    let began = std::time::Instant::now();
    for (index, &host) in hosts.iter().enumerate() {
        world.start(host);
        if index > 0 {
            // A ticket names the machine that issued it; joiners use different ones.
            world.introduce(host, hosts[index / 8]);
        }
        if index % 16 == 15 {
            world.run_for(Duration::from_millis(20));
            report(&|| format!("{} of {nodes} nodes started", index + 1));
        }
    }
    let joined = world.run_while_not(JOIN_MAX, Duration::from_millis(500), |world| {
        let wrong = divergences(world, &[]).len();
        report(&|| {
            format!("{} virtual ms: {wrong} views differ from the set of live nodes", world.now().0 / 1_000_000)
        });
        wrong == 0
    });
    let mut scale = Scale { nodes, deaths: deaths.min(nodes.saturating_sub(1)), ..Scale::default() };
    scale.joined_ms = if joined { world.now().0 / 1_000_000 } else { u64::MAX };
    scale.joining_real_s = began.elapsed().as_secs_f64();
    world.run_for(Duration::from_secs(2));
    world.take_notifications();
    let (began, events) = (std::time::Instant::now(), world.trace().events());
    let (start, end) = (world.now(), world.now() + watched);
    world.run_for((watched / 6).max(Duration::from_millis(100)));
    let died = world.now();
    let step = (hosts.len() / (scale.deaths.max(1) as usize + 1)).max(1);
    let dead: Vec<HostId> = hosts.iter().copied().skip(step).step_by(step).take(scale.deaths as usize).collect();
    dead.iter().for_each(|&host| world.strike(Fault::Crash(host)));
    let mut last_told = died;
    while world.now() < end {
        world.run_until((world.now() + Duration::from_millis(100)).min(end));
        let passed = world.now().since(start).as_secs();
        report(&|| format!("{passed} of {} virtual seconds watched", watched.as_secs()));
        for told in world.take_notifications() {
            let Event::PeerDown { node, .. } = told.event else { continue };
            if world.host_of(node).is_some_and(|host| dead.contains(&host)) {
                last_told = last_told.max(told.at);
                if scale.first_told_ms == 0 {
                    scale.first_told_ms = ms(told.at, died);
                }
            } else {
                scale.false_deaths += 1;
            }
        }
    }
    scale.all_know_ms = ms(last_told, died);
    scale.wrong_views = divergences(&world, &[]).len();
    scale.virtual_s = world.now().since(start).as_secs();
    scale.real_s = began.elapsed().as_secs_f64();
    scale.events = world.trace().events() - events;
    scale
}

/// Interval between two lines of progress.
const PROGRESS: std::time::Duration = std::time::Duration::from_secs(1);

fn ms(at: Instant, since: Instant) -> u64 {
    at.since(since).as_millis() as u64
}

/// A mesh must join within this time.
const JOIN_MAX: Duration = Duration::from_secs(120);
