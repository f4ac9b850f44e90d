//! The command line: commands, global options, output conventions and exit codes.
//!
//! Stdout carries only the answer: text, or with `--json` one object (JSON lines for streams). Everything else goes to
//! stderr. Next: `cli/up.rs` (a node's life cycle), `cli/run.rs` (prompting a model).
use crate::api::BindError;
use crate::api_key::{self, ApiKey};
use crate::client::{Client, ClientError, Key};
use crate::config::{self, ConfigError, ConfigFile};
use crate::handle::NodeError;
use crate::pull::PullError;
use crate::telemetry::LogFormat;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::Value;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

mod bench;
mod interrupt;
mod mesh;
mod model;
mod plan;
mod progress;
mod run;
mod serve;
mod submit;
mod table;
mod up;
mod watch;

/// Runs the command line and returns the exit code of the process.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let parsed = command().try_get_matches_from(arguments);
    let mut cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print(); // help goes to stdout, usage errors to stderr
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Failure::USAGE));
        }
    };
    match cli.global.read_config().and_then(|()| cli.command.execute(&cli.global)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                let _ = writeln!(std::io::stderr(), "meshnode: {}", printable(&failure.message));
            }
            ExitCode::from(failure.code)
        }
    }
}

const AFTER_HELP: &str = "\
Examples:
  meshnode demo                                  three nodes share one model; one node is killed
  meshnode run smollm2-135m --prompt 'Hello!'    prompt a model, on this machine alone if no node runs
  meshnode up                                    start a mesh; prints a ticket
  meshnode join mesh1…                           join it from another machine
  meshnode serve smollm2-135m                    OpenAI-compatible API under http://127.0.0.1:9470/v1

Every command accepts the global options, before or after its name. Flags override MESHNODE_* variables, which override the
configuration file. Commands that administer a node (invite, approve, ban, drain, leave, serve, submit, cancel, open) need its API
key: for nodes of this user it is found by the node's address, for other nodes see --api-key-file.
Exit codes: 0 ok, 2 usage, 3 no node reachable, 4 not authorised, 5 degraded or failed, 130 interrupted.";

/// The clap command. The help of each subcommand refers to the global options in one line instead of repeating them.
fn command() -> clap::Command {
    let command = Cli::command();
    let global: Vec<clap::Arg> =
        command.get_arguments().filter(|arg| arg.is_global_set()).map(|arg| arg.clone().hide(true)).collect();
    command.mut_subcommands(|sub| shortened(sub.args(global.clone())))
}

/// Appends the line about global options to the help of `command` and its subcommands.
fn shortened(command: clap::Command) -> clap::Command {
    const GLOBAL: &str = "Global options (--json, --api, --config, …): meshnode help";
    let text = command.get_after_help().map_or_else(|| GLOBAL.to_owned(), |text| format!("{text}\n\n{GLOBAL}"));
    command.after_help(text).mut_subcommands(shortened)
}

