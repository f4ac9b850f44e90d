//! The commands of one page, run in order as a reader would run them, on machines with free ports and home directories
//! of their own.
use crate::harness::meshnode;
use meshnode::cluster::free_port;
use meshnode::config::{API_DEFAULT, PORT_DEFAULT};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use system_tests::repository;

/// A result, or what is wrong, in words.
pub(super) type Outcome<T> = Result<T, Box<dyn Error>>;

/// The machine of commands without a prompt.
pub(super) const FIRST: &str = "first";
/// Longest time of a command, on a busy machine.
const COMMAND_MAX: Duration = Duration::from_secs(180);
/// Time until Ctrl-C of a command that would go on.
const WATCHED: Duration = Duration::from_secs(2);
/// A port follows these words of a command or a program.
const BEFORE_PORT: [&str; 2] = ["127.0.0.1:", "--port "];
/// What precedes a command, and what it means to run it here: the built program; the same user.
const PREFIXES: [(&str, &str); 2] = [("cargo run --release -- ", "meshnode "), ("sudo -H -u meshnode ", "")];

/// The machines of a page, and what its commands have printed so far. Dropping it kills the nodes.
pub(super) struct Session {
    dir: tempfile::TempDir,
    /// The current folder of the commands.
    folder: PathBuf,
    /// The file of the model, which only the first machine has.
    model: PathBuf,
    machines: BTreeMap<String, Machine>,
    /// The last ticket that a command printed: `mesh1…` in later commands.
    ticket: Option<String>,
    /// The last simulation that was submitted: `JOB` in later commands.
    job: Option<String>,
    /// Commands as documented, and their stdout with stderr.
    outputs: Vec<(String, String)>,
    /// Number of processes so far.
    processes: usize,
}

/// A user's account on a machine.
struct Machine {
    home: PathBuf,
    /// Free ports by the documented ones.
    ports: BTreeMap<u16, u16>,
    /// Processes of `up` and `join`, also those that have ended.
    nodes: Vec<Child>,
}

