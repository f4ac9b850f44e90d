//! How commands fail: the exit code and message of each kind of error.
use crate::api::BindError;
use crate::client::ClientError;
use crate::config::ConfigError;
use crate::handle::NodeError;
use crate::pull::PullError;

/// A failed command: its exit code and error message.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) code: u8,
    pub(super) message: String,
}

impl Failure {
    pub(super) const USAGE: u8 = 2;
    pub(super) const UNREACHABLE: u8 = 3;
    pub(super) const UNAUTHORISED: u8 = 4;
    pub(super) const FAILED: u8 = 5;
    pub(super) const INTERRUPTED: u8 = 130;

    pub(super) fn usage(message: impl std::fmt::Display) -> Self {
        Self { code: Self::USAGE, message: message.to_string() }
    }

    pub(super) fn failed(message: impl std::fmt::Display) -> Self {
        Self { code: Self::FAILED, message: message.to_string() }
    }

    /// A failure whose message has already been printed.
    pub(super) fn quiet(code: u8) -> Self {
        Self { code, message: String::new() }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::Unreachable { .. } => Self::UNREACHABLE,
            ClientError::Unauthorised { .. } => Self::UNAUTHORISED,
            ClientError::Broken { .. } | ClientError::Refused { .. } => Self::FAILED,
        };
        Self { code, message: error.to_string() }
    }
}

impl From<NodeError> for Failure {
    fn from(error: NodeError) -> Self {
        let code = match &error {
            NodeError::Unauthorised(_) => Self::UNAUTHORISED,
            NodeError::Unreachable(_) => Self::UNREACHABLE,
            NodeError::Invalid(_) => Self::USAGE,
            NodeError::Busy | NodeError::NotFound(_) | NodeError::Plan(_) | NodeError::Failed(_) => Self::FAILED,
        };
        Self { code, message: error.to_string() }
    }
}

impl From<BindError> for Failure {
    fn from(error: BindError) -> Self {
        match &error {
            BindError::Unprotected(_) => Self::usage(error),
            BindError::Taken { .. } => Self::failed(error),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

impl From<PullError> for Failure {
    fn from(error: PullError) -> Self {
        let code = match &error {
            PullError::Reference(_) | PullError::Folder(_) | PullError::NoFile { .. } | PullError::NoFolder { .. } => {
                Self::USAGE
            }
            PullError::NoSource { .. } => Self::UNREACHABLE,
            PullError::DiskFull { .. }
            | PullError::Storage { .. }
            | PullError::Http { .. }
            | PullError::Pip { .. }
            | PullError::Checksum { .. } => Self::FAILED,
        };
        Self { code, message: error.to_string() }
    }
}
