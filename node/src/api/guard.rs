//! Access control of the API. Any local program may read and use models. Administration requires the node's key, which
//! other users of the machine do not have. Web pages of other origins are always rejected.
//!
//! A page can make a browser send requests to 127.0.0.1. Such a request carries a foreign `Origin` (or
//! `Sec-Fetch-Site`) or, after DNS rebinding, a foreign `Host`; each is rejected.
use super::error::ApiError;
use super::listener::Connection;
use super::sessions::Sessions;
use crate::api_key::ApiKey;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// What a route requires of its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing: the route discloses nothing, or checks its callers itself.
    Public,
    /// Nothing on a node without a key for all callers; otherwise a key.
    Open,
    /// A key: the route changes what the node does, writes files, or admits members.
    Administer,
}

/// The keys of an API. Either one grants full access.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    /// The key in the data directory, for administration.
    pub(crate) node: Option<ApiKey>,
    /// The key of `--api-key`. If set, every caller needs a key.
    pub(crate) everyone: Option<ApiKey>,
}

/// Checks callers against the keys and the open browser sessions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guard {
    keys: Arc<Keys>,
    /// Browser sessions begun with a link of `meshnode open`.
    pub(crate) sessions: Arc<Sessions>,
}

/// The caller's authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The request carried one of the keys, or the key of a browser session.
    pub(crate) has_key: bool,
}

/// Middleware around all routes: rejects foreign web pages and records the [`Caller`].
pub(crate) async fn check(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    match guard.origin(request.headers()) {
        Ok(()) => {
            let caller = guard.caller(request.headers());
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => refuse(&request, error),
    }
}

/// Middleware of one route: checks its [`Access`].
pub(crate) async fn admit(State((guard, access)): State<(Guard, Access)>, request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Caller>().copied().unwrap_or(Caller { has_key: false });
    let reserved = request.extensions().get::<Arc<Connection>>().is_some_and(|c| c.is_reserved());
    // The reserved slots are for callers with a key, so that many streams cannot lock out administration. Public routes
    // are allowed too: they are short, and a command first asks the node to prove that it knows the key.
    let admitted = if reserved && !caller.has_key && !matches!(access, Access::Public) {
        Err(ApiError::crowded())
    } else {
        guard.admits(access, caller, request.headers())
    };
    match admitted {
        Ok(()) => next.run(request).await,
        Err(error) => refuse(&request, error),
    }
}

fn refuse(request: &Request, error: ApiError) -> Response {
    tracing::warn!(path = request.uri().path(), reason = error.message, "rejected a request to the local API");
    error.into_response()
}

impl Guard {
    pub(crate) fn new(keys: Keys) -> Self {
        Self { keys: Arc::new(keys), sessions: Arc::default() }
    }

    /// The proof that the node knows its key, for a caller's `nonce`.
    pub(crate) fn proof(&self, address: std::net::SocketAddr, nonce: &str) -> Option<String> {
        self.keys.node.as_ref().map(|key| key.proof(address, nonce))
    }

    fn origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let text = |name: header::HeaderName| headers.get(name).map(|v| v.to_str().unwrap_or("\u{fffd}"));
        let host = text(header::HOST).unwrap_or("");
        // With a key for all callers, the `Host` check adds nothing, and the names that reach this machine are unknown.
        if self.keys.everyone.is_none() && !is_loopback(host) {
            return Err(ApiError::forbidden(format!(
                "the host `{host}` is not a loopback address: use http://127.0.0.1, or start the node with an --api-key"
            )));
        }
        if let Some(origin) = text(header::ORIGIN)
            && origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")) != Some(host)
        {
            return Err(ApiError::forbidden(format!("web pages of `{origin}` may not use this API")));
        }
        if let Some(site) = headers.get("sec-fetch-site").and_then(|v| v.to_str().ok())
            && !matches!(site, "same-origin" | "none")
        {
            return Err(ApiError::forbidden(format!("web pages may not use this API (sec-fetch-site: {site})")));
        }
        Ok(())
    }

    fn caller(&self, headers: &HeaderMap) -> Caller {
        let known = |given: &str| {
            let keys = [&self.keys.node, &self.keys.everyone];
            keys.into_iter().flatten().any(|key| key.is(given)) || self.sessions.holds(given)
        };
        Caller { has_key: keys(headers).any(|given| !given.is_empty() && known(given)) }
    }

    fn admits(&self, access: Access, caller: Caller, headers: &HeaderMap) -> Result<(), ApiError> {
        let required = match access {
            Access::Public => false,
            Access::Open => self.keys.everyone.is_some(),
            Access::Administer => true,
        };
        match (required && !caller.has_key, keys(headers).next()) {
            (false, _) => Ok(()),
            (true, Some(_)) => Err(ApiError::unauthorised("the API key is not this node's")),
            (true, None) if access == Access::Administer => Err(ApiError::unauthorised(
                "administering the node requires its key: send `Authorization: Bearer KEY`, with the key in `api.key` of the \
                 node's data directory",
            )),
            (true, None) => {
                Err(ApiError::unauthorised("this node requires an API key: send `Authorization: Bearer KEY`"))
            }
        }
    }
}

