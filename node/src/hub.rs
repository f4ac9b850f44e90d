//! Routes the events of the core: those of calls to the callers, all of them to listeners.
use crate::handle::TokenEvent;
use node_core::id::CallId;
use node_core::output::Event;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{broadcast, mpsc};

/// Events kept for a slow listener before it misses some: a listener only draws or logs.
const LISTENER_BACKLOG: usize = 1024;

/// Who waits for what.
pub struct Hub {
    next_call: AtomicU64,
    waiting: Mutex<HashMap<CallId, Waiter>>,
    listeners: broadcast::Sender<Event>,
}

/// What a caller that is not a token stream gets.
pub enum CallEvent {
    /// An event of the core that names the call.
    Node(Event),
}

enum Waiter {
    Call(mpsc::Sender<CallEvent>),
    Tokens(mpsc::Sender<TokenEvent>),
}

impl Hub {
    /// Nobody waits yet.
    pub fn new() -> Self {
        Self {
            next_call: AtomicU64::new(1),
            waiting: Mutex::new(HashMap::new()),
            listeners: broadcast::channel(LISTENER_BACKLOG).0,
        }
    }

    /// A new call whose events come as they are; `room` bounds how many may wait.
    pub fn open(&self, room: usize) -> (CallId, mpsc::Receiver<CallEvent>) {
        let (sender, receiver) = mpsc::channel(room);
        (self.insert(Waiter::Call(sender)), receiver)
    }

    /// A new call for a token stream; `room` is the most events it can have.
    pub fn open_tokens(&self, room: usize) -> (CallId, mpsc::Receiver<TokenEvent>) {
        let (sender, receiver) = mpsc::channel(room);
        (self.insert(Waiter::Tokens(sender)), receiver)
    }

    /// The caller is gone.
    pub fn forget(&self, call: CallId) {
        self.lock().remove(&call);
    }

    /// Everything that happens, for watchers.
    pub fn listen(&self) -> broadcast::Receiver<Event> {
        self.listeners.subscribe()
    }

    /// Delivers an event.
    pub fn tell(&self, event: Event) {
        if let Some(call) = call_of(&event) {
            let mut waiting = self.lock();
            let delivered = match (waiting.get(&call), &event) {
                (Some(Waiter::Tokens(sender)), Event::Token { position, token, .. }) => {
                    sender.try_send(TokenEvent::Token { position: *position, token: *token }).is_ok()
                }
                (Some(Waiter::Tokens(sender)), Event::Done { reason, .. }) => {
                    sender.try_send(TokenEvent::Done { reason: reason.clone() }).is_ok()
                }
                (Some(Waiter::Tokens(_)), _) => true,
                (Some(Waiter::Call(sender)), event) => sender.try_send(CallEvent::Node(event.clone())).is_ok(),
                (None, _) => true,
            };
            if !delivered || matches!(event, Event::Done { .. }) {
                waiting.remove(&call);
            }
        }
        let _ = self.listeners.send(event);
    }

    /// A new call that waits for nothing.
    pub fn call(&self) -> CallId {
        CallId(self.next_call.fetch_add(1, Ordering::Relaxed))
    }

    fn insert(&self, waiter: Waiter) -> CallId {
        let call = self.call();
        self.lock().insert(call, waiter);
        call
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<CallId, Waiter>> {
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Default for Hub {
    fn default() -> Self {
        Self::new()
    }
}

fn call_of(event: &Event) -> Option<CallId> {
    match event {
        Event::PlanReady { call, .. }
        | Event::Fleet { call, .. }
        | Event::Token { call, .. }
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
        | Event::Refused { .. } => None,
    }
}
