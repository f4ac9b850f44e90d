//! The event loop around the core: feeds inputs, carries out outputs, sleeps until the next wake-up.
//!
//! One thread owns the `Node`; it blocks only on its own queue. `simnet/src/world.rs` is the counterpart in virtual
//! time.
use crate::clock;
use crate::record::Recorder;
use crate::shell::Shell;
use crate::views::Views;
use node_core::input::Input;
use node_core::node::Node;
use node_core::time::Instant;
use queue::{DriverQueue, Event};
use std::sync::mpsc;

pub(crate) mod queue;

/// Most further inputs handled before their outputs are carried out. Work that arrives together runs as one batch, and
/// no output waits for more than this many short steps.
const TOGETHER_MAX: usize = 64;

/// Runs the node until it is stopped. Records inputs if there is a recorder.
pub(crate) fn run(mut node: Node, mut shell: Shell, queue: &DriverQueue, mut recorder: Option<Recorder>) {
    let mut stop_at: Option<Instant> = None;
    let handle = |node: &mut Node, recorder: &mut Option<Recorder>, now: Instant, input: Input| {
        if let Some(recorder) = recorder {
            recorder.input(now, &input);
        }
        node.handle(now, input);
    };
    loop {
        if let Some(recorder) = &mut recorder {
            recorder.polled(clock::now());
        }
        while let Some(output) = node.poll() {
            shell.carry_out(output, &node);
        }
        let now = clock::now();
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
                Event::Input(input) => handle(&mut node, &mut recorder, clock::now(), input),
                Event::Arrived(input, _credit) => handle(&mut node, &mut recorder, clock::now(), input),
                Event::Views(answer) => {
                    let _ = answer.send(Views::of(&node));
                }
                Event::StopAfter(delay) => stop_at = Some(clock::now() + delay),
            }
        }
    }
}