/// The keys that a request carries: as OpenAI's clients send one, and as Anthropic's do.
pub(super) fn keys(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| value.strip_prefix("Bearer "));
    [bearer, text("x-api-key")].into_iter().flatten().map(str::trim)
}

/// Whether `host` is as `127.0.0.1:9470`, `localhost` or `[::1]:80`. Any port is accepted, because forwarded ports
/// differ.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((name, port)) if port.is_empty() || is_port(port.strip_prefix(':')) => name,
            Some(_) | None => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) if is_port(Some(port)) => name,
            Some(_) => return false,
            None => host,
        },
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn is_port(text: Option<&str>) -> bool {
    text.is_some_and(|t| t.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(k, v)| (k.parse().unwrap(), v.parse().unwrap())).collect()
    }

    fn status(guard: &Guard, pairs: &[(&'static str, &str)], access: Access) -> u16 {
        let headers = headers(pairs);
        let admitted = guard.origin(&headers).and_then(|()| guard.admits(access, guard.caller(&headers), &headers));
        admitted.map_or_else(|e| e.status.as_u16(), |()| 200)
    }

    #[test]
    fn only_local_programs_and_no_foreign_page_may_call() {
        let guard = Guard::default();
        let status = |pairs: &[(&'static str, &str)]| status(&guard, pairs, Access::Open);
        let local = ("host", "127.0.0.1:9470");
        assert_eq!(status(&[local]), 200);
        assert_eq!(status(&[("host", "localhost:1")]), 200);
        assert_eq!(status(&[("host", "[::1]:9470")]), 200);
        assert_eq!(status(&[local, ("origin", "http://127.0.0.1:9470")]), 200);
        for host in [
            "evil.example",
            "evil.example:9470",
            "127.0.0.1.evil.example",
            "localhost.evil",
            "",
            "[::1",
            "10.0.0.1",
            "127.0.0.1:9470:1",
        ] {
            assert_eq!(status(&[("host", host)]), 403, "{host}");
        }
        assert_eq!(status(&[]), 403);
        for origin in
            ["https://evil.example", "null", "http://127.0.0.1:8000", "http://localhost:9470", "127.0.0.1:9470"]
        {
            assert_eq!(status(&[local, ("origin", origin)]), 403, "{origin}");
        }
        assert_eq!(status(&[local, ("sec-fetch-site", "cross-site")]), 403);
        assert_eq!(status(&[local, ("sec-fetch-site", "none")]), 200);
    }

    #[test]
    fn a_key_for_all_callers_is_required() {
        let everyone = Some(ApiKey::given("s3cret"));
        let guard = Guard::new(Keys { node: Some(ApiKey::given("node's")), everyone });
        let host = ("host", "box.lan:9470");
        let bearer = |text| ("authorization", text);
        for access in [Access::Open, Access::Administer] {
            assert_eq!(status(&guard, &[host], access), 401);
            assert_eq!(status(&guard, &[host, bearer("Bearer wrong")], access), 401);
            assert_eq!(status(&guard, &[host, bearer("s3cret")], access), 401);
            assert_eq!(status(&guard, &[host, bearer("Bearer s3cret")], access), 200);
            assert_eq!(status(&guard, &[host, bearer("Bearer node's")], access), 200);
        }
        assert_eq!(status(&guard, &[host], Access::Public), 200);
        let [right, wrong] = ["s3cret", "wrong"].map(|key| ("x-api-key", key));
        assert_eq!(status(&guard, &[host, right], Access::Administer), 200, "as Anthropic's clients send it");
        assert_eq!(status(&guard, &[host, wrong], Access::Open), 401);
        assert_eq!(status(&guard, &[host, bearer("Bearer wrong"), right], Access::Open), 200);
        let page = [host, right, ("origin", "https://evil.example")];
        assert_eq!(status(&guard, &page, Access::Open), 403);
        let page = [host, bearer("Bearer s3cret"), ("origin", "https://evil.example")];
        assert_eq!(status(&guard, &page, Access::Open), 403);
    }

    #[test]
    fn on_loopback_only_administration_requires_the_nodes_key() {
        let guard = Guard::new(Keys { node: Some(ApiKey::given("node's")), everyone: None });
        let (host, key) = (("host", "127.0.0.1:9470"), ("authorization", "Bearer node's"));
        // OpenAI's clients always send a key, even where none is required.
        let any = ("authorization", "Bearer sk-none");
        assert_eq!(status(&guard, &[host], Access::Open), 200);
        assert_eq!(status(&guard, &[host, any], Access::Open), 200);
        assert_eq!(status(&guard, &[host], Access::Administer), 401);
        assert_eq!(status(&guard, &[host, any], Access::Administer), 401);
        assert_eq!(status(&guard, &[host, ("authorization", "Bearer ")], Access::Administer), 401);
        assert_eq!(status(&guard, &[host, key], Access::Administer), 200);
        // Without any key, no request may administer the node.
        assert_eq!(status(&Guard::default(), &[host, key], Access::Administer), 401);
    }
}
