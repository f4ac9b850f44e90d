//! The loop around each node, as in `node/src/driver.rs`: handle all inputs that have arrived, carry out outputs until
//! there are none, arm the next wakeup.
use super::{Happening, World};
use crate::host::{Arrival, HostId};
use node_core::input::Input;
use node_core::node::Node;
use node_core::record;
use node_core::time::Instant;

impl World {
    /// Queues an input for a host; its driver handles it after the inputs before it.
    pub(super) fn deliver(&mut self, id: HostId, input: Input) {
        self.arrives(id, Arrival { input, forged: false });
    }

    /// As `deliver`, for an input that may be forged.
    pub(super) fn arrives(&mut self, id: HostId, arrival: Arrival) {
        let host = &mut self.hosts[id.index()];
        let lost = host.paused_until.is_some() && host.inbox.len() >= INBOX_MAX;
        if !host.runs() || lost {
            return;
        }
        host.inbox.push_back(arrival);
        self.arm_turn(id);
    }

    /// Inputs due at the same moment are queued before this turn, so the turn handles them.
    fn arm_turn(&mut self, id: HostId) {
        let host = &mut self.hosts[id.index()];
        let at = self.now.max(host.busy_until);
        if host.paused_until.is_none() && host.turn_at.is_none_or(|armed| at < armed) {
            host.turn_at = Some(at);
            self.queue.push(at, Happening::Turn { host: id, life: host.life });
        }
    }

    /// One turn of the loop.
    pub(super) fn turn(&mut self, id: HostId, life: u32) {
        let host = &mut self.hosts[id.index()];
        if host.life != life || host.turn_at != Some(self.now) {
            return;
        }
        host.turn_at = None;
        if host.paused_until.is_some() || !host.runs() {
            return;
        }
        let local = host.clock.local(self.now);
        let due = host.node.as_ref().and_then(Node::next_wakeup).is_some_and(|(at, _)| at <= local);
        let count = host.inbox.len().min(TOGETHER_MAX);
        let arrived: Vec<Arrival> = host.inbox.drain(..count).collect();
        let wakeup = due.then_some(Arrival { input: Input::Wakeup, forged: false });
        let mut handled = 0;
        for arrival in wakeup.into_iter().chain(arrived) {
            self.handle(id, local, arrival);
            handled += 1;
        }
        if handled > 0 {
            self.poll(id);
            self.check_node(id, handled);
        }
        let host = &mut self.hosts[id.index()];
        host.busy_until = self.now + self.options.handling * handled;
        if !host.inbox.is_empty() {
            self.arm_turn(id);
        }
        self.arm(id);
    }

    fn handle(&mut self, id: HostId, local: Instant, Arrival { input, forged }: Arrival) {
        let now = self.now;
        self.trace.input(now, id, &input);
        for observer in &mut self.observers {
            if forged {
                observer.forged(now, id, &input);
            } else {
                observer.input(now, id, &input);
            }
        }
        let host = &mut self.hosts[id.index()];
        if let Some(recording) = &mut host.recording {
            record::append_input(recording, local, &input);
        }
        if let Some(node) = &mut host.node {
            node.handle(local, input);
        }
    }

    /// A node checks its own invariants after every few inputs, which costs little.
    fn check_node(&mut self, id: HostId, handled: u32) {
        let host = &mut self.hosts[id.index()];
        host.unchecked += handled;
        if host.unchecked >= CHECK_EVERY {
            host.unchecked = 0;
            host.assert_invariants();
        }
    }

    fn poll(&mut self, id: HostId) {
        let now = self.now;
        let host = &mut self.hosts[id.index()];
        let Some(node) = &mut host.node else { return };
        if let Some(recording) = &mut host.recording {
            record::append_polled(recording);
        }
        let mut outputs = std::mem::take(&mut self.outputs);
        outputs.extend(std::iter::from_fn(|| node.poll()));
        for output in outputs.drain(..) {
            for observer in &mut self.observers {
                observer.output(now, id, &output);
            }
            if !self.ambushes.is_empty() {
                self.spring_ambushes(id, &output);
            }
            self.carry_out(id, output);
        }
        self.outputs = outputs;
        for observer in &mut self.observers {
            observer.polled(now, id);
        }
    }

    pub(super) fn arm(&mut self, id: HostId) {
        let host = &mut self.hosts[id.index()];
        let Some((at, _)) = host.node.as_ref().and_then(Node::next_wakeup) else { return };
        let at = host.clock.world(at).max(self.now);
        // An earlier wakeup in the queue finds nothing due and arms again: cheaper than searching the queue.
        if host.wake_at.is_none_or(|armed| at < armed) {
            host.wake_at = Some(at);
            self.queue.push(at, Happening::Wake { host: id, life: host.life });
        }
    }

    pub(super) fn wake(&mut self, id: HostId, life: u32) {
        let host = &mut self.hosts[id.index()];
        if host.life != life || host.wake_at != Some(self.now) || host.paused_until.is_some() {
            return; // of an earlier life, or no longer the earliest
        }
        host.wake_at = None;
        self.arm_turn(id);
    }

    pub(super) fn resume(&mut self, id: HostId, life: u32) {
        let host = &mut self.hosts[id.index()];
        if host.life != life || host.paused_until.is_none_or(|until| until > self.now) {
            return;
        }
        host.paused_until = None;
        (host.wake_at, host.turn_at) = (None, None);
        // As a real driver, a turn checks the clock before the inbox.
        self.arm_turn(id);
        for (_, happening) in self.stopped.extract_if(.., |(host, _)| *host == id).collect::<Vec<_>>() {
            self.happen(happening);
        }
    }
}

/// Inputs handled before their outputs are carried out, as in `node/src/driver.rs`: one, and up to 64 more from the queue.
const TOGETHER_MAX: usize = 65;
/// Number of inputs after which a node checks its own invariants.
const CHECK_EVERY: u32 = 16;
/// Inputs that a paused host's socket buffers hold; further ones are lost.
const INBOX_MAX: usize = 4096;
