//! The local HTTP API: endpoints of OpenAI's and Anthropic's APIs for programs, `/api/v1` for the command line, metrics for
//! monitors.
//! The only user of axum.
//!
//! Next: `api/guard.rs` (access control), `api/endpoint.rs`, `api/generation.rs` (the life of one request).
use crate::api_key::ApiKey;
use crate::folders::Folders;
use crate::metrics::Metrics;
use app::App;
use axum::Router;
use axum::extract::Request;
use axum::routing::{MethodRouter, delete, get, post};
use error::ApiError;
use guard::{Access, Guard, Keys};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

mod answer;
mod anthropic;
mod app;
mod blocks;
mod body;
mod chat;
mod choices;
mod embeddings;
mod endpoint;
pub(crate) mod engine;
mod error;
mod events;
mod fields;
mod generation;
mod grammar;
mod grids;
mod guard;
mod idempotency;
mod listener;
mod login;
mod management;
mod models;
mod openapi;
mod output;
mod pieces;
mod request;
mod responses;
mod sessions;
mod tools;
mod turns;

pub(crate) use engine::Engine;
pub(crate) use management::INVITE_TTL_MAX;

/// A bound API, ready to serve.
pub(crate) struct Api {
    listener: tokio::net::TcpListener,
    keys: Keys,
    folders: Folders,
}

impl Api {
    /// Binds the address. With `key`, every caller must present it; without, only a loopback address is accepted.
    ///
    /// # Errors
    /// [`BindError`].
    pub(crate) async fn bind(address: SocketAddr, key: Option<String>) -> Result<Self, BindError> {
        let key = key.filter(|k| !k.is_empty()).map(ApiKey::given);
        if !address.ip().is_loopback() && key.is_none() {
            return Err(BindError::Unprotected(address));
        }
        let listener =
            tokio::net::TcpListener::bind(address).await.map_err(|source| BindError::Taken { address, source })?;
        Ok(Self { listener, keys: Keys { node: None, everyone: key }, folders: Folders::default() })
    }

    /// Requires this key, or the key of [`Self::bind`], for requests that administer the node.
    #[must_use]
    pub(crate) fn administered_with(mut self, key: ApiKey) -> Self {
        self.keys.node = Some(key);
        self
    }

