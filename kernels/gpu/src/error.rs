//! Errors of device work as [`StageError`], and panics of CubeCL turned into errors.
use std::panic::{AssertUnwindSafe, catch_unwind};

use kernels_models::stage::StageError;

/// Turns panics into errors: CubeCL panics when a kernel does not compile or a device is lost.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T, StageError>) -> Result<T, StageError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(StageError::Device(panic_text(panic.as_ref()))))
}

/// The start of a panic message; the message for a kernel that does not compile contains its whole source.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    const MOST: usize = 600;
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic without a message");
    text.chars().take(MOST).collect()
}

/// A device error: the start of the error's text.
pub(crate) fn failed(error: impl std::fmt::Debug) -> StageError {
    StageError::Device(format!("{error:?}").chars().take(600).collect())
}

/// An error in what the caller asked for.
pub(crate) fn input(text: impl Into<String>) -> StageError {
    StageError::Input(text.into())
}
