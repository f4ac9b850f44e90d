//! Runs several node processes on this machine, for the demo and the system tests.
use crate::api_key::ApiKey;
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a node's first line: at its first start a node measures its device.
const START_MAX: Duration = Duration::from_secs(240);

/// Process ids of nodes that were started and have not been waited for.
static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Kills every node process that this process started, before it exits; returns how many there were.
pub fn kill_all() -> usize {
    let children = std::mem::take(&mut *children());
    for pid in children.iter().filter_map(|pid| rustix::process::Pid::from_raw(pid.cast_signed())) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    children.len()
}

fn children() -> MutexGuard<'static, BTreeSet<u32>> {
    CHILDREN.lock()
}

/// A node process with its own data directory and ports. Killed when dropped.
pub struct LocalNode {
    /// Its name.
    pub name: String,
    /// Its local API.
    pub api: SocketAddr,
    /// P: gossip UDP and discovery TCP; the data plane is P + 1.
    pub port: u16,
    /// The ticket it printed; empty if the node cannot admit others.
    pub ticket: String,
    /// Its data directory; removed with the cluster's folder.
    pub data_dir: PathBuf,
    /// The API key for administering it.
    key: ApiKey,
    child: Child,
}

/// How to start a node.
#[derive(Clone, Debug, Default)]
pub struct LocalNodeOptions {
    /// Display name.
    pub name: String,
    /// `--device`; the processor if `None`.
    pub device: Option<String>,
    /// `--memory`, bytes.
    pub memory: Option<u64>,
    /// `--threads`.
    pub threads: Option<usize>,
    /// A ticket: join that mesh instead of creating one.
    pub join: Option<String>,
    /// Where this node caches weights it gets from peers (`MESHNODE_CACHE`); the user's own cache if `None`.
    pub cache_dir: Option<PathBuf>,
    /// Additional flags.
    pub flags: Vec<String>,
}

impl LocalNode {
    /// Starts `exe` under `dir` and waits for its ticket.
    ///
    /// # Errors
    /// It could not be started, or exited before it printed its ticket; its log is quoted.
    pub fn spawn(exe: &Path, dir: &Path, options: &LocalNodeOptions) -> std::io::Result<Self> {
        Self::spawn_on(exe, dir, options, free_port()?)
    }

