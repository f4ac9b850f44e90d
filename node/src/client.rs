//! The commands' client of a node's HTTP API, with error messages that include the next step.
use crate::api_key::ApiKey;
use crate::config::API_DEFAULT;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Longest response read as a whole: the state of the largest mesh.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Connection timeout; a node on this machine accepts immediately or not at all.
const CONNECT_MAX: Duration = Duration::from_secs(3);

/// A client of one node's API.
#[derive(Clone)]
pub(crate) struct Client {
    base: String,
    key: Key,
    agent: ureq::Agent,
}

/// The API key that a client sends.
#[derive(Clone, Debug)]
pub(crate) enum Key {
    /// Given by the user, or the key of a node in this process. Sent without a check.
    Given(String),
    /// In one of several files, tried in order. A key is sent only to a node that proves that it knows the key, because
    /// another user's program may have taken the node's port.
    InFiles(Vec<PathBuf>, Arc<OnceLock<KeySearch>>),
}

/// Result of the search in the key files.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeySearch {
    key: Option<ApiKey>,
    /// For each file, why its key is not sent.
    why: Vec<String>,
}

impl Key {
    /// A key to search in `files`.
    pub(crate) fn in_files(files: Vec<PathBuf>) -> Self {
        Self::InFiles(files, Arc::default())
    }
}

impl Client {
    /// `address`: `HOST:PORT` or `http://HOST:PORT`; `None` means [`API_DEFAULT`].
    pub(crate) fn new(address: Option<&str>, key: Key) -> Self {
        let address = address.map_or_else(|| API_DEFAULT.to_string(), str::to_owned);
        // Nodes listen on 127.0.0.1. `localhost` may resolve to ::1 first, where another program may listen.
        let address = address.replace("localhost:", "127.0.0.1:");
        let base = match address.strip_prefix("http://") {
            Some(_) => address.trim_end_matches('/').to_owned(),
            None => format!("http://{}", address.trim_end_matches('/')),
        };
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .proxy(None) // a web proxy cannot reach a node on this machine
            .timeout_connect(Some(CONNECT_MAX))
            .user_agent(concat!("meshnode/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Self { base, key, agent }
    }

    /// `http://HOST:PORT`.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Whether anything answers HTTP at the address.
    pub(crate) fn listens(&self) -> bool {
        self.agent.get(format!("{}/healthz", self.base)).call().is_ok()
    }

    /// GET of a `T`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn get_as<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let request = self.authorised(self.agent.get(format!("{}{path}", self.base)));
        self.parse(request.call())
    }

    /// GET of plain text.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn get_text(&self, path: &str) -> Result<String, ClientError> {
        let request = self.authorised(self.agent.get(format!("{}{path}", self.base)));
        let mut response = self.check(request.call())?;
        let body = response.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        body.read_to_string().map_err(|e| ClientError::Broken { base: self.base.clone(), what: e.to_string() })
    }

