//! Downloads one file over HTTP: resumes with Range requests, checks length and hash, then renames. The only user of
//! ureq in `pull`.
use super::{Progress, PullError, beside, require_space};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Expected properties of the file.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    /// Length in bytes.
    pub(super) bytes: u64,
    /// SHA-256, lower-case hex.
    pub(super) sha256: String,
}

/// Most consecutive resumed connections without a new byte.
const STALLS_MAX: u32 = 4;
/// Timeout for name resolution and connection, so that an unreachable host does not delay the next source.
const CONNECT_MAX: Duration = Duration::from_secs(8);
/// Timeout for each read of a transfer.
const READ_MAX: Duration = Duration::from_secs(30);
/// Largest model file: 4 TiB is above any realistic model, and keeps sums from overflowing.
const FILE_BYTES_MAX: u64 = 4 << 40;

/// A file on a server, with the length and hash that the server announced.
pub(super) struct Remote {
    url: String,
    bytes: Option<u64>,
    sha256: Option<String>,
    /// Identifies the content, so that only the same one is resumed; empty if the server does not say.
    tag: String,
}

/// Downloads `url` to `target`. Checks the length and hash of `expected`, or, without it, the hash in the hub's
/// `X-Linked-ETag`, if there is one.
pub(super) fn download(
    url: &str,
    token: Option<&str>,
    target: &Path,
    expected: Option<&Expected>,
    progress: &dyn Progress,
) -> Result<(), PullError> {
    let remote = Remote::ask(url, token, expected)?.ok_or_else(|| not_found(url))?;
    if let Some(left) = remote.left(target) {
        require_space(target.parent().unwrap_or(Path::new(".")), left)?;
    }
    remote.download(token, target, progress)
}

/// The error for a file that the server does not have.
pub(super) fn not_found(url: &str) -> PullError {
    failed(url, "HTTP 404: file not found; check owner, repository and file name".into())
}

impl Remote {
    /// Asks the server for a file's length and hash; `None` if it has no such file. `expected` takes precedence.
    pub(super) fn ask(url: &str, token: Option<&str>, expected: Option<&Expected>) -> Result<Option<Self>, PullError> {
        let Some(head) = head(url, token)? else { return Ok(None) };
        let sha256 = expected.map(|e| e.sha256.clone()).or(head.sha256);
        let bytes = expected.map(|e| e.bytes).or(head.bytes);
        let tag = sha256.clone().or(head.etag).unwrap_or_default();
        Ok(Some(Self { url: url.to_owned(), bytes, sha256, tag }))
    }

    /// Length, if known.
    pub(super) fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// Bytes of a partial file with this content.
    pub(super) fn kept(&self, target: &Path) -> u64 {
        let same = std::fs::read_to_string(beside(target, "part.etag")).is_ok_and(|kept| kept == self.tag);
        let part = beside(target, "part");
        if same && !self.tag.is_empty() { std::fs::metadata(part).map_or(0, |m| m.len()) } else { 0 }
    }

    /// Bytes left to download, if known.
    pub(super) fn left(&self, target: &Path) -> Option<u64> {
        self.bytes.map(|bytes| bytes.saturating_sub(self.kept(target)))
    }

    /// Downloads the file to `target`, resuming a partial file with this content.
    pub(super) fn download(
        &self,
        token: Option<&str>,
        target: &Path,
        progress: &dyn Progress,
    ) -> Result<(), PullError> {
        let Self { url, bytes: total, sha256, tag } = self;
        let (part, tag_path) = (beside(target, "part"), beside(target, "part.etag"));
        // A partial file of another version is useless.
        let mut have = self.kept(target);
        if have == 0 {
            remove(&part)?;
        }
        // Write only if it changed: rewriting on a full disk would truncate it, and the partial file would become useless.
        if std::fs::read_to_string(&tag_path).ok().as_ref() != Some(tag) {
            std::fs::write(&tag_path, tag).map_err(|e| PullError::storage(&tag_path, e))?;
        }
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        progress.start(&name, have, *total);
        let mut stalls = 0;
        while total.is_none_or(|total| have < total) {
            let before = have;
            match transfer(url, token, &part, &mut have, *total, progress) {
                Ok(Transfer::Complete) => break,
                Ok(Transfer::Broken(what)) => {
                    stalls = if have > before { 0 } else { stalls + 1 };
                    if stalls > STALLS_MAX {
                        return Err(failed(url, format!("{what}; run the command again to resume from byte {have}")));
                    }
                    progress.note(&format!("{what}; resuming from byte {have}"));
                    std::thread::sleep(Duration::from_millis(250 << stalls));
                }
                Err(error) => return Err(error),
            }
        }
        finish(url, &part, target, *total, sha256.as_deref())?;
        remove(&tag_path)
    }
}