/// A peer-to-peer mesh that runs language models and simulations too large for any one of its machines
#[derive(Debug, Parser)]
#[command(name = "meshnode", version, after_help = AFTER_HELP, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options that every command accepts.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Print the answer as one JSON object on stdout (JSON lines for streams)
    #[arg(long, global = true)]
    json: bool,
    /// Address of the node's API, HOST:PORT [default: 127.0.0.1:9470]
    #[arg(long, global = true, value_name = "ADDR", env = "MESHNODE_API")]
    api: Option<String>,
    /// API key that every caller must send; required when the API listens on a non-loopback address
    #[arg(long, global = true, value_name = "KEY", env = "MESHNODE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// File with the API key of the node [default: found by the node's address, for nodes of this user]
    #[arg(long, global = true, value_name = "FILE", env = "MESHNODE_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Configuration file [default: ~/.config/meshnode/meshnode.toml]
    #[arg(long, global = true, value_name = "FILE", env = "MESHNODE_CONFIG")]
    config: Option<PathBuf>,
    /// Cache directory for downloaded models and weights [default: ~/.cache/meshnode]
    #[arg(long, global = true, value_name = "DIR", env = "MESHNODE_CACHE")]
    cache_dir: Option<PathBuf>,
    /// Disk limit for weights fetched from peers, as in 20G; the least recently used are evicted first [default: 50
    /// GiB, or 80 % of the free space if that is less]
    #[arg(long, global = true, value_name = "SIZE", env = "MESHNODE_CACHE_SIZE")]
    cache_size: Option<config::Size>,
    /// Log more; repeat for even more
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Format of log lines on stderr
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value = "text", env = "MESHNODE_LOG_FORMAT")]
    log: LogFormat,
    /// The parsed configuration file.
    #[arg(skip)]
    file: ConfigFile,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a node that founds a mesh, or rejoins the one it belongs to; prints a ticket
    Up(up::UpArgs),
    /// Start a node in an existing mesh
    Join(up::JoinArgs),
    /// Leave the mesh and end the node's process; returns when the process has ended
    #[command(after_help = "Example:\n  meshnode drain && meshnode leave")]
    Leave,
    /// Stop accepting new work but stay in the mesh; --off accepts work again
    Drain(mesh::DrainArgs),
    /// Create a ticket that lets another machine join
    Invite(mesh::InviteArgs),
    /// Admit a peer that asked to join without a ticket
    Approve(mesh::ApproveArgs),
    /// Revoke the membership of a node in the whole mesh
    Ban(mesh::BanArgs),
    /// Show the node, its mesh and its jobs
    #[command(after_help = "Examples:\n  meshnode status\n  meshnode status --json | jq .peers")]
    Status(mesh::PeersArgs),
    /// Show the members of the mesh
    #[command(after_help = "Example:\n  meshnode peers --api 127.0.0.1:9480      another node on this machine")]
    Peers(mesh::PeersArgs),
    /// Show the jobs that the node coordinates or takes part in
    #[command(after_help = "Example:\n  meshnode jobs --json")]
    Jobs,
    /// Download a model into the cache
    Pull(model::PullArgs),
    /// Show how the mesh would partition a model or a simulation (JOB.toml), and why
    Plan(plan::PlanArgs),
    /// Prompt a model
    Run(run::RunArgs),
    /// Serve a model through an OpenAI-compatible API
    Serve(serve::ServeArgs),
    /// Run a simulation on the mesh
    Submit(submit::SubmitArgs),
    /// Watch a simulation in this terminal; also prints the address of its web page
    Watch(watch::WatchArgs),
    /// Cancel a simulation
    Cancel(submit::CancelArgs),
    /// Benchmark this machine
    Bench(bench::BenchArgs),
    /// Check every operation on a device against float64
    Selftest(bench::SelftestArgs),
    /// Run three nodes on this machine that share a model, and kill one during generation
    Demo(bench::DemoArgs),
    /// Print a link that opens the node's web page with the right to administer the node
    #[command(after_help = "Examples:\n  meshnode open\n  xdg-open \"$(meshnode open)\"\n\n\
        The link works once, within five minutes. The right ends when the browser tab closes, or after 12 hours.")]
    Open,
    /// Check for problems that would prevent a node from working, and show how to fix them
    Doctor(up::DoctorArgs),
    /// Print the completion script for a shell
    #[command(
        after_help = "Example:\n  meshnode completions bash > ~/.local/share/bash-completion/completions/meshnode"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

impl Command {
    fn execute(self, global: &Global) -> Result<(), Failure> {
        let daemon = matches!(self, Command::Up(_) | Command::Join(_));
        crate::telemetry::start(global.log, global.verbose, daemon);
        match self {
            Command::Up(args) => up::up(global, &args),
            Command::Join(args) => up::join(global, &args),
            Command::Leave => mesh::leave(global),
            Command::Drain(args) => mesh::drain(global, &args),
            Command::Invite(args) => mesh::invite(global, &args),
            Command::Approve(args) => mesh::approve(global, &args),
            Command::Ban(args) => mesh::ban(global, &args),
            Command::Status(args) => mesh::status(global, &args),
            Command::Peers(args) => mesh::peers(global, &args),
            Command::Jobs => mesh::jobs(global),
            Command::Pull(args) => model::pull(global, &args),
            Command::Plan(args) => plan::plan(global, &args),
            Command::Run(args) => run::run(global, &args),
            Command::Serve(args) => serve::serve(global, &args),
            Command::Submit(args) => submit::submit(global, &args),
            Command::Watch(args) => watch::watch(global, &args),
            Command::Cancel(args) => submit::cancel(global, &args),
            Command::Bench(args) => bench::bench(global, &args),
            Command::Selftest(args) => bench::selftest(global, &args),
            Command::Demo(args) => bench::demo(global, &args),
            Command::Open => mesh::open(global),
            Command::Doctor(args) => up::doctor(global, &args),
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "meshnode", &mut script);
                say(String::from_utf8_lossy(&script).trim_end());
                Ok(())
            }
        }
    }
}

impl Global {
    /// Reads the configuration file, for every command.
    fn read_config(&mut self) -> Result<(), Failure> {
        let (file, path) = ConfigFile::load(self.config.as_deref())?;
        self.file = file;
        match path {
            Some(path) if self.verbose > 0 => remark(format!("configuration: {}", path.display())),
            None if std::path::Path::new("meshnode.toml").exists() => {
                remark("ignoring meshnode.toml in the current folder: to use it, pass --config meshnode.toml");
            }
            Some(_) | None => {}
        }
        Ok(())
    }