    /// Restricts submitted simulations to writing below `folders`.
    #[must_use]
    pub(crate) fn writing_below(mut self, folders: Folders) -> Self {
        self.folders = folders;
        self
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// The socket is closed.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` resolves, then closes without waiting for running streams.
    ///
    /// # Errors
    /// The socket fails.
    pub(crate) async fn serve<E: Engine>(
        self,
        engine: E,
        metrics: Metrics,
        stop: impl Future<Output = ()> + Send,
    ) -> io::Result<()> {
        let guard = Guard::new(self.keys);
        let app = App {
            engine,
            metrics,
            answers: idempotency::Answers::default(),
            guard: guard.clone(),
            folders: Arc::new(self.folders),
        };
        let router = router(app, &guard);
        tokio::select! {
            () = listener::serve(self.listener, router, listener::Limits::default()) => Ok(()),
            () = stop => Ok(()),
        }
    }
}

/// Why the API cannot listen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    /// Not a loopback address, and no key is set.
    #[error(
        "{0} can be reached from other machines: set an API key with --api-key or MESHNODE_API_KEY, or listen on 127.0.0.1"
    )]
    Unprotected(SocketAddr),
    /// Usually another process listens on the address.
    #[error(
        "cannot listen on {address} for the API: {source}; a node may be running already: choose another address with --api"
    )]
    Taken {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// Method, path, required access and handler.
type Route<E> = (&'static str, &'static str, Access, MethodRouter<App<E>>);

/// The single list of routes, so that each has an [`Access`].
fn routes<E: Engine>() -> Vec<Route<E>> {
    use Access::{Administer, Open, Public};
    vec![
        ("GET", "/v1/models", Open, get(models::models::<E>)),
        ("GET", "/v1/models/{*name}", Open, get(models::model::<E>)),
        ("POST", "/v1/chat/completions", Open, post(endpoint::chat::<E>)),
        ("POST", "/v1/completions", Open, post(endpoint::completion::<E>)),
        ("POST", "/v1/responses", Open, post(endpoint::responses::<E>)),
        ("POST", "/v1/embeddings", Open, post(embeddings::embeddings::<E>)),
        ("POST", "/v1/messages", Open, post(endpoint::messages::<E>)),
        ("POST", "/v1/messages/count_tokens", Open, post(endpoint::count_tokens::<E>)),
        ("GET", "/openapi.json", Public, get(openapi::openapi)),
        ("GET", "/healthz", Public, get(management::health)),
        ("GET", "/readyz", Open, get(management::ready::<E>)),
        ("GET", "/metrics", Open, get(management::metrics::<E>)),
        ("GET", "/api/v1/proof", Public, get(login::proof::<E>)),
        ("POST", "/api/v1/open", Administer, post(login::open::<E>)),
        ("POST", "/api/v1/session", Public, post(login::begin::<E>)),
        ("GET", "/api/v1/state", Open, get(management::state::<E>)),
        ("GET", "/api/v1/peers", Open, get(management::peers::<E>)),
        ("GET", "/api/v1/jobs", Open, get(management::jobs::<E>)),
        ("POST", "/api/v1/plan", Open, post(management::plan::<E>)),
        ("POST", "/api/v1/deploy", Administer, post(management::deploy::<E>)),
        ("DELETE", "/api/v1/models/{*name}", Administer, delete(management::undeploy::<E>)),
        ("POST", "/api/v1/generate", Open, post(management::generate::<E>)),
        ("POST", "/api/v1/grids", Administer, post(grids::submit::<E>)),
        ("GET", "/api/v1/grids", Open, get(grids::list::<E>)),
        ("POST", "/api/v1/grids/plan", Open, post(grids::plan::<E>)),
        ("GET", "/api/v1/grids/{job}", Open, get(grids::view::<E>)),
        ("DELETE", "/api/v1/grids/{job}", Administer, delete(grids::cancel::<E>)),
        ("GET", "/api/v1/grids/{job}/picture", Open, get(grids::picture::<E>)),
        ("GET", "/api/v1/grids/{job}/text", Open, get(grids::text::<E>)),
        ("GET", "/api/v1/grids/{job}/events", Open, get(grids::events::<E>)),
        ("GET", "/", Public, get(grids::overview)),
        ("GET", "/watch/{job}", Public, get(grids::page)),
        ("POST", "/api/v1/invite", Administer, post(management::invite::<E>)),
        ("POST", "/api/v1/approve", Administer, post(management::approve::<E>)),
        ("POST", "/api/v1/ban", Administer, post(management::ban::<E>)),
        ("POST", "/api/v1/drain", Administer, post(management::drain::<E>)),
        ("POST", "/api/v1/leave", Administer, post(management::leave::<E>)),
    ]
}

fn router<E: Engine>(app: App<E>, guard: &Guard) -> Router {
    let mut router = Router::new();
    for (_, path, access, handler) in routes::<E>() {
        let door = axum::middleware::from_fn_with_state((guard.clone(), access), guard::admit);
        router = router.route(path, handler.route_layer(door));
    }
    router
        .fallback(|request: Request| async move {
            ApiError::not_found("unknown_url", format!("unknown URL: {} {}", request.method(), request.uri().path()))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            ApiError::method(format!("{} does not support the method {}", request.uri().path(), request.method()))
        })
        .layer(axum::middleware::from_fn_with_state(guard.clone(), guard::check))
        .layer(axum::middleware::from_fn(listener::follow))
        .layer(axum::middleware::from_fn(error::in_the_form_of_its_api))
        .with_state(app)
}

#[cfg(test)]
mod tests;
