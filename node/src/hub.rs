//! Routes the core's events: events of a call to its caller, and every event to the listeners.
use node_core::id::CallId;
use node_core::output::Event;
use node_core::work::serve::{DoneReason, Sampled};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{broadcast, mpsc};

/// Events buffered for a slow listener before it misses some: listeners only display or log.
const LISTENER_BACKLOG: usize = 1024;

/// The event router.
pub(crate) struct EventRouter {
    next_call: AtomicU64,
    waiting: Mutex<HashMap<CallId, Waiter>>,
    listeners: broadcast::Sender<Event>,
}

/// What a caller other than a token stream receives.
pub(crate) enum CallEvent {
    /// An event of the core for this call.
    Node(Event),
}

/// An event of a running request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenEvent {
    /// The next token.
    Token {
        /// Its position in the sequence, counting the prompt.
        position: u32,
        /// The token.
        sampled: Sampled,
        /// Number of prompt tokens that were cached when the request began, as far as this node knows.
        cached: u32,
    },
    /// No more tokens.
    Done {
        /// The reason.
        reason: DoneReason,
    },
}

enum Waiter {
    Call(mpsc::Sender<CallEvent>),
    Tokens {
        sender: mpsc::Sender<TokenEvent>,
        /// See [`TokenEvent::Token`].
        cached: u32,
    },
}

impl EventRouter {
    /// A router without callers.
    pub(crate) fn new() -> Self {
        Self {
            next_call: AtomicU64::new(1),
            waiting: Mutex::new(HashMap::new()),
            listeners: broadcast::channel(LISTENER_BACKLOG).0,
        }
    }

    /// Opens a call that receives events unchanged; `room` bounds the queue.
    pub(crate) fn open(&self, room: usize) -> (CallId, mpsc::Receiver<CallEvent>) {
        let (sender, receiver) = mpsc::channel(room);
        (self.insert(Waiter::Call(sender)), receiver)
    }

    /// Opens a call for a token stream; `room` is the most events it can have.
    pub(crate) fn open_tokens(&self, room: usize) -> (CallId, mpsc::Receiver<TokenEvent>) {
        let (sender, receiver) = mpsc::channel(room);
        (self.insert(Waiter::Tokens { sender, cached: 0 }), receiver)
    }

    /// Removes a call whose caller has left.
    pub(crate) fn forget(&self, call: CallId) {
        self.lock().remove(&call);
    }

    /// Subscribes to all events.
    pub(crate) fn listen(&self) -> broadcast::Receiver<Event> {
        self.listeners.subscribe()
    }

    /// Delivers an event.
    pub(crate) fn deliver(&self, event: Event) {
        if let Some(call) = call_of(&event) {
            let mut waiting = self.lock();
            let delivered = match (waiting.get_mut(&call), &event) {
                (Some(Waiter::Tokens { sender, cached }), Event::Token { position, sampled, .. }) => {
                    let (position, sampled, cached) = (*position, sampled.clone(), *cached);
                    sender.try_send(TokenEvent::Token { position, sampled, cached }).is_ok()
                }
                (Some(Waiter::Tokens { cached, .. }), Event::Begun { cached: found, .. }) => {
                    *cached = *found;
                    true
                }
                (Some(Waiter::Tokens { sender, .. }), Event::Done { reason, .. }) => {
                    sender.try_send(TokenEvent::Done { reason: reason.clone() }).is_ok()
                }
                (Some(Waiter::Tokens { .. }), _) => true,
                (Some(Waiter::Call(sender)), event) => sender.try_send(CallEvent::Node(event.clone())).is_ok(),
                (None, _) => true,
            };
            if !delivered || matches!(event, Event::Done { .. }) {
                waiting.remove(&call);
            }
        }
        let _ = self.listeners.send(event);
    }

    /// A new call id without a receiver.
    pub(crate) fn call(&self) -> CallId {
        CallId(self.next_call.fetch_add(1, Ordering::Relaxed))
    }

    fn insert(&self, waiter: Waiter) -> CallId {
        let call = self.call();
        self.lock().insert(call, waiter);
        call
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, HashMap<CallId, Waiter>> {
        self.waiting.lock()
    }
}

impl Default for EventRouter {
    fn default() -> Self {
        Self::new()
    }
}

fn call_of(event: &Event) -> Option<CallId> {
    match event {
        Event::PlanReady { call, .. }
        | Event::Fleet { call, .. }
        | Event::Token { call, .. }
        | Event::Begun { call, .. }
        | Event::Done { call, .. }
        | Event::GridPlan { call, .. } => Some(*call),
        Event::JobReady { call, .. } | Event::JobDegraded { call, .. } => *call,
        Event::PeerUp { .. }
        | Event::PeerDown { .. }
        | Event::JobPlaced { .. }
        | Event::JobEnded { .. }
        | Event::Lost { .. }
        | Event::Standby { .. }
        | Event::Promoted { .. }
        | Event::JobInherited { .. }
        | Event::JobMoves { .. }
        | Event::Measured { .. }
        | Event::Steps { .. }
        | Event::Preempted { .. }
        | Event::Rejected { .. } => None,
    }
}
