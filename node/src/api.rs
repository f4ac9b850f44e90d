//! The local HTTP API: OpenAI's endpoints for programs, `/api/v1` for the commands, metrics for monitors. The only user
//! of axum.
//!
//! Next: `api/guard.rs` (who may call), `api/openai.rs`, `api/generation.rs` (one request from order to end).
use crate::telemetry::Metrics;
use axum::Router;
use axum::extract::Request;
use axum::http::header;
use axum::routing::{delete, get, post};
use error::ApiError;
use serde::de::DeserializeOwned;
use std::io;
use std::net::SocketAddr;

pub mod engine;
mod error;
mod generation;
mod grids;
mod guard;
mod idempotency;
mod listener;
mod management;
mod openai;
mod pieces;
mod request;

pub use engine::Engine;

/// Largest request body: a prompt of a million tokens of four bytes, with room for JSON's escapes.
const BODY_BYTES_MAX: usize = 8 << 20;

/// A bound API, ready to serve.
pub struct Api {
    listener: tokio::net::TcpListener,
    key: Option<String>,
}

impl Api {
    /// Takes the address. Anything but loopback is refused without a key.
    ///
    /// # Errors
    /// [`BindError`].
    pub async fn bind(address: SocketAddr, key: Option<String>) -> Result<Self, BindError> {
        let key = key.filter(|k| !k.is_empty());
        if !address.ip().is_loopback() && key.is_none() {
            return Err(BindError::Unprotected(address));
        }
        let listener =
            tokio::net::TcpListener::bind(address).await.map_err(|source| BindError::Taken { address, source })?;
        Ok(Self { listener, key })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` ends, then closes without waiting for streams that are still running.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn serve<E: Engine>(
        self,
        engine: E,
        metrics: Metrics,
        stop: impl Future<Output = ()> + Send,
    ) -> io::Result<()> {
        let router = router(App { engine, metrics, answers: idempotency::Answers::default() }, self.key);
        let serving = axum::serve(listener::Bounded::new(self.listener), router).into_future();
        tokio::select! {
            ended = serving => ended,
            () = stop => Ok(()),
        }
    }
}

/// Why the API cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Others could reach it.
    #[error(
        "{0} can be reached from other machines: set an API key with --api-key or MESHNODE_API_KEY, or listen on 127.0.0.1"
    )]
    Unprotected(SocketAddr),
    /// Usually somebody else listens there.
    #[error("cannot listen on {address} for the API: {source}; is a node running already? Choose another with --api")]
    Taken {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// What every handler sees.
#[derive(Clone)]
struct App<E> {
    engine: E,
    metrics: Metrics,
    answers: idempotency::Answers,
}

fn router<E: Engine>(app: App<E>, key: Option<String>) -> Router {
    let guard = guard::Guard { key: key.map(Into::into) };
    Router::new()
        .route("/v1/models", get(openai::models::<E>))
        .route("/v1/models/{*name}", get(openai::model::<E>))
        .route("/v1/chat/completions", post(openai::chat::<E>))
        .route("/v1/completions", post(openai::completion::<E>))
        .route("/healthz", get(management::health))
        .route("/readyz", get(management::ready::<E>))
        .route("/metrics", get(management::metrics::<E>))
        .route("/api/v1/state", get(management::state::<E>))
        .route("/api/v1/peers", get(management::peers::<E>))
        .route("/api/v1/jobs", get(management::jobs::<E>))
        .route("/api/v1/plan", post(management::plan::<E>))
        .route("/api/v1/deploy", post(management::deploy::<E>))
        .route("/api/v1/models/{*name}", delete(management::undeploy::<E>))
        .route("/api/v1/generate", post(management::generate::<E>))
        .route("/api/v1/grids", post(grids::submit::<E>).get(grids::list::<E>))
        .route("/api/v1/grids/plan", post(grids::plan::<E>))
        .route("/api/v1/grids/{job}", get(grids::view::<E>).delete(grids::cancel::<E>))
        .route("/api/v1/grids/{job}/picture", get(grids::picture::<E>))
        .route("/api/v1/grids/{job}/text", get(grids::text::<E>))
        .route("/", get(grids::overview))
        .route("/watch/{job}", get(grids::page))
        .route("/api/v1/grids/{job}/events", get(grids::events::<E>))
        .route("/api/v1/invite", post(management::invite::<E>))
        .route("/api/v1/approve", post(management::approve::<E>))
        .route("/api/v1/ban", post(management::ban::<E>))
        .route("/api/v1/drain", post(management::drain::<E>))
        .route("/api/v1/leave", post(management::leave::<E>))
        .fallback(|request: Request| async move {
            ApiError::not_found("unknown_url", format!("there is no {} {}", request.method(), request.uri().path()))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::method(format!("{} cannot be used with {}", request.uri().path(), request.method()))
        })
        .layer(axum::middleware::from_fn_with_state(guard, guard::check))
        .with_state(app)
}

/// The JSON body of a request.
async fn body<T: DeserializeOwned>(request: Request) -> Result<T, ApiError> {
    parse(&body_bytes(request).await?)
}

async fn body_bytes(request: Request) -> Result<axum::body::Bytes, ApiError> {
    let media = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    if !media.split(';').next().is_some_and(|m| m.trim().eq_ignore_ascii_case("application/json")) {
        return Err(ApiError::media_type());
    }
    axum::body::to_bytes(request.into_body(), BODY_BYTES_MAX).await.map_err(|error| {
        let too_large = std::error::Error::source(&error).is_some_and(|e| e.to_string().contains("length limit"));
        if too_large { ApiError::too_large(BODY_BYTES_MAX) } else { ApiError::invalid(None, error.to_string()) }
    })
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes)
        .map_err(|e| ApiError::invalid(None, format!("the body is not what was expected: {e}")))
}

/// Runs what takes long (tokenizing a book) beside the async threads.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(ApiError::failed("reading the request failed inside the node; this is a bug")))
}

#[cfg(test)]
mod tests;