/// Checks the partial file and renames it to `target`.
pub(super) fn finish(
    source: &str,
    part: &Path,
    target: &Path,
    total: Option<u64>,
    sha256: Option<&str>,
) -> Result<(), PullError> {
    let file = File::open(part).map_err(|e| PullError::storage(part, e))?;
    let have = file.metadata().map_err(|e| PullError::storage(part, e))?.len();
    if let Some(total) = total.filter(|t| *t != have) {
        remove(part)?;
        return Err(failed(source, format!("expected {total} bytes, found {have}: the file was removed")));
    }
    if let Some(expected) = sha256 {
        let found = hash(part)?;
        if found != expected {
            remove(part)?;
            return Err(PullError::Checksum { source_name: source.to_owned(), expected: expected.to_owned(), found });
        }
    }
    let begins_with = |expected: &str| -> std::io::Result<bool> {
        let mut magic = [0; 4];
        File::open(part)?.read_exact(&mut magic)?;
        Ok(magic == expected.as_bytes())
    };
    let magic = [("gguf", "GGUF"), ("mesh", "MESH")];
    let magic = magic.into_iter().find(|(extension, _)| target.extension().is_some_and(|e| e == *extension));
    if let Some((_, magic)) = magic
        && !begins_with(magic).unwrap_or(false)
    {
        remove(part)?;
        return Err(failed(
            source,
            format!("the file does not begin with {magic}, so it is not a model: it was removed"),
        ));
    }
    file.sync_all().map_err(|e| PullError::storage(part, e))?;
    std::fs::rename(part, target).map_err(|e| PullError::storage(target, e))
}

/// Percent-encodes a URL path, except `/`.
pub(crate) fn encode_path(path: &str) -> String {
    path.bytes()
        .map(|b| match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => (b as char).to_string(),
            _ => format!("%{b:02X}"),
        })
        .collect()
}

struct Head {
    bytes: Option<u64>,
    sha256: Option<String>,
    etag: Option<String>,
}

/// Metadata of the file, from the server's response before any redirect; `None` if there is no such file.
fn head(url: &str, token: Option<&str>) -> Result<Option<Head>, PullError> {
    let request = authorised(agent().head(url), token);
    let response = request
        .config()
        .max_redirects(0)
        .max_redirects_will_error(false)
        .build()
        .call()
        .map_err(|e| failed(url, explain(&e)))?;
    let status = response.status().as_u16();
    let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
    let unquoted = |value: &str| value.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
    match status {
        200..=399 => {}
        401 | 403 => {
            return Err(failed(
                url,
                format!("HTTP {status}: the file requires authorisation; set HF_TOKEN to your access token"),
            ));
        }
        404 => return Ok(None),
        _ => return Err(failed(url, format!("HTTP {status}; try again later, or set HF_ENDPOINT to a mirror"))),
    }
    let length = if status < 300 { header("content-length") } else { None };
    let bytes = header("x-linked-size").or(length).and_then(|v| v.parse().ok());
    if let Some(bytes) = bytes.filter(|b| *b > FILE_BYTES_MAX) {
        return Err(failed(url, format!("the server reports {bytes} bytes, more than the limit of {FILE_BYTES_MAX}")));
    }
    let linked = header("x-linked-etag").map(unquoted);
    let sha256 = linked.clone().filter(|tag| tag.len() == 64 && tag.bytes().all(|b| b.is_ascii_hexdigit()));
    Ok(Some(Head { bytes, sha256, etag: linked.or(header("etag").map(unquoted)) }))
}

enum Transfer {
    /// The server sent the complete response.
    Complete,
    /// The connection ended early; the received bytes are in the partial file.
    Broken(String),
}

