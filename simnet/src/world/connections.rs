//! Connections of the simulated world: dialling, handshakes, delivery and breaks.
use super::{Happening, World};
use crate::compute::Cargo;
use crate::host::{Host, HostId};
use crate::network::{Pair, Parcel, pair};
use node_core::id::{NodeId, TensorId};
use node_core::input::Input;
use node_core::time::Duration;

impl World {
    /// Dials unless a connection is established or being dialled. If the core `requested` it, an established one is
    /// reported again.
    pub(super) fn connect(&mut self, from: HostId, node: NodeId, requested: bool) {
        let Some(to) = self.host_of(node).filter(|to| *to != from) else { return };
        let pair = pair(from, to);
        let lives = (self.hosts[pair.0.index()].life, self.hosts[pair.1.index()].life);
        if let Some(connection) = self.network.connection(pair) {
            if connection.lives == lives {
                if connection.up && requested {
                    let rtt_ns = self.network.rtt(from, to).as_nanos() as u64;
                    self.answer(from, Duration::ZERO, Input::Connected { node, rtt_ns });
                }
                return;
            }
            self.break_connection(pair);
        }
        let reach = self.network.reaches(from, to) && self.network.reaches(to, from);
        let open = reach && self.hosts[to.index()].runs() && !self.is_banned(pair);
        let id = self.network.dial(pair, lives);
        let after = if open { self.network.rtt(from, to) * 3 / 2 } else { self.options.connect_timeout };
        self.queue.push(self.now + after, Happening::Handshake { pair, id });
    }

    pub(super) fn handshake(&mut self, pair: Pair, id: u64) {
        if self.network.connection(pair).is_none_or(|connection| connection.id != id) {
            return;
        }
        if !self.is_sound(pair) {
            self.break_connection(pair);
            return;
        }
        self.network.establish(pair);
        let rtt_ns = self.network.rtt(pair.0, pair.1).as_nanos() as u64;
        for (host, other) in [(pair.0, pair.1), (pair.1, pair.0)] {
            let node = self.hosts[other.index()].node_id;
            self.deliver(host, Input::Connected { node, rtt_ns });
        }
        self.send_held(pair);
    }

    /// Both hosts are in the lives that dialled, not paused, and reach each other.
    fn is_sound(&self, pair: Pair) -> bool {
        let (a, b) = (&self.hosts[pair.0.index()], &self.hosts[pair.1.index()]);
        let moves = |host: &Host| host.runs() && host.paused_until.is_none();
        self.network.connection(pair).is_some_and(|connection| connection.lives == (a.life, b.life))
            && moves(a)
            && moves(b)
            && self.network.reaches(pair.0, pair.1)
            && self.network.reaches(pair.1, pair.0)
            && !self.is_banned(pair)
    }

    /// Whether one end is banned: the other end's endpoint rejects its connections.
    fn is_banned(&self, pair: Pair) -> bool {
        [pair.0, pair.1].iter().any(|host| self.banned.contains(&self.hosts[host.index()].node_id))
    }

    /// Both ends learn of it now, but after their current outputs: a node that dials a peer's new life is still carrying
    /// out its outputs, and must receive no input before the last of them.
    pub(super) fn break_connection(&mut self, pair: Pair) {
        let Some(connection) = self.network.remove(pair) else { return };
        let ends = [(pair.0, pair.1, connection.lives.0), (pair.1, pair.0, connection.lives.1)];
        for (host, other, life) in ends {
            let node = self.hosts[other.index()].node_id;
            if self.hosts[host.index()].life == life {
                self.answer(host, Duration::ZERO, Input::Disconnected { node });
            }
        }
    }

    pub(super) fn disconnect(&mut self, from: HostId, node: NodeId) {
        let Some(to) = self.host_of(node) else { return };
        let pair = pair(from, to);
        if self.network.remove(pair).is_some() {
            let node = self.hosts[from.index()].node_id;
            self.answer(to, self.network.rtt(from, to) / 2, Input::Disconnected { node });
        }
    }

