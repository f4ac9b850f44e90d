//! The command line: what a person or a script can ask for, and what comes back on stdout and as exit code.
//!
//! Stdout carries the answer and nothing else: text, or with `--json` one object (JSON lines for streams). Everything
//! else goes to stderr. Next: `cli/up.rs` (a node's life), `cli/run.rs` (asking a model).
use crate::api::BindError;
use crate::client::{Client, ClientError};
use crate::config::{self, ConfigError, ConfigFile};
use crate::handle::NodeError;
use crate::pull::PullError;
use crate::telemetry::LogFormat;
use clap::{CommandFactory, Parser, Subcommand};
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

/// Runs the command line; the value is the exit code of the process.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print(); // help goes to stdout, mistakes to stderr
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Failure::USAGE));
        }
    };
    match cli.command.execute(&cli.global) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                let _ = writeln!(std::io::stderr(), "meshnode: {}", failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

const AFTER_HELP: &str = "\
Examples:
  meshnode demo                                  three nodes, one model, one of them killed
  meshnode run smollm2-135m --prompt 'Hello!'    ask a model, on this machine alone if no node runs
  meshnode up                                    start a mesh; prints a ticket
  meshnode join mesh1…                           join it from another machine
  meshnode serve smollm2-135m                    OpenAI's API under http://127.0.0.1:9470/v1

Flags come before MESHNODE_* variables, these before meshnode.toml.
Exit codes: 0 ok, 2 usage, 3 no node reachable, 4 not authorised, 5 degraded or failed, 130 interrupted.";

/// Machines together run what none of them can run alone.
#[derive(Debug, Parser)]
#[command(name = "meshnode", version, after_help = AFTER_HELP, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Flags that every command takes.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "For every command")]
pub(crate) struct Global {
    /// One JSON object (JSON lines for streams) on stdout
    #[arg(long, global = true)]
    json: bool,
    /// Local API of the node: HOST:PORT [default: 127.0.0.1:9470]
    #[arg(long, global = true, value_name = "ADDR", env = "MESHNODE_API")]
    api: Option<String>,
    /// Key that callers of the API must present; needed where it listens beyond this machine
    #[arg(long, global = true, value_name = "KEY", env = "MESHNODE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Configuration file [default: ./meshnode.toml, then ~/.config/meshnode/meshnode.toml]
    #[arg(long, global = true, value_name = "FILE", env = "MESHNODE_CONFIG")]
    config: Option<PathBuf>,
    /// Where fetched models are kept [default: ~/.cache/meshnode]
    #[arg(long, global = true, value_name = "DIR", env = "MESHNODE_CACHE")]
    cache_dir: Option<PathBuf>,
    /// Most disk for weights that come from peers, as in 20G; what was used least goes first [default: 50 GiB, or 80 %
    /// of what is free if that is less]
    #[arg(long, global = true, value_name = "SIZE", env = "MESHNODE_CACHE_SIZE")]
    cache_size: Option<config::Size>,
    /// Log more; twice for still more
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// How log lines on stderr look
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value = "text", env = "MESHNODE_LOG_FORMAT")]
    log: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a node: found a mesh, or come back to the one it belongs to; prints its ticket
    Up(up::UpArgs),
    /// Start a node in an existing mesh
    Join(up::JoinArgs),
    /// Tell the node to say goodbye to the mesh and end
    Leave,
    /// Take no new work, and stay in the mesh; with --off take it again
    Drain(mesh::DrainArgs),
    /// Make a ticket that lets another machine join
    Invite(mesh::InviteArgs),
    /// Let a peer in that asked to join without a ticket
    Approve(mesh::ApproveArgs),
    /// Take a member's membership back, in the whole mesh
    Ban(mesh::BanArgs),
    /// Show the node, its mesh and its jobs
    Status,
    /// Show the members of the mesh
    Peers,
    /// Show the jobs that the node heads or takes part in
    Jobs,
    /// Fetch a model into the cache
    Pull(model::PullArgs),
    /// Show how the mesh would share a model or a simulation (JOB.toml), and why
    Plan(plan::PlanArgs),
    /// Ask a model
    Run(run::RunArgs),
    /// Serve a model under OpenAI's API
    Serve(serve::ServeArgs),
    /// Run a simulation on the mesh
    Submit(submit::SubmitArgs),
    /// Watch a simulation in this terminal, or in a browser
    Watch(watch::WatchArgs),
    /// End a simulation
    Cancel(submit::CancelArgs),
    /// Measure this machine
    Bench(bench::BenchArgs),
    /// Check every operation on a device against float64
    Selftest(bench::SelftestArgs),
    /// Three nodes on this machine share a model; one is killed while they speak
    Demo(bench::DemoArgs),
    /// Look for what could keep a node from working, and say what to do
    Doctor(up::DoctorArgs),
    /// Print the completion script of a shell
    Completions {
        /// Which shell
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
            Command::Status => mesh::status(global),
            Command::Peers => mesh::peers(global),
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
    fn client(&self) -> Client {
        Client::new(self.api.as_deref(), self.api_key.clone())
    }

    fn config(&self) -> Result<ConfigFile, Failure> {
        Ok(ConfigFile::load(self.config.as_deref())?)
    }

    fn models_dir(&self, file: &ConfigFile) -> PathBuf {
        let cache = self.cache_dir.clone().or_else(|| file.cache_dir.clone()).unwrap_or_else(config::cache_dir_default);
        cache.join("models")
    }

    fn cache_bytes(&self, file: &ConfigFile) -> Option<u64> {
        self.cache_size.or(file.cache_size).map(|size| size.0)
    }
}

/// One line (or block) of the answer.
fn say(text: impl std::fmt::Display) {
    // A reader that went away (`| head`) has what it wanted.
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// A remark beside the answer.
fn remark(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The answer as JSON with `--json`, else as `text` puts it.
fn answer(global: &Global, value: &Value, text: impl FnOnce(&Value) -> String) {
    if global.json { say(value) } else { say(text(value).trim_end()) }
}

/// A command that did not do what was asked.
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

    /// What went wrong has been said already.
    fn quiet(code: u8) -> Self {
        Self { code, message: String::new() }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::Nobody { .. } => Self::UNREACHABLE,
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
            PullError::Reference(_) | PullError::NoFile { .. } => Self::USAGE,
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

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_of_the_plan_is_there() {
        let names: Vec<String> = Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        for name in
            "up join leave drain invite approve ban status peers jobs pull plan run serve submit watch cancel bench selftest demo doctor completions"
                .split(' ')
        {
            assert!(names.contains(&name.to_owned()), "{name} is missing");
        }
        assert_eq!(names.len(), 22, "a command that the plan does not have: {names:?}");
    }

    #[test]
    fn flags_are_taken_as_documented() {
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
            "selftest --device cpu",
            "completions bash",
        ] {
            Cli::try_parse_from(format!("meshnode {line}").split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        for line in [
            "run m --greedy --temperature 1",
            "up --memory lots",
            "run",
            "up --port 70000",
            "nothing",
            "up --device abacus",
        ] {
            let error = Cli::try_parse_from(format!("meshnode {line}").split(' ')).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