    /// POST of JSON; returns the parsed JSON.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.post_as(path, body)
    }

    /// POST of JSON, answered with a `T`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn post_as<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, ClientError> {
        self.parse(self.send(path, body))
    }

    /// DELETE; returns the parsed JSON.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn delete(&self, path: &str) -> Result<Value, ClientError> {
        self.delete_as(path)
    }

    /// DELETE, answered with a `T`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub(crate) fn delete_as<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let request = self.authorised(self.agent.delete(format!("{}{path}", self.base)));
        self.parse(request.call())
    }

    /// POST of JSON with a response in JSON lines. Ends when the node closes the connection. Dropping the iterator
    /// closes it, which cancels the request.
    ///
    /// # Errors
    /// [`ClientError`]; an invalid line or a broken connection is an item.
    pub(crate) fn stream(
        &self,
        path: &str,
        body: &Value,
    ) -> Result<impl Iterator<Item = Result<Value, ClientError>> + use<>, ClientError> {
        let response = self.check(self.send(path, body))?;
        Ok(self.lines::<Value>(response))
    }

    /// GET with a response in JSON lines, each a `T`.
    ///
    /// # Errors
    /// [`ClientError`]; an invalid line or a broken connection is an item.
    pub(crate) fn get_stream<T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<impl Iterator<Item = Result<T, ClientError>> + use<T>, ClientError> {
        let request = self.authorised(self.agent.get(format!("{}{path}", self.base)));
        let response = self.check(request.call())?;
        Ok(self.lines::<T>(response))
    }

    fn lines<T: DeserializeOwned>(
        &self,
        response: ureq::http::Response<ureq::Body>,
    ) -> impl Iterator<Item = Result<T, ClientError>> + use<T> {
        let reader = BufReader::new(response.into_body().into_with_config().limit(u64::MAX).reader());
        let base = self.base.clone();
        reader.lines().map(move |line| {
            let line = line.map_err(|e| ClientError::Broken { base: base.clone(), what: e.to_string() })?;
            serde_json::from_str(&line).map_err(|e| ClientError::Broken { base: base.clone(), what: e.to_string() })
        })
    }

    fn send(&self, path: &str, body: &Value) -> Result<ureq::http::Response<ureq::Body>, ureq::Error> {
        self.authorised(self.agent.post(format!("{}{path}", self.base)))
            .header("content-type", "application/json")
            .send(body.to_string())
    }

    fn authorised<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match self.key() {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    fn key(&self) -> Option<&str> {
        match &self.key {
            Key::Given(key) => Some(key),
            Key::InFiles(files, found) => found.get_or_init(|| self.look(files)).key.as_ref().map(ApiKey::as_str),
        }
    }

    /// The first key in the files that the node proves to know.
    fn look(&self, files: &[PathBuf]) -> KeySearch {
        let mut found = KeySearch::default();
        let host = self.base.strip_prefix("http://").unwrap_or(&self.base);
        let Ok(address) = host.parse::<SocketAddr>() else {
            found.why.push(format!("`{host}` is not an IP address with a port, so no key file was searched"));
            return found;
        };
        for file in files {
            match ApiKey::read(file) {
                Ok(Some(key)) if self.proves(&key, address) => return KeySearch { key: Some(key), why: Vec::new() },
                Ok(Some(_)) => found
                    .why
                    .push(format!("{} holds the key of another node, or this node did not prove it", file.display())),
                Ok(None) => found.why.push(format!("{} is not there", file.display())),
                Err(why) => found.why.push(why),
            }
        }
        found
    }

    fn proves(&self, key: &ApiKey, address: SocketAddr) -> bool {
        let Ok(nonce) = ApiKey::random() else { return false };
        let question = self.agent.get(format!("{}/api/v1/proof?nonce={}", self.base, nonce.as_str()));
        // Another program on the port may accept the request and never answer.
        let answer = question.config().timeout_global(Some(CONNECT_MAX)).build().call();
        let text =
            answer.ok().and_then(|mut answer| answer.body_mut().with_config().limit(1 << 10).read_to_string().ok());
        let answer: Option<Value> = text.and_then(|text| serde_json::from_str(&text).ok());
        answer.is_some_and(|answer| answer["proof"] == key.proof(address, nonce.as_str()))
    }

    /// What to do about status 401.
    fn advice(&self) -> String {
        match &self.key {
            Key::Given(_) => {
                "the key of --api-key or --api-key-file is not the key of this node, which is `api.key` in its data \
                 directory or the --api-key that it was started with"
                    .to_owned()
            }
            Key::InFiles(_, found) => {
                let why = found.get().map(|found| found.why.join("; ")).unwrap_or_default();
                format!(
                    "no API key for it was found ({why}). Run this command as the node's user, or pass --api-key-file DATA_DIR/{}, or \
                     --api-key KEY if the node was started with one",
                    crate::api_key::FILE
                )
            }
        }
    }

    fn check(
        &self,
        answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<ureq::http::Response<ureq::Body>, ClientError> {
        let mut response = answer.map_err(|e| self.unreachable(&e))?;
        let status = response.status().as_u16();
        if status < 400 {
            return Ok(response);
        }
        let text =
            response.body_mut().with_config().limit(1 << 20).lossy_utf8(true).read_to_string().unwrap_or_default();
        let parsed: Option<Value> = serde_json::from_str(&text).ok();
        let foreign = || {
            format!(
                "{} answered with HTTP {status}, but not as a meshnode does: another program may use this port; check --api",
                self.base
            )
        };
        let message = parsed.as_ref().and_then(|v| v["error"]["message"].as_str()).map_or_else(foreign, str::to_owned);
        Err(match status {
            401 => ClientError::Unauthorised { base: self.base.clone(), message: self.advice() },
            403 => ClientError::Unauthorised { base: self.base.clone(), message },
            _ => ClientError::Refused { status, message },
        })
    }

    fn parse<T: DeserializeOwned>(
        &self,
        answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<T, ClientError> {
        let mut response = self.check(answer)?;
        let text = response
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_string()
            .map_err(|e| ClientError::Broken { base: self.base.clone(), what: e.to_string() })?;
        serde_json::from_str(&text).map_err(|e| ClientError::Broken {
            base: self.base.clone(),
            what: format!(
                "expected the answer of a meshnode, found something else ({e}): another program may use this port; check \
                 --api"
            ),
        })
    }

    fn unreachable(&self, error: &ureq::Error) -> ClientError {
        let refused = matches!(error, ureq::Error::ConnectionFailed | ureq::Error::HostNotFound)
            || matches!(error, ureq::Error::Io(io) if io.kind() == std::io::ErrorKind::ConnectionRefused);
        match refused {
            true => ClientError::Unreachable { base: self.base.clone() },
            false => ClientError::Broken {
                base: self.base.clone(),
                what: format!("{error}; check that --api is HOST:PORT of a running node"),
            },
        }
    }
}

/// Why a request to a node failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No node listens at the address.
    #[error("no node listens on {base}: start one with `meshnode up`, or name another with --api")]
    Unreachable {
        /// The address.
        base: String,
    },
    /// The connection failed, or the response is not valid.
    #[error("the request to {base} failed: {what}")]
    Broken {
        /// The address.
        base: String,
        /// The error.
        what: String,
    },
    /// The node requires a key, or a different one.
    #[error("the node on {base} rejected the request: {message}")]
    Unauthorised {
        /// The address.
        base: String,
        /// The reason and the next step.
        message: String,
    },
    /// The node answered with an error.
    #[error("{message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// The message of the error.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_node_is_reported_with_how_to_start_one() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let client = Client::new(Some(&format!("127.0.0.1:{port}")), Key::in_files(Vec::new()));
        let error = client.get_as::<Value>("/api/v1/state").unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
        assert!(error.to_string().contains("meshnode up"), "{error}");
        assert!(!client.listens());
    }

    #[test]
    fn addresses_are_accepted_with_and_without_scheme() {
        let base = |address| Client::new(address, Key::in_files(Vec::new())).base().to_owned();
        assert_eq!(base(None), "http://127.0.0.1:9470");
        assert_eq!(base(Some("http://10.0.0.1:9/")), "http://10.0.0.1:9");
        assert_eq!(base(Some("localhost:80")), "http://127.0.0.1:80");
    }
}
