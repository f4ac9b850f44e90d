//! The event loop around the core: feeds inputs, carries out outputs, sleeps until the next wake-up.
//!
//! One thread owns the `Node`; it blocks only on its own queue. `simnet/src/world.rs` is the counterpart in virtual
//! time.
use crate::record::Recorder;
use crate::shell::Shell;
use crate::views::Views;
use node_core::input::Input;
use node_core::node::Node;
use node_core::time::Instant;
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Sends to the driver; cheap to clone, never blocks.
#[derive(Clone)]
pub struct DriverHandle {
    queue: mpsc::Sender<Event>,
}

enum Event {
    Input(Input),
    /// From the network; dropping the credit lets its sender send more.
    Arrived(Input, transport::Credit),
    Views(oneshot::Sender<Views>),
    StopAfter(Duration),
}

/// The queue of a driver that does not run yet: threads that feed it can be started first.
pub struct DriverQueue {
    events: mpsc::Receiver<Event>,
}

/// Creates the queue.
pub fn queue() -> (DriverHandle, DriverQueue) {
    let (sender, events) = mpsc::channel();
    (DriverHandle { queue: sender }, DriverQueue { events })
}

impl DriverHandle {
    /// Sends an input to the node. Dropped if the node has stopped.
    pub fn input(&self, input: Input) {
        let _ = self.queue.send(Event::Input(input));
    }

    /// Sends an input from the network; `credit` is returned once the input is handled.
    pub fn arrived(&self, input: Input, credit: transport::Credit) {
        let _ = self.queue.send(Event::Arrived(input, credit));
    }

    /// Peers, jobs and simulations in the core's present state; empty if the node has stopped.
    pub async fn views(&self) -> Views {
        let (answer, views) = oneshot::channel();
        let _ = self.queue.send(Event::Views(answer));
        views.await.unwrap_or_default()
    }

    /// Ends the loop after `delay`, so that outgoing messages can still be sent.
    pub fn stop_after(&self, delay: Duration) {
        let _ = self.queue.send(Event::StopAfter(delay));
    }
}

#[cfg(test)]
impl DriverQueue {
    /// The next input; `None` if none arrives within `patience`.
    pub(crate) fn next_input(&self, patience: Duration) -> Option<Input> {
        loop {
            match self.events.recv_timeout(patience).ok()? {
                Event::Input(input) | Event::Arrived(input, _) => return Some(input),
                Event::Views(_) | Event::StopAfter(_) => {}
            }
        }
    }
}

/// Most further inputs handled before their outputs are carried out. Work that arrives together runs as one batch, and
/// no output waits for more than this many short steps.
const TOGETHER_MAX: usize = 64;

/// Runs the node until it is stopped. Records inputs if there is a recorder.
pub fn run(mut node: Node, mut shell: Shell, queue: &DriverQueue, mut recorder: Option<Recorder>) {
    let mut stop_at: Option<Instant> = None;
    let handle = |node: &mut Node, recorder: &mut Option<Recorder>, now: Instant, input: Input| {
        if let Some(recorder) = recorder {
            recorder.input(now, &input);
        }
        node.handle(now, input);
    };
    loop {
        if let Some(recorder) = &mut recorder {
            recorder.polled(now());
        }
        while let Some(output) = node.poll() {
            shell.carry_out(output, &node);
        }
        let now = now();
        if stop_at.is_some_and(|at| now >= at) {
            return;
        }
        let wakeup = [node.next_wakeup().map(|(at, _who)| at), stop_at].into_iter().flatten().min();
        let first = match wakeup {
            Some(at) if at <= now => {
                handle(&mut node, &mut recorder, now, Input::Wakeup);
                queue.events.try_recv().ok()
            }
            Some(at) => match queue.events.recv_timeout(at.since(now)) {
                Ok(event) => Some(event),
                Err(mpsc::RecvTimeoutError::Timeout) => continue,
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            },
            None => match queue.events.recv() {
                Ok(event) => Some(event),
                Err(mpsc::RecvError) => return,
            },
        };
        for event in first.into_iter().chain(queue.events.try_iter().take(TOGETHER_MAX)) {
            match event {
                Event::Input(input) => handle(&mut node, &mut recorder, self::now(), input),
                Event::Arrived(input, _credit) => handle(&mut node, &mut recorder, self::now(), input),
                Event::Views(answer) => {
                    let _ = answer.send(Views::of(&node));
                }
                Event::StopAfter(delay) => stop_at = Some(self::now() + delay),
            }
        }
    }
}

/// Nanoseconds of CLOCK_BOOTTIME: it counts suspended time, so that a resumed laptop sees that its leases have expired.
pub fn now() -> Instant {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant(u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0))
}
