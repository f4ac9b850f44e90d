//! The error of operations on a node, whose variants the API and the commands tell apart.

/// Why a node could not carry out an operation.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NodeError {
    /// The queue is full.
    #[error("the queue of this model is full: try again in a moment")]
    Busy,
    /// No such model, peer or job.
    #[error("{0}")]
    NotFound(String),
    /// The request cannot be served as it is.
    #[error("{0}")]
    Invalid(String),
    /// The model does not fit into the mesh; the text says how much is missing and what to do.
    #[error("{0}")]
    Plan(String),
    /// Access denied.
    #[error("{0}")]
    Unauthorised(String),
    /// The node does not respond.
    #[error("{0}")]
    Unreachable(String),
    /// Any other failure.
    #[error("{0}")]
    Failed(String),
}

impl NodeError {
    /// The same error, followed by the state of the model that was served before.
    pub(crate) fn and_then(self, then: Option<&str>) -> Self {
        match then {
            Some(then) => Self::Failed(format!("{self}\n  {then}")),
            None => self,
        }
    }
}