    /// The address of the node's API, from the flag or the configuration file.
    fn api(&self) -> Option<String> {
        self.api.clone().or_else(|| self.file.api.map(|address| address.to_string()))
    }

    /// The key that all callers of a node started here must send.
    fn api_key(&self) -> Option<String> {
        self.api_key.clone().or_else(|| self.file.api_key.clone())
    }

    fn client(&self) -> Result<Client, Failure> {
        let api = self.api();
        let address = api.as_deref().map_or_else(|| config::API_DEFAULT.to_string(), bare);
        // A key file given by flag or variable overrides a key in the configuration file.
        let set = |key: &Option<String>| key.clone().filter(|key| !key.is_empty());
        let key = match (set(&self.api_key), &self.api_key_file) {
            (Some(key), _) => Key::Given(key),
            (None, Some(path)) => Key::Given(key_file(path)?),
            (None, None) => match (set(&self.file.api_key), &self.file.api_key_file) {
                (Some(key), _) => Key::Given(key),
                (None, Some(path)) => Key::Given(key_file(path)?),
                (None, None) => Key::in_files(api_key::candidates(&address, &self.data_dir())),
            },
        };
        Ok(Client::new(api.as_deref(), key))
    }

    /// The data directory of this user's default node.
    fn data_dir(&self) -> PathBuf {
        let variable = std::env::var_os("MESHNODE_DATA_DIR").map(PathBuf::from);
        variable.or_else(|| self.file.data_dir.clone()).unwrap_or_else(config::data_dir_default)
    }

    fn models_dir(&self) -> PathBuf {
        let set = self.cache_dir.clone().or_else(|| self.file.cache_dir.clone());
        set.unwrap_or_else(config::cache_dir_default).join("models")
    }

    fn cache_bytes(&self) -> Option<u64> {
        self.cache_size.or(self.file.cache_size).map(|size| size.0)
    }
}

/// `HOST:PORT` of an `--api` value.
fn bare(api: &str) -> String {
    api.strip_prefix("http://").unwrap_or(api).trim_end_matches('/').to_owned()
}

/// The key in the file of `--api-key-file`.
fn key_file(path: &std::path::Path) -> Result<String, Failure> {
    match ApiKey::read(path) {
        Ok(Some(key)) => Ok(key.as_str().to_owned()),
        Ok(None) => Err(Failure::usage(format!("--api-key-file {}: file not found", path.display()))),
        Err(why) => Err(Failure::usage(format!("--api-key-file: {why}"))),
    }
}