    /// Like [`Self::spawn`], with the node's port P given.
    ///
    /// # Errors
    /// As [`Self::spawn`].
    pub fn spawn_on(exe: &Path, dir: &Path, options: &LocalNodeOptions, port: u16) -> std::io::Result<Self> {
        // Another process may bind the port before the node does; then the node reports an error.
        let api = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let data_dir = dir.join(&options.name);
        std::fs::create_dir_all(&data_dir)?;
        // The directory may exist, with a cache in it; the node requires it to be private to the user.
        std::fs::set_permissions(&data_dir, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        let log_path = data_dir.join("log");
        let mut command = Command::new(exe);
        match &options.join {
            Some(ticket) => command.args(["join", ticket]),
            None => command.arg("up"),
        };
        command
            .args(["--name", &options.name, "--listen", "127.0.0.1", "--no-mdns"])
            .args(["--port", &port.to_string(), "--api", &api.to_string()])
            .args(["--device", options.device.as_deref().unwrap_or("cpu"), "--data-dir"])
            .arg(&data_dir)
            .args(options.memory.iter().flat_map(|m| ["--memory".to_owned(), m.to_string()]))
            .args(options.threads.iter().flat_map(|t| ["--threads".to_owned(), t.to_string()]))
            .args(&options.flags)
            .envs(options.cache_dir.iter().map(|d| ("MESHNODE_CACHE", d)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log_path)?);
        let mut child = command.spawn()?;
        children().insert(child.id());
        let ticket = first_line(&mut child).ok_or_else(|| {
            let _ = child.kill();
            let _ = child.wait();
            children().remove(&child.id());
            let log = std::fs::read_to_string(&log_path).unwrap_or_default();
            std::io::Error::other(format!("node `{}` did not start:\n{log}", options.name))
        })?;
        let key = ApiKey::load_or_create(&data_dir).map_err(std::io::Error::other)?;
        Ok(Self { name: options.name.clone(), api, port, ticket, data_dir, key, child })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGKILL: the node cannot say goodbye to its peers.
    pub fn kill(&mut self) {
        // Remove the id first: after `wait` the operating system may reuse it.
        children().remove(&self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal by name (`STOP`, `CONT`, `TERM`).
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Waits up to `limit` for the process to exit by itself.
    pub fn wait(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if let Ok(Some(status)) = self.child.try_wait() {
                children().remove(&self.child.id());
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    }

    /// Whether the process still runs.
    pub fn alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.data_dir.join("log")).unwrap_or_default()
    }

    /// `GET path` as JSON.
    ///
    /// # Errors
    /// No response, or not JSON; an error response is quoted with its body.
    pub fn get(&self, path: &str) -> std::io::Result<Value> {
        read_json(
            agent(Some(Duration::from_secs(30))).get(self.url(path)).header("authorization", self.bearer()).call(),
        )
    }

    /// `GET path` as text.
    ///
    /// # Errors
    /// No response, or an error response, quoted with its body.
    pub fn text(&self, path: &str) -> std::io::Result<String> {
        read_text(
            agent(Some(Duration::from_secs(30))).get(self.url(path)).header("authorization", self.bearer()).call(),
        )
    }

    /// `POST path` with a JSON body; returns the response as JSON.
    ///
    /// # Errors
    /// No response, or not JSON; an error response is quoted with its body.
    pub fn post(&self, path: &str, body: &Value) -> std::io::Result<Value> {
        let request = agent(Some(Duration::from_secs(600))).post(self.url(path));
        read_json(request.header("authorization", self.bearer()).send_json(body))
    }

    /// `DELETE path`; returns the response as JSON.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub fn delete(&self, path: &str) -> std::io::Result<Value> {
        let request = agent(Some(Duration::from_secs(30))).delete(self.url(path));
        read_json(request.header("authorization", self.bearer()).call())
    }

    /// `POST path`; yields the response line by line as it arrives.
    ///
    /// # Errors
    /// No response, or an error response, quoted with its body.
    pub fn post_lines(
        &self,
        path: &str,
        body: &Value,
    ) -> std::io::Result<impl Iterator<Item = std::io::Result<String>> + use<>> {
        let request = agent(None).post(self.url(path)).header("authorization", self.bearer());
        let response = request.send_json(body).map_err(std::io::Error::other)?;
        if !response.status().is_success() {
            let status = response.status();
            let text = response.into_body().read_to_string().unwrap_or_default();
            return Err(std::io::Error::other(format!("{status}: {text}")));
        }
        Ok(BufReader::new(response.into_body().into_reader()).lines())
    }

    /// Polls `/api/v1/state` until `ready` accepts it.
    ///
    /// # Errors
    /// It took longer than `limit`; the last state is quoted.
    pub fn wait_state(&self, limit: Duration, mut ready: impl FnMut(&Value) -> bool) -> std::io::Result<Value> {
        let end = Instant::now() + limit;
        loop {
            let state = self.get("/api/v1/state");
            match state {
                Ok(state) if ready(&state) => return Ok(state),
                state if Instant::now() > end => {
                    return Err(std::io::Error::other(format!(
                        "node `{}`: did not reach the expected state within {limit:?}: {state:?}",
                        self.name
                    )));
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Waits until the node sees `count` living members, itself included, and has the capacity of each: the planner can
    /// only use members whose capacity it has.
    ///
    /// # Errors
    /// As [`Self::wait_state`].
    pub fn wait_members(&self, count: usize, limit: Duration) -> std::io::Result<Value> {
        self.wait_state(limit, |state| {
            let peers = state["peers"].as_array().map(Vec::as_slice).unwrap_or_default();
            let mut alive = peers.iter().filter(|peer| peer["state"] == "alive");
            alive.clone().count() == count && alive.all(|peer| peer["memory_total"].as_u64() > Some(0))
        })
    }

    /// The `Authorization` header of a caller that administers the node.
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.key.as_str())
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.api)
    }
}

impl Drop for LocalNode {
    fn drop(&mut self) {
        self.kill();
    }
}

fn agent(limit: Option<Duration>) -> ureq::Agent {
    ureq::Agent::config_builder().timeout_global(limit).http_status_as_error(false).build().into()
}

fn read_text(answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> std::io::Result<String> {
    let response = answer.map_err(std::io::Error::other)?;
    let status = response.status();
    let text = response.into_body().read_to_string().map_err(std::io::Error::other)?;
    if !status.is_success() {
        return Err(std::io::Error::other(format!("{status}: {text}")));
    }
    Ok(text)
}

fn read_json(answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> std::io::Result<Value> {
    let text = read_text(answer)?;
    if text.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&text).map_err(std::io::Error::other)
}

/// The first line of a child's stdout, or `None` if the child exits or prints nothing in time. The rest is read and
/// dropped, so that the child never blocks on a full pipe.
fn first_line(child: &mut Child) -> Option<String> {
    let stdout = child.stdout.take()?;
    let (sender, line) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || {
        for text in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.try_send(text);
        }
    });
    line.recv_timeout(START_MAX).ok()
}

/// A port P with TCP P, UDP P and UDP P + 1 free on 127.0.0.1. Another process may bind them before a node does; then
/// the node reports an error.
///
/// # Errors
/// No such port was found.
pub fn free_port() -> std::io::Result<u16> {
    let host = Ipv4Addr::LOCALHOST;
    for _ in 0..100 {
        let tcp = TcpListener::bind((host, 0))?;
        let port = tcp.local_addr()?.port();
        if port < u16::MAX && UdpSocket::bind((host, port)).is_ok() && UdpSocket::bind((host, port + 1)).is_ok() {
            return Ok(port);
        }
    }
    Err(std::io::Error::other("no free ports on 127.0.0.1"))
}
