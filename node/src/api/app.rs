//! The state that the handlers of the API share.
use super::guard::Guard;
use super::idempotency::Answers;
use crate::folders::Folders;
use crate::metrics::Metrics;
use std::sync::Arc;

/// State shared by all handlers.
#[derive(Clone)]
pub(super) struct App<E> {
    pub(super) engine: E,
    pub(super) metrics: Metrics,
    pub(super) answers: Answers,
    pub(super) guard: Guard,
    pub(super) folders: Arc<Folders>,
}
