//! Endpoints that let a caller begin: the link of `meshnode open`, which a browser exchanges for a session key, and the
//! proof of the node's key, which a command requests before it sends its own.
use super::app::App;
use super::body::body;
use super::engine::Engine;
use super::error::ApiError;
use super::fields::Field;
use super::listener::Connection;
use super::sessions::LINK_TTL;
use axum::Json;
use axum::extract::{Query, Request, State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Longest nonce in a request for a proof; our client sends 64 digits.
const NONCE_BYTES_MAX: usize = 128;

/// Creates a link to the page.
pub(crate) async fn open<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let _: Value = body(request, &[]).await?; // require JSON here too: an HTML form cannot send it
    let token = app.guard.sessions.link(Instant::now()).map_err(ApiError::failed)?;
    Ok(Json(json!({"fragment": format!("token={}", token.as_str()), "seconds": LINK_TTL.as_secs()})))
}

/// Fields of [`TokenBody`].
pub(crate) const TOKEN: &[Field] = &[Field::text("token").required().about("The token of the link's fragment")];

#[derive(Deserialize)]
struct TokenBody {
    token: String,
}

/// Exchanges the token of a link for a session key.
pub(crate) async fn begin<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let given: TokenBody = body(request, TOKEN).await?;
    match app.guard.sessions.begin(&given.token, Instant::now()) {
        Some(key) => Ok(Json(json!({"key": key.map_err(ApiError::failed)?.as_str()}))),
        None => Err(ApiError::unauthorised(
            "this link was already used or is older than five minutes: run `meshnode open` again for a new one",
        )),
    }
}

#[derive(Deserialize)]
pub(crate) struct Question {
    nonce: String,
}

/// Proves to a command, before it sends its key, that this node knows the key of its data directory.
pub(crate) async fn proof<E: Engine>(
    State(app): State<App<E>>,
    Query(question): Query<Question>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    if !(16..=NONCE_BYTES_MAX).contains(&question.nonce.len()) {
        return Err(ApiError::invalid("nonce", format!("`nonce` must be 16 to {NONCE_BYTES_MAX} characters")));
    }
    let local = request.extensions().get::<Arc<Connection>>().map(|connection| connection.local());
    let proof = local.and_then(|local| app.guard.proof(local, &question.nonce));
    proof
        .map(|proof| Json(json!({"proof": proof})))
        .ok_or_else(|| ApiError::not_found("no_key", "this node has no key of its own"))
}