/// One request for the missing bytes. `have` is updated to the length of the partial file.
fn transfer(
    url: &str,
    token: Option<&str>,
    part: &Path,
    have: &mut u64,
    total: Option<u64>,
    progress: &dyn Progress,
) -> Result<Transfer, PullError> {
    let mut request = authorised(agent().get(url), token);
    if *have > 0 {
        request = request.header("range", format!("bytes={have}-"));
    }
    let mut response = match request.call() {
        Ok(response) => response,
        Err(error) => return Ok(Transfer::Broken(explain(&error))),
    };
    let status = response.status().as_u16();
    match status {
        206 if starts_at(&response, *have) => {}
        // A server without range support starts over. If it disagrees about the range, request the whole file.
        200 => *have = 0,
        206 | 416 => {
            *have = 0;
            remove(part)?;
            return Ok(Transfer::Broken("the server's file does not match the partial file; starting over".into()));
        }
        408 | 429 | 500..=599 => return Ok(Transfer::Broken(format!("HTTP {status}"))),
        _ => return Err(failed(url, format!("HTTP {status}; try again later, or set HF_ENDPOINT to a mirror"))),
    }
    let mut file =
        File::options().create(true).truncate(false).write(true).open(part).map_err(|e| PullError::storage(part, e))?;
    file.set_len(*have).map_err(|e| PullError::storage(part, e))?;
    std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(|e| PullError::storage(part, e))?;

    let announced = response.body().content_length().map(|length| have.saturating_add(length));
    let mut body = response.body_mut().with_config().limit(FILE_BYTES_MAX).reader();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = match body.read(&mut buffer) {
            Ok(0) if announced.is_some_and(|end| *have < end) => {
                return Ok(Transfer::Broken("the connection ended early".into()));
            }
            Ok(0) => return Ok(Transfer::Complete),
            Ok(count) => count,
            Err(error) => return Ok(Transfer::Broken(format!("the connection failed: {error}"))),
        };
        if total.is_some_and(|total| *have + count as u64 > total) {
            remove(part)?;
            return Err(failed(
                url,
                "the server sent more bytes than it announced: the partial file was removed".into(),
            ));
        }
        file.write_all(&buffer[..count]).map_err(|e| PullError::storage(part, e))?;
        *have += count as u64;
        progress.at(*have);
    }
}

fn starts_at(response: &ureq::http::Response<ureq::Body>, have: u64) -> bool {
    let range = response.headers().get("content-range").and_then(|v| v.to_str().ok()).unwrap_or("");
    range.strip_prefix("bytes ").and_then(|r| r.split('-').next()).is_some_and(|start| start == have.to_string())
}

fn authorised<B>(request: ureq::RequestBuilder<B>, token: Option<&str>) -> ureq::RequestBuilder<B> {
    match token {
        Some(token) => request.header("authorization", format!("Bearer {token}")),
        None => request,
    }
}

/// Trusts the certificates in `SSL_CERT_FILE` if it is set (for networks that inspect TLS), otherwise Mozilla's.
fn agent() -> ureq::Agent {
    static AGENT: OnceLock<ureq::Agent> = OnceLock::new();
    let build = || {
        let roots = std::env::var_os("SSL_CERT_FILE")
            .and_then(|path| std::fs::read(path).ok())
            .map(|pem| certificates(&pem))
            .filter(|certificates| !certificates.is_empty())
            .map_or(ureq::tls::RootCerts::WebPki, |c| ureq::tls::RootCerts::new_with_certs(&c));
        let tls = ureq::tls::TlsConfig::builder()
            .root_certs(roots)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .build();
        ureq::Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .user_agent(concat!("meshnode/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity") // ranges must refer to the uncompressed file
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_resolve(Some(CONNECT_MAX))
            .timeout_recv_response(Some(READ_MAX))
            .timeout_per_read(Some(READ_MAX))
            .build()
            .new_agent()
    };
    AGENT.get_or_init(build).clone()
}

fn certificates(pem: &[u8]) -> Vec<ureq::tls::Certificate<'static>> {
    ureq::tls::parse_pem(pem)
        .filter_map(|item| match item {
            Ok(ureq::tls::PemItem::Certificate(certificate)) => Some(certificate),
            Ok(_) | Err(_) => None,
        })
        .collect()
}

const NO_NAME: &str = "cannot resolve the host name (no network, or the host is blocked)";

#[expect(clippy::wildcard_enum_match_arm, reason = "ureq's error enum is open, and its messages are clear")]
fn explain(error: &ureq::Error) -> String {
    match error {
        ureq::Error::HostNotFound => NO_NAME.into(),
        ureq::Error::Io(error) if error.to_string().contains("failed to lookup address") => NO_NAME.into(),
        ureq::Error::ConnectionFailed => "cannot connect".into(),
        other => other.to_string(),
    }
}

fn hash(path: &Path) -> Result<String, PullError> {
    let mut file = File::open(path).map_err(|e| PullError::storage(path, e))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(|e| PullError::storage(path, e))? {
            0 => return Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()),
            count => hasher.update(&buffer[..count]),
        }
    }
}

pub(super) fn remove(path: &Path) -> Result<(), PullError> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(PullError::storage(path, error)),
    }
}

fn failed(url: &str, what: String) -> PullError {
    PullError::Http { url: url.to_owned(), what }
}