    pub(super) fn send_parcel(&mut self, from: HostId, node: NodeId, parcel: Parcel) {
        let Some(to) = self.host_of(node) else { return };
        assert!(to != from, "a node does not send to itself");
        self.connect(from, node, false);
        self.post(from, to, parcel);
    }

    pub(super) fn post(&mut self, from: HostId, to: HostId, parcel: Parcel) {
        let pair = pair(from, to);
        let Some(id) = self.network.connection(pair).map(|connection| connection.id) else { return };
        match self.network.send(self.now, from, to, parcel) {
            Some((at, number, parcel)) => {
                let parcel = Box::new(parcel);
                self.queue.push(at, Happening::Parcel { pair, id, from, number, parcel });
            }
            None => self.watch_idle(pair),
        }
    }

    /// Removes a host's bandwidth limit, and reschedules the parcels queued at its bottleneck.
    pub(super) fn widen(&mut self, host: HostId) {
        if !self.network.widen(self.now, host) {
            return;
        }
        let on_its_links = |happening: &Happening| matches!(happening, Happening::Parcel { pair, .. } if pair.0 == host || pair.1 == host);
        let waiting = self.queue.extract(on_its_links);
        for (_, happening) in waiting {
            let Happening::Parcel { pair, id, from, number, parcel } = happening else { continue };
            if self.network.connection(pair).is_none_or(|connection| connection.id != id) {
                continue; // lost with its connection
            }
            let to = if pair.0 == from { pair.1 } else { pair.0 };
            match self.network.forward(self.now, from, to, number, *parcel) {
                Some((at, number, parcel)) => {
                    let parcel = Box::new(parcel);
                    self.queue.push(at, Happening::Parcel { pair, id, from, number, parcel });
                }
                None => self.watch_idle(pair),
            }
        }
    }

    pub(super) fn arrive(&mut self, pair: Pair, id: u64, from: HostId, number: u64, parcel: Parcel) {
        let to = if pair.0 == from { pair.1 } else { pair.0 };
        let Some(connection) = self.network.connection(pair).filter(|connection| connection.id == id) else { return };
        let life = if to == pair.0 { connection.lives.0 } else { connection.lives.1 };
        if self.hosts[to.index()].life != life || !self.hosts[to.index()].runs() {
            return;
        }
        if !self.network.reaches(from, to) {
            self.network.hold(from, to, number, parcel);
            self.watch_idle(pair);
            return;
        }
        if matches!(parcel, Parcel::Weights(_)) && self.hosts[to.index()].paused_until.is_some() {
            let parcel = Box::new(parcel);
            return self.stopped.push((to, Happening::Parcel { pair, id, from, number, parcel }));
        }
        let sender = self.hosts[from.index()].node_id;
        let input = match parcel {
            Parcel::Message(bytes) => Input::Message { from: sender, bytes },
            Parcel::Frame(header, cargo, _) => {
                let tensor = self.receive(to, cargo);
                Input::Frame { from: sender, header, tensor }
            }
            Parcel::Weights(weights) => return self.weights_arrive(pair, from, weights),
        };
        self.deliver(to, input);
    }

    fn receive(&mut self, host: HostId, cargo: Cargo) -> TensorId {
        self.hosts[host.index()].executor.take(cargo)
    }

    pub(super) fn watch_idle(&mut self, pair: Pair) {
        if let Some(id) = self.network.connection(pair).filter(|connection| connection.up).map(|c| c.id) {
            self.queue.push(self.now + self.options.idle_timeout, Happening::Idle { pair, id });
        }
    }

    pub(super) fn idle(&mut self, pair: Pair, id: u64) {
        if self.network.connection(pair).is_some_and(|connection| connection.id == id) {
            if self.is_sound(pair) {
                self.send_held(pair);
            } else {
                self.break_connection(pair);
            }
        }
    }

    pub(super) fn send_held(&mut self, pair: Pair) {
        for (from, to, parcel) in self.network.take_held(pair) {
            self.post(from, to, parcel);
        }
    }
}