/// Prints one line (or block) of the answer to stdout.
fn say(text: impl std::fmt::Display) {
    // A reader that closed the pipe (`| head`) needs no more output.
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a remark to stderr.
fn remark(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Escapes control characters: some errors quote files and responses, which could otherwise control the terminal.
fn printable(text: &str) -> String {
    let is_plain = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if is_plain(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

/// Prints the answer: with `--json` the value, otherwise the output of `text`.
fn answer(global: &Global, value: &Value, text: impl FnOnce(&Value) -> String) {
    if global.json { say(value) } else { say(text(value).trim_end()) }
}

/// A failed command: its exit code and error message.
#[derive(Debug)]
struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    const USAGE: u8 = 2;
    const UNREACHABLE: u8 = 3;
    const UNAUTHORISED: u8 = 4;
    const FAILED: u8 = 5;
    const INTERRUPTED: u8 = 130;

    fn usage(message: impl std::fmt::Display) -> Self {
        Self { code: Self::USAGE, message: message.to_string() }
    }

    fn failed(message: impl std::fmt::Display) -> Self {
        Self { code: Self::FAILED, message: message.to_string() }
    }

    /// A failure whose message has already been printed.
    fn quiet(code: u8) -> Self {
        Self { code, message: String::new() }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::Unreachable { .. } => Self::UNREACHABLE,
            ClientError::Unauthorised { .. } => Self::UNAUTHORISED,
            ClientError::Broken { .. } | ClientError::Refused { .. } => Self::FAILED,
        };
        Self { code, message: error.to_string() }
    }
}

impl From<NodeError> for Failure {
    fn from(error: NodeError) -> Self {
        let code = match &error {
            NodeError::Unauthorised(_) => Self::UNAUTHORISED,
            NodeError::Unreachable(_) => Self::UNREACHABLE,
            NodeError::Invalid(_) => Self::USAGE,
            NodeError::Busy | NodeError::NotFound(_) | NodeError::Plan(_) | NodeError::Failed(_) => Self::FAILED,
        };
        Self { code, message: error.to_string() }
    }
}

impl From<BindError> for Failure {
    fn from(error: BindError) -> Self {
        match &error {
            BindError::Unprotected(_) => Self::usage(error),
            BindError::Taken { .. } => Self::failed(error),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

impl From<PullError> for Failure {
    fn from(error: PullError) -> Self {
        let code = match &error {
            PullError::Reference(_) | PullError::Folder(_) | PullError::NoFile { .. } => Self::USAGE,
            PullError::NoSource { .. } => Self::UNREACHABLE,
            PullError::DiskFull { .. }
            | PullError::Storage { .. }
            | PullError::Http { .. }
            | PullError::Pip { .. }
            | PullError::Checksum { .. } => Self::FAILED,
        };
        Self { code, message: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::from_arg_matches(&command().try_get_matches_from(format!("meshnode {line}").split(' '))?)
    }

    fn help(line: &str) -> String {
        parse(line).unwrap_err().to_string()
    }

    #[test]
    fn the_help_of_a_command_names_the_global_options_in_one_line() {
        let top = help("--help");
        for option in ["--json", "--api-key-file", "--config", "--cache-size", "--log"] {
            assert!(top.contains(option), "{option}: {top}");
        }
        for line in ["drain --help", "help serve", "bench decode --help", "up -h", "status --help"] {
            let text = help(line);
            assert!(text.contains("Global options (--json, --api, --config, …): meshnode help"), "{line}: {text}");
            assert!(!text.contains("--cache-size") && !text.contains("MESHNODE_LOG_FORMAT"), "{line}: {text}");
        }
        assert!(help("drain --help").contains("meshnode drain --off"), "examples are kept");
        let set = |line: &str| parse(line).unwrap().global;
        assert!(set("bench net --json").json && set("--json bench net").json);
        assert_eq!(set("drain --api 127.0.0.1:1").api.as_deref(), Some("127.0.0.1:1"));
    }

    #[test]
    fn a_ticket_lifetime_without_unit_or_out_of_range_is_a_usage_error() {
        for (line, words) in [("invite --ttl 0s", "30d"), ("invite --ttl 5", "5m"), ("invite --ttl 31d", "30d")] {
            let error = help(line);
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn the_clap_definition_is_valid() {
        command().debug_assert();
    }

    #[test]
    fn control_characters_of_a_file_do_not_reach_the_terminal() {
        assert_eq!(printable("found \u{1b}[2Jé\u{7}\nnext"), "found \\u{1b}[2Jé\\u{7}\nnext");
    }

    #[test]
    fn the_list_of_commands_is_complete() {
        let names: Vec<String> = command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        for name in
            "up join leave drain invite approve ban status peers jobs pull plan run serve submit watch cancel bench selftest demo open doctor completions"
                .split(' ')
        {
            assert!(names.contains(&name.to_owned()), "{name} is missing");
        }
        assert_eq!(names.len(), 23, "unexpected command: {names:?}");
    }

    #[test]
    fn documented_command_lines_parse() {
        for line in [
            "up --name a --data-dir /d --listen 127.0.0.1 --port 9000 --device cuda:1 --memory 200MiB --threads 2 --api 127.0.0.1:1 --no-mdns --open",
            "join mesh1abc /ip4/10.0.0.1/tcp/9471 --name b --no-mdns --api 127.0.0.1:2",
            "drain",
            "drain --off --json",
            "serve m --stop",
            "invite --ttl 1h --uses 1",
            "approve 12D3",
            "ban old-laptop",
            "status --json --api 127.0.0.1:9",
            "peers --all",
            "run m --keep",
            "pull smollm2-135m --json",
            "plan smollm2-135m --json",
            "run m --prompt p --max-tokens 5 --greedy --activations f32 --boundary lossless --json",
            "run m --temperature 0.5 --top-p 0.9 --seed 7",
            "serve m --context 100",
            "submit sim.toml --out DIR --resume --wait --json",
            "cancel 0123456789abcdef",
            "watch 01234567 --every 2s",
            "plan sim.toml",
            "bench decode --json",
            "bench device --device cpu --threads 2 --json",
            "selftest --device cpu",
            "completions bash",
            "open --api 127.0.0.1:9",
            "--api 127.0.0.1:9 --api-key-file /d/api.key drain",
            "invite --ttl 30d",
            "up --output-dir /srv/a --output-dir /srv/b",
        ] {
            parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        for line in [
            "run m --greedy --temperature 1",
            "up --memory lots",
            "run",
            "up --port 70000",
            "nothing",
            "up --device abacus",
            "invite --ttl 0s",
            "invite --ttl 5",
            "invite --ttl 31d",
        ] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn control_characters_of_files_are_not_sent_to_the_terminal() {
        let error = "key \u{1b}[2J\u{7}\u{9b}31m\r: expected a name\n\tas in é";
        assert_eq!(printable(error), "key \\u{1b}[2J\\u{7}\\u{9b}31m\\r: expected a name\n\tas in é");
    }
}
