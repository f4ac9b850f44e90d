//! Who may call: programs on this machine, or whoever has the key; never a web page that a browser here has open.
//!
//! A page can make a browser send requests to 127.0.0.1. Such a request carries an `Origin` (or `Sec-Fetch-Site`) of
//! elsewhere, or, after DNS rebinding, a `Host` that is not this machine's own name; each of these is refused.
use super::error::ApiError;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// What is demanded of callers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guard {
    /// Present: every request but `/healthz` must carry it as a bearer token, and but the page that shows simulations: it
    /// holds nothing, and asks for the key itself.
    pub(crate) key: Option<Arc<str>>,
}

pub(crate) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match guard.admits(request.headers(), request.uri().path()) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            tracing::warn!(path = request.uri().path(), reason = error.message, "refused a request to the local API");
            error.into_response()
        }
    }
}

impl Guard {
    fn admits(&self, headers: &HeaderMap, path: &str) -> Result<(), ApiError> {
        let text = |name: header::HeaderName| headers.get(name).map(|v| v.to_str().unwrap_or("\u{fffd}"));
        let host = text(header::HOST).unwrap_or("");
        // With a key the caller has proved more than a host name can, and the name others know this machine by is not
        // ours to guess.
        if self.key.is_none() && !is_loopback(host) {
            return Err(ApiError::forbidden(format!(
                "the host `{host}` is not this machine: use http://127.0.0.1, or start the node with an --api-key"
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
        match &self.key {
            Some(key) if path != "/healthz" && path != "/" && !path.starts_with("/watch/") => {
                check_key(key, text(header::AUTHORIZATION))
            }
            Some(_) | None => Ok(()),
        }
    }
}

fn check_key(key: &str, authorization: Option<&str>) -> Result<(), ApiError> {
    let Some(given) = authorization.and_then(|a| a.strip_prefix("Bearer ")) else {
        return Err(ApiError::unauthorised("this node wants an API key: send `Authorization: Bearer KEY`"));
    };
    // Hashes of both are compared, so that the time taken tells nothing about the key.
    if blake3::hash(given.trim().as_bytes()) == blake3::hash(key.as_bytes()) {
        Ok(())
    } else {
        Err(ApiError::unauthorised("the API key is not this node's"))
    }
}

/// `127.0.0.1:9470`, `localhost`, `[::1]:80`; any port, because forwarded ports differ.
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

    fn status(guard: &Guard, pairs: &[(&'static str, &str)], path: &str) -> u16 {
        guard.admits(&headers(pairs), path).map_or_else(|e| e.status.as_u16(), |()| 200)
    }

    #[test]
    fn only_this_machine_and_no_page() {
        let guard = Guard::default();
        let local = ("host", "127.0.0.1:9470");
        assert_eq!(status(&guard, &[local], "/v1/models"), 200);
        assert_eq!(status(&guard, &[("host", "localhost:1")], "/"), 200);
        assert_eq!(status(&guard, &[("host", "[::1]:9470")], "/"), 200);
        assert_eq!(status(&guard, &[local, ("origin", "http://127.0.0.1:9470")], "/"), 200);
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
            assert_eq!(status(&guard, &[("host", host)], "/"), 403, "{host}");
        }
        assert_eq!(status(&guard, &[], "/"), 403);
        for origin in
            ["https://evil.example", "null", "http://127.0.0.1:8000", "http://localhost:9470", "127.0.0.1:9470"]
        {
            assert_eq!(status(&guard, &[local, ("origin", origin)], "/v1/completions"), 403, "{origin}");
        }
        assert_eq!(status(&guard, &[local, ("sec-fetch-site", "cross-site")], "/"), 403);
        assert_eq!(status(&guard, &[local, ("sec-fetch-site", "none")], "/"), 200);
    }

    #[test]
    fn a_key_is_demanded_where_there_is_one() {
        let guard = Guard { key: Some("s3cret".into()) };
        let host = ("host", "box.lan:9470");
        assert_eq!(status(&guard, &[host], "/v1/models"), 401);
        assert_eq!(status(&guard, &[host], "/healthz"), 200);
        assert_eq!(status(&guard, &[host, ("authorization", "Bearer wrong")], "/v1/models"), 401);
        assert_eq!(status(&guard, &[host, ("authorization", "s3cret")], "/v1/models"), 401);
        assert_eq!(status(&guard, &[host, ("authorization", "Bearer s3cret")], "/v1/models"), 200);
        let page = [host, ("authorization", "Bearer s3cret"), ("origin", "https://evil.example")];
        assert_eq!(status(&guard, &page, "/v1/models"), 403);
    }
}