impl Session {
    /// Commands run in `folder`, a path in the repository, of which there are only the example jobs.
    pub(super) fn new(folder: &Path, model: &Path) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        let root = dir.path().join("repository");
        let examples = root.join("node/examples");
        fs::create_dir_all(&examples)?;
        for entry in fs::read_dir(repository().join("node/examples"))? {
            let entry = entry?;
            fs::copy(entry.path(), examples.join(entry.file_name()))?;
        }
        let bin = dir.path().join("bin");
        fs::create_dir(&bin)?;
        std::os::unix::fs::symlink(meshnode(), bin.join("meshnode"))?;
        Ok(Self {
            folder: root.join(folder),
            dir,
            model: model.to_owned(),
            machines: BTreeMap::new(),
            ticket: None,
            job: None,
            outputs: Vec::new(),
            processes: 0,
        })
    }

    /// Runs a documented command, which must succeed. Nodes go on until the end of the page.
    pub(super) fn run(&mut self, machine: &str, documented: &str) -> Outcome<()> {
        let line = self.translate(machine, documented)?;
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("meshnode"), Some("up" | "join")) => self.start(machine, documented, &line),
            (Some("meshnode"), Some("watch")) => self.finish(machine, documented, &line, Some(WATCHED)),
            (Some("meshnode" | "curl"), Some(_)) => self.finish(machine, documented, &line, None),
            _ => Err(format!("`{documented}` is no command of meshnode or curl; say with a marker what it is").into()),
        }
    }

    /// Makes sure that a node runs on the first machine.
    pub(super) fn need_node(&mut self) -> Outcome<()> {
        let nodes = &mut self.machine(FIRST)?.nodes;
        if nodes.iter_mut().any(|node| matches!(node.try_wait(), Ok(None))) {
            return Ok(());
        }
        self.run(FIRST, "meshnode up")
    }

    /// Runs a Python program with this interpreter.
    pub(super) fn run_python(&mut self, python: &str, name: &str, program: &str) -> Outcome<()> {
        let program = self.with_free_ports(FIRST, program)?;
        self.write(name, &program)?;
        self.finish(FIRST, name, &format!("{python} {name}"), None)
    }

    /// Checks a command that is not run: the program knows its arguments.
    pub(super) fn check_arguments(&mut self, machine: &str, documented: &str) -> Outcome<()> {
        let line = without_prefix(documented);
        if !line.starts_with("meshnode ") {
            return Ok(());
        }
        self.finish(machine, documented, &format!("{line} --help"), None)
    }

    /// Writes a file into the current folder of the commands.
    pub(super) fn write(&self, name: &str, text: &str) -> Outcome<()> {
        Ok(fs::write(self.path(name), text)?)
    }

    /// The path of a file in the current folder of the commands.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// What a documented command has printed.
    pub(super) fn output_of(&self, documented: &str) -> Outcome<&str> {
        let found = self.outputs.iter().rev().find(|(command, _)| command == documented);
        Ok(found.map(|(_, text)| text.as_str()).ok_or_else(|| format!("`{documented}` was not run before"))?)
    }

    /// The answer of the first machine's node to `GET PATH` or `POST PATH BODY`, which may be an error.
    pub(super) fn answer(&mut self, request: &str) -> Outcome<Value> {
        let api = self.port(FIRST, API_DEFAULT.port())?;
        let mut parts = request.splitn(3, ' ');
        let (method, path, body) = (parts.next(), parts.next().unwrap_or("/"), parts.next());
        let url = format!("http://127.0.0.1:{api}{path}");
        let config = ureq::Agent::config_builder().timeout_global(Some(COMMAND_MAX)).http_status_as_error(false);
        let agent: ureq::Agent = config.build().into();
        let answer = match (method, body) {
            (Some("GET"), None) => agent.get(&url).call()?,
            (Some("POST"), Some(body)) => agent.post(&url).send_json(serde_json::from_str::<Value>(body)?)?,
            _ => return Err(format!("`{request}` is neither `GET PATH` nor `POST PATH BODY`").into()),
        };
        let text = answer.into_body().read_to_string()?;
        Ok(serde_json::from_str(&text).map_err(|error| format!("{request}: {error}: {text}"))?)
    }

    /// Starts a node and waits for its ticket.
    fn start(&mut self, machine: &str, documented: &str, line: &str) -> Outcome<()> {
        let (mut node, output) = self.spawn(machine, line)?;
        let end = Instant::now() + COMMAND_MAX;
        let ticket = loop {
            let ended = !matches!(node.try_wait(), Ok(None)) || Instant::now() > end;
            let text = fs::read_to_string(&output).unwrap_or_default();
            // The last line may be incomplete.
            let ticket = text.rsplit_once('\n').and_then(|(complete, _)| ticket_in(complete));
            if ended || ticket.is_some() {
                break ticket;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        self.machine(machine)?.nodes.push(node);
        if ticket.is_none() {
            return Err(format!("`{documented}` printed no ticket:\n{}", fs::read_to_string(&output)?).into());
        }
        self.ticket = ticket;
        Ok(())
    }

    /// Runs a command to its end, with Ctrl-C after the time `interrupt_after`.
    fn finish(
        &mut self,
        machine: &str,
        documented: &str,
        line: &str,
        interrupt_after: Option<Duration>,
    ) -> Outcome<()> {
        let (mut child, output) = self.spawn(machine, line)?;
        if let Some(time) = interrupt_after
            && wait(&mut child, time)?.is_none()
        {
            let pid = Pid::from_raw(child.id().cast_signed()).ok_or("the command has no process id")?;
            kill_process(pid, Signal::INT)?;
        }
        let status = wait(&mut child, COMMAND_MAX)?;
        let text = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
        let Some(status) = status else {
            child.kill()?;
            child.wait()?;
            return Err(format!("`{documented}` did not end within {COMMAND_MAX:?}:\n{text}").into());
        };
        // `doctor` may find a fault of the machine that runs the tests.
        let is_finding = status.code() == Some(5) && line.starts_with("meshnode doctor");
        if !status.success() && !is_finding {
            return Err(format!("`{documented}` ended with {status}:\n{text}").into());
        }
        if let Some(ticket) = ticket_in(&text) {
            self.ticket = Some(ticket);
        }
        if line.starts_with("meshnode submit ")
            && let Some(job) = text.lines().find(|line| is_job_id(line))
        {
            self.job = Some(job.to_owned());
        }
        self.outputs.push((documented.to_owned(), text));
        Ok(())
    }

    /// Starts a line of a shell, whose stdout and stderr go to the returned file.
    fn spawn(&mut self, machine: &str, line: &str) -> Outcome<(Child, PathBuf)> {
        let (api, port) = (self.port(machine, API_DEFAULT.port())?, self.port(machine, PORT_DEFAULT)?);
        let home = self.machine(machine)?.home.clone();
        self.processes += 1;
        let output = self.dir.path().join(format!("output-{}", self.processes));
        let file = File::create(&output)?;
        let mut command = Command::new("sh");
        // Without a shell between, signals reach the command.
        let exec = if line.contains(['|', '&', ';']) { "" } else { "exec " };
        command.arg("-c").arg(format!("{exec}{line}")).current_dir(&self.folder);
        for (name, _) in std::env::vars_os() {
            if ["MESHNODE_", "XDG_"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
                command.env_remove(&name);
            }
        }
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:{path}", self.dir.path().join("bin").display()))
            .env("HOME", home)
            .env("PYTHONUSERBASE", python_packages())
            .env("MESHNODE_NAME", machine)
            .env("MESHNODE_API", format!("127.0.0.1:{api}"))
            .env("MESHNODE_PORT", port.to_string())
            .env("MESHNODE_LISTEN", "127.0.0.1")
            .env("MESHNODE_NO_MDNS", "true")
            .env("MESHNODE_DEVICE", "cpu")
            .env("MESHNODE_THREADS", "1")
            .env("MESHNODE_MEMORY", "4GiB")
            .stdin(Stdio::null())
            .stderr(file.try_clone()?)
            .stdout(file);
        Ok((command.spawn()?, output))
    }

    /// A documented command with this session's ticket, job and ports.
    fn translate(&mut self, machine: &str, documented: &str) -> Outcome<String> {
        let mut words = Vec::new();
        for word in without_prefix(documented).split(' ') {
            words.push(match word {
                "mesh1…" => self.ticket.clone().ok_or("no command before has printed a ticket")?,
                "JOB" => self.job.clone().ok_or("no command before has submitted a simulation")?,
                word => word.to_owned(),
            });
        }
        self.with_free_ports(machine, &words.join(" "))
    }

    /// The text with free ports instead of the documented ones.
    fn with_free_ports(&mut self, machine: &str, text: &str) -> Outcome<String> {
        let (mut done, mut rest) = (String::new(), text);
        let next = |rest: &str| BEFORE_PORT.iter().filter_map(|word| Some(rest.find(word)? + word.len())).min();
        while let Some(at) = next(rest) {
            let digits = rest[at..].chars().take_while(char::is_ascii_digit).count();
            done += &rest[..at];
            done += &self.port(machine, rest[at..at + digits].parse()?)?.to_string();
            rest = &rest[at + digits..];
        }
        Ok(done + rest)
    }

    /// The free port that stands for a documented one.
    fn port(&mut self, machine: &str, documented: u16) -> io::Result<u16> {
        let ports = &mut self.machine(machine)?.ports;
        if let Some(port) = ports.get(&documented) {
            return Ok(*port);
        }
        let port = free_port()?;
        ports.insert(documented, port);
        Ok(port)
    }

    /// A machine of the page, with a new home at its first command.
    fn machine(&mut self, name: &str) -> io::Result<&mut Machine> {
        if !self.machines.contains_key(name) {
            let home = self.dir.path().join(name);
            let models = home.join(".cache/meshnode/models");
            fs::create_dir_all(&models)?;
            // Errors of the API are failures of curl.
            fs::write(home.join(".curlrc"), "fail\nshow-error\nmax-time = 120\n")?;
            if name == FIRST {
                let file = self.model.file_name().ok_or_else(|| io::Error::other("the model is no file"))?;
                std::os::unix::fs::symlink(&self.model, models.join(file))?;
            }
            self.machines.insert(name.to_owned(), Machine { home, ports: BTreeMap::new(), nodes: Vec::new() });
        }
        self.machines.get_mut(name).ok_or_else(|| io::Error::other("no such machine"))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for node in self.machines.values_mut().flat_map(|machine| &mut machine.nodes) {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

/// A documented command as the built program runs it.
fn without_prefix(documented: &str) -> String {
    let found =
        PREFIXES.iter().find_map(|(prefix, instead)| Some(format!("{instead}{}", documented.strip_prefix(prefix)?)));
    found.unwrap_or_else(|| documented.to_owned())
}

/// The last ticket in a text.
fn ticket_in(text: &str) -> Option<String> {
    let found = text.split_whitespace().rfind(|word| word.starts_with("mesh1") && word.len() > 64);
    found.map(str::to_owned)
}

fn is_job_id(line: &str) -> bool {
    line.len() == 16 && line.chars().all(|c| c.is_ascii_hexdigit())
}

/// Where pip installs packages for this user, who has another home in the session.
fn python_packages() -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    std::env::var("PYTHONUSERBASE").unwrap_or_else(|_| format!("{home}/.local"))
}

/// Waits up to `limit` for the end of a process.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        let status = child.try_wait()?;
        if status.is_some() || Instant::now() > end {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
