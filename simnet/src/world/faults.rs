//! Applies each fault to the simulated world, and ends it.
use super::{Happening, World};
use crate::disk::{Disk, Fate};
use crate::faults::{Fault, Moment};
use crate::host::HostId;
use crate::network::{Pair, pair};
use node_core::id::NodeId;
use node_core::input::Input;
use node_core::output::Output;
use node_core::time::Duration;
use rand::RngExt;

/// A pending ambush: kills a host at the next such moment.
#[derive(Debug)]
pub(super) struct Ambush {
    moment: Moment,
    after: Duration,
    lasts: Duration,
}

/// The end of a fault.
#[derive(Debug)]
pub(super) enum End {
    Cut(u64),
    Loss,
    Duplicate,
    Reorder,
    Corrupt,
    Collapse(HostId),
    Slow(HostId),
    DiskFull(HostId),
    Drain(HostId),
    Ban(HostId),
    /// The next cut of a flapping link, with the remaining time.
    Flap {
        between: (HostId, HostId),
        period: Duration,
        lasts: Duration,
    },
}

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        self.trace.fault(self.now, &fault);
        for observer in &mut self.observers {
            observer.fault(self.now, &fault);
        }
        match fault {
            Fault::Crash(id) => self.crash(id),
            Fault::Restart { host: id, keep_disk } => {
                let host = &mut self.hosts[id.index()];
                if !keep_disk && !host.runs() {
                    host.disk = Disk::default();
                    host.parts.clear();
                    host.outputs.clear();
                }
                self.start(id);
            }
            Fault::Outage { hosts, lasts, keep_disk } => {
                for host in hosts {
                    self.crash(host);
                    self.later(lasts, Fault::Restart { host, keep_disk });
                }
            }
            Fault::Pause { host: id, lasts } => {
                let until = self.now + lasts;
                let host = &mut self.hosts[id.index()];
                if host.runs() {
                    host.paused_until = Some(host.paused_until.map_or(until, |old| old.max(until)));
                    self.queue.push(until, Happening::Resume { host: id, life: host.life });
                    self.watch_idle_all(self.network.pairs_of(id));
                }
            }
            Fault::Slow { host, percent, lasts } => {
                self.hosts[host.index()].executor.slow_percent = percent;
                self.ends(lasts, End::Slow(host));
            }
            Fault::Stall { host, lasts } => {
                self.hosts[host.index()].executor.stall(self.now, self.now + lasts);
            }
            Fault::Device { host, failures } => self.hosts[host.index()].executor.failures += failures,
            Fault::DeviceGone { host, device } => {
                if let Some(unit) = self.hosts[host.index()].executor.units.get_mut(usize::from(device)) {
                    unit.gone = true;
                    self.measure_memory(host);
                }
            }
            Fault::Refuse { host, loads } => self.hosts[host.index()].executor.rejections += loads,
            Fault::DiskFull { host, lasts } => {
                self.hosts[host.index()].disk.full = true;
                self.ends(lasts, End::DiskFull(host));
            }
            Fault::DiskFails { host, writes } => self.hosts[host.index()].disk.failures += writes,
            Fault::Drift { host, ppm } => {
                let drifting = &mut self.hosts[host.index()];
                drifting.clock = drifting.clock.drifting(self.now, ppm);
                drifting.wake_at = None;
                self.arm(host);
            }
            Fault::Partition { from, to, both } => {
                self.cut(&from, &to, both);
            }
            Fault::Cut { from, to, both, lasts } => {
                let cut = self.cut(&from, &to, both);
                self.ends(lasts, End::Cut(cut));
            }
            Fault::Flap { between, period, lasts } => self.flap(between, period, lasts),
            Fault::Heal => {
                self.network.heal();
                self.resend();
            }
            Fault::Break(a, b) => self.break_connection(pair(a, b)),
            Fault::Loss(ppm) => self.network.set_loss(ppm),
            Fault::LossBurst { ppm, lasts } => {
                self.network.set_loss(ppm);
                self.ends(lasts, End::Loss);
            }
            Fault::Duplicate { ppm, lasts } => {
                self.network.options.duplicate_ppm = ppm;
                self.ends(lasts, End::Duplicate);
            }
            Fault::Reorder { ppm, lasts } => {
                self.network.options.reorder_ppm = ppm;
                self.ends(lasts, End::Reorder);
            }
            Fault::Corrupt { ppm, lasts } => {
                self.network.corrupt_ppm = ppm;
                self.ends(lasts, End::Corrupt);
            }
            Fault::Collapse { host, bytes_per_second, lasts } => {
                self.network.collapse(host, bytes_per_second);
                self.ends(lasts, End::Collapse(host));
            }
            Fault::Leave(id) => self.leave(id),
            Fault::Depart { host, lasts } => {
                self.leave(host);
                self.later(GOODBYE, Fault::Crash(host));
                self.later(GOODBYE + lasts, Fault::Restart { host, keep_disk: true });
            }
            Fault::Drain { host, lasts } => {
                self.inject(host, Input::Drain(true));
                self.ends(lasts, End::Drain(host));
            }
            Fault::Ban { host, lasts } => {
                self.banned.insert(self.hosts[host.index()].node_id);
                self.send_ban_list();
                self.network.pairs_of(host).into_iter().for_each(|pair| self.break_connection(pair));
                self.ends(lasts, End::Ban(host));
            }
            Fault::Lies { host, messages, lasts } => self.plan_forgeries(host, messages, lasts),
            Fault::JoinStorm { hosts } => {
                let Some(spec) = self.hosts.first().map(|host| host.spec.clone()) else { return };
                for host in self.add_hosts(hosts as usize, &spec) {
                    self.start(host);
                    self.introduce(host, HostId(0));
                }
            }
            Fault::Ambush { moment, after, lasts } => self.ambushes.push(Ambush { moment, after, lasts }),
            Fault::Mend => self.mend(),
        }
    }

    /// Checks whether an output is the moment that an ambush waits for.
    pub(super) fn spring_ambushes(&mut self, host: HostId, output: &Output) {
        let node = self.hosts[host.index()].node_id;
        let mut sprung: Vec<(Ambush, NodeId)> = Vec::new();
        let mut at = 0;
        while let Some(ambush) = self.ambushes.get(at) {
            // One victim per moment: two ambushes for one moment would kill one host.
            match ambush.moment.victim(node, output).filter(|_| sprung.is_empty()) {
                Some(victim) => sprung.push((self.ambushes.remove(at), victim)),
                None => at += 1,
            }
        }
        for (ambush, victim) in sprung {
            let Some(victim) = self.host_of(victim) else { continue };
            // Host 0 is the callers' entry node: only an ambush on coordinators may kill it.
            if victim == HostId(0) && !ambush.moment.kills_coordinator() {
                self.ambushes.push(ambush);
                continue;
            }
            let fault = Fault::Outage { hosts: vec![victim], lasts: ambush.lasts, keep_disk: true };
            self.later(ambush.after, fault);
        }
    }

    pub(super) fn end(&mut self, era: u32, end: End) {
        if era != self.era {
            return; // healed earlier
        }
        let usual = &self.options;
        match end {
            End::Cut(cut) => {
                self.network.uncut(cut);
                self.resend();
            }
            End::Loss => self.network.set_loss(usual.loss_ppm),
            End::Duplicate => self.network.options.duplicate_ppm = usual.duplicate_ppm,
            End::Reorder => self.network.options.reorder_ppm = usual.reorder_ppm,
            End::Corrupt => self.network.corrupt_ppm = 0,
            End::Collapse(host) => self.widen(host),
            End::Drain(host) => self.inject(host, Input::Drain(false)),
            End::Ban(host) => {
                self.banned.remove(&self.hosts[host.index()].node_id);
                self.send_ban_list();
            }
            End::Slow(host) => self.hosts[host.index()].executor.slow_percent = 100,
            End::DiskFull(host) => self.hosts[host.index()].disk.full = false,
            End::Flap { between, period, lasts } => self.flap(between, period, lasts),
        }
    }

    pub(super) fn ends(&mut self, after: Duration, end: End) {
        self.queue.push(self.now + after, Happening::End { era: self.era, end });
    }

    pub(super) fn later(&mut self, after: Duration, fault: Fault) {
        self.queue.push(self.now + after, Happening::Fault { era: Some(self.era), fault: Box::new(fault) });
    }

    fn crash(&mut self, id: HostId) {
        let host = &mut self.hosts[id.index()];
        if host.node.take().is_none() {
            return;
        }
        host.paused_until = None;
        host.inbox.clear();
        let (lost, torn) = (self.options.unsynced_lost_percent, self.options.unsynced_torn_percent);
        let draws = &mut self.disk_chance;
        host.disk.crash(|| match draws.random_range(0..100) {
            draw if draw < lost => Fate::Lost,
            draw if draw < lost + torn => Fate::Torn,
            _ => Fate::Kept,
        });
        host.parts.clear();
        self.stopped.retain(|(host, _)| *host != id);
        for observer in &mut self.observers {
            observer.died(self.now, id);
        }
        self.watch_idle_all(self.network.pairs_of(id));
    }

    fn leave(&mut self, id: HostId) {
        self.hosts[id.index()].leaves = true;
        self.deliver(id, Input::Leave);
    }

    /// Sends the ban list to all other hosts.
    fn send_ban_list(&mut self) {
        let list: Vec<NodeId> = self.banned.iter().copied().collect();
        let others = self.hosts.iter().filter(|host| !self.banned.contains(&host.node_id)).map(|host| host.id);
        for host in others.collect::<Vec<HostId>>() {
            self.inject(host, Input::Banned(list.clone()));
        }
    }

    fn cut(&mut self, from: &[HostId], to: &[HostId], both: bool) -> u64 {
        let cut = self.network.cut(from, to, both);
        self.watch_idle_all(self.network.pairs());
        cut
    }

    fn flap(&mut self, between: (HostId, HostId), period: Duration, lasts: Duration) {
        let period = period.max(FLAP_MIN);
        let cut = self.cut(&[between.0], &[between.1], true);
        self.ends((period / 2).min(lasts), End::Cut(cut));
        if lasts > period {
            self.ends(period, End::Flap { between, period, lasts: lasts - period });
        }
    }

    /// Heals all faults, and starts the hosts that are down.
    fn mend(&mut self) {
        self.era += 1;
        self.ambushes.clear();
        self.banned.clear();
        self.send_ban_list();
        self.network.heal();
        self.network.mend(&self.options);
        for index in 0..self.hosts.len() {
            let id = self.hosts[index].id;
            self.widen(id);
            self.end_stall(id);
            let disk = &mut self.hosts[index].disk;
            (disk.full, disk.failures) = (false, 0);
            let executor = &mut self.hosts[index].executor;
            (executor.slow_percent, executor.failures, executor.rejections) = (100, 0, 0);
            if executor.units.iter().any(|unit| unit.gone) {
                executor.units.iter_mut().for_each(|unit| unit.gone = false);
                self.measure_memory(id);
            }
            self.inject(id, Input::Drain(false));
            if self.hosts[index].leaves {
                self.crash(id); // it has left the mesh and was about to exit
            }
            self.start(id);
            if self.hosts[index].paused_until.is_some() {
                self.hosts[index].paused_until = Some(self.now);
                self.resume(id, self.hosts[index].life);
            }
        }
        self.resend();
    }

    /// Ends a device stall early: pending results move forward by the rest of the stall.
    fn end_stall(&mut self, id: HostId) {
        let Some((from, less)) = self.hosts[id.index()].executor.end_stall(self.now) else { return };
        let answers = |input: &Input| {
            let part = matches!(input, Input::Ran { .. } | Input::Halos { .. } | Input::Loaded { .. });
            part || matches!(input, Input::Challenged { .. })
        };
        let waits = |happening: &Happening| matches!(happening, Happening::Answer { host, input, .. } if *host == id && answers(input));
        for (at, happening) in self.queue.extract(waits) {
            self.queue.push(if at >= from { at - less } else { at }, happening);
        }
    }

    /// Resends the parcels that partitions held.
    fn resend(&mut self) {
        for pair in self.network.pairs() {
            if self.network.connection(pair).is_some_and(|connection| connection.up) {
                self.send_held(pair);
            }
        }
    }

    fn watch_idle_all(&mut self, pairs: Vec<Pair>) {
        for pair in pairs {
            self.watch_idle(pair);
        }
    }
}

/// From an operator's `leave` to the end of the process.
const GOODBYE: Duration = Duration::from_secs(2);
/// Shortest period of a flapping link.
const FLAP_MIN: Duration = Duration::from_millis(2);
