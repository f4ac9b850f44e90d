//! How a browser gets to administer the node: `meshnode open` prints a link that holds a token, good once and for a short
//! time; the page exchanges it for a key of its own, which the browser keeps for that page of that port, as long as its tab.
//!
//! Not a cookie: a browser sends those to every port of a host, so also to other users' programs on this machine. The token is
//! in the link's fragment, which a browser sends to no server.
use super::engine::Engine;
use super::error::ApiError;
use super::fields::Field;
use super::listener::Connection;
use super::{App, body};
use crate::api_key::ApiKey;
use axum::Json;
use axum::extract::{Query, Request, State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a link is good for: to copy it into a browser.
const LINK_TTL: Duration = Duration::from_secs(5 * 60);
/// How long a page may administer the node: a working day.
const SESSION_TTL: Duration = Duration::from_secs(12 * 3600);
/// Links and pages at once, each: one person has few. The oldest goes.
const EACH_MAX: usize = 16;
/// Longest question of a caller that wants a proof: it sends 64 digits.
const NONCE_BYTES_MAX: usize = 128;

/// Links that were not used, and pages that may administer.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    links: Mutex<VecDeque<(ApiKey, Instant)>>,
    pages: Mutex<VecDeque<(ApiKey, Instant)>>,
}

impl Sessions {
    /// A token for a link.
    fn link(&self, now: Instant) -> Result<ApiKey, String> {
        add(&self.links, now + LINK_TTL)
    }

    /// A key for a page, if `token` is a link's that was not used and is not too old.
    fn begin(&self, token: &str, now: Instant) -> Option<Result<ApiKey, String>> {
        let mut links = self.links.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        links.retain(|(_, end)| *end > now);
        let at = links.iter().position(|(link, _)| link.is(token))?;
        links.remove(at);
        Some(add(&self.pages, now + SESSION_TTL))
    }

    /// Whether a page was given this key.
    pub(crate) fn holds(&self, key: &str) -> bool {
        self.holds_at(key, Instant::now())
    }

    fn holds_at(&self, key: &str, now: Instant) -> bool {
        let pages = self.pages.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        pages.iter().any(|(page, end)| *end > now && page.is(key))
    }
}

fn add(list: &Mutex<VecDeque<(ApiKey, Instant)>>, end: Instant) -> Result<ApiKey, String> {
    let key = ApiKey::random()?;
    let mut list = list.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    while list.len() >= EACH_MAX {
        list.pop_front();
    }
    list.push_back((key.clone(), end));
    Ok(key)
}

/// A link to the page, for the caller's browser.
pub(crate) async fn open<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let _: Value = body(request, &[]).await?; // JSON is demanded here too: a form of a web page cannot send it
    let token = app.guard.sessions.link(Instant::now()).map_err(ApiError::failed)?;
    Ok(Json(json!({"fragment": format!("token={}", token.as_str()), "seconds": LINK_TTL.as_secs()})))
}

#[derive(Deserialize)]
struct TokenBody {
    token: String,
}

/// A key for the page that a link was opened with.
pub(crate) async fn begin<E: Engine>(State(app): State<App<E>>, request: Request) -> Result<Json<Value>, ApiError> {
    let given: TokenBody = body(request, &[Field::text("token").required()]).await?;
    match app.guard.sessions.begin(&given.token, Instant::now()) {
        Some(key) => Ok(Json(json!({"key": key.map_err(ApiError::failed)?.as_str()}))),
        None => Err(ApiError::unauthorised(
            "this link was used before, or is older than five minutes: run `meshnode open` again for a new one",
        )),
    }
}

#[derive(Deserialize)]
pub(crate) struct Question {
    nonce: String,
}

/// Shows that this node knows the key of its data directory, to a command that is about to send it.
pub(crate) async fn proof<E: Engine>(
    State(app): State<App<E>>,
    Query(question): Query<Question>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    if !(16..=NONCE_BYTES_MAX).contains(&question.nonce.len()) {
        return Err(ApiError::invalid("nonce", format!("`nonce` must have 16 to {NONCE_BYTES_MAX} characters")));
    }
    let local = request.extensions().get::<Arc<Connection>>().map(|connection| connection.local());
    let proof = local.and_then(|local| app.guard.proof(local, &question.nonce));
    proof
        .map(|proof| Json(json!({"proof": proof})))
        .ok_or_else(|| ApiError::not_found("no_key", "this node has no key of its own"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_good_once_and_for_five_minutes() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let link = sessions.link(now).unwrap();
        assert!(sessions.begin("other", now).is_none());
        let key = sessions.begin(link.as_str(), now).unwrap().unwrap();
        assert!(sessions.begin(link.as_str(), now).is_none(), "it was used");
        assert!(sessions.holds_at(key.as_str(), now) && !sessions.holds_at(link.as_str(), now));
        assert!(!sessions.holds_at(key.as_str(), now + SESSION_TTL));
        let late = sessions.link(now).unwrap();
        assert!(sessions.begin(late.as_str(), now + LINK_TTL).is_none());
    }

    #[test]
    fn links_and_pages_are_bounded() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let first = sessions.link(now).unwrap();
        (0..EACH_MAX).for_each(|_| drop(sessions.link(now).unwrap()));
        assert!(sessions.begin(first.as_str(), now).is_none(), "the oldest is gone");
        assert_eq!(sessions.links.lock().unwrap().len(), EACH_MAX);
    }
}
