//! Reads the JSON body of a request, within limits on its size and time, and parses it off the async threads.
use super::error::ApiError;
use super::fields::{self, Field};
use axum::extract::Request;
use axum::http::header;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Largest request body: a prompt of a million tokens at 4 bytes each, with room for JSON escapes.
pub(super) const BODY_BYTES_MAX: usize = 8 << 20;
/// Longest time a body may take to arrive: the largest body over a link of half a megabit per second.
const BODY_TIME_MAX: Duration = Duration::from_secs(150);

/// Parses the JSON body of a request, an object with `fields`.
pub(super) async fn body<T: DeserializeOwned>(request: Request, fields: &[Field]) -> Result<T, ApiError> {
    fields::read(&body_bytes(request).await?, fields)
}

pub(super) async fn body_bytes(request: Request) -> Result<axum::body::Bytes, ApiError> {
    body_bytes_up_to(request, BODY_BYTES_MAX).await
}

pub(super) async fn body_bytes_up_to(request: Request, bytes_max: usize) -> Result<axum::body::Bytes, ApiError> {
    let media = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    if !media.split(';').next().is_some_and(|m| m.trim().eq_ignore_ascii_case("application/json")) {
        return Err(ApiError::media_type());
    }
    let reading = axum::body::to_bytes(request.into_body(), bytes_max);
    let Ok(read) = tokio::time::timeout(BODY_TIME_MAX, reading).await else {
        return Err(ApiError::too_slow(BODY_TIME_MAX));
    };
    read.map_err(|error| {
        let too_large = std::error::Error::source(&error).is_some_and(|e| e.to_string().contains("length limit"));
        if too_large { ApiError::too_large(bytes_max) } else { ApiError::invalid(None, error.to_string()) }
    })
}

pub(super) fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes)
        .map_err(|e| ApiError::invalid(None, format!("the body does not have the expected form: {e}")))
}

/// Runs blocking work (tokenizing a long text takes milliseconds) off the async threads.
pub(super) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ApiError::failed(
            "internal error: the task that read the request panicked. This is a bug: report it with the node's log",
        ))
    })
}
