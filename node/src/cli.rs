//! The command line: the tree of commands, and the function that executes each.
//!
//! Stdout carries only the answer: text, or with `--json` one object (JSON lines for streams). Everything else goes to
//! stderr. Next: `cli/global.rs` (options of every command), `cli/up.rs` (a node's life cycle), `cli/run.rs` (prompting a
//! model).
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use failure::Failure;
use global::Global;
use print::{printable, say};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

mod bench;
mod compute;
mod failure;
mod gate;
mod global;
mod inspect;
mod interrupt;
mod mesh;
mod model;
mod plan;
mod print;
mod progress;
mod quantize;
mod run;
mod serve;
mod service;
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
  meshnode demo                          three nodes share a model; one is killed
  meshnode run smollm2-135m -p 'Hello!'  prompt a model, with or without a node
  meshnode up                            start a mesh; prints a ticket
  meshnode join mesh1…                   join it from another machine
  meshnode serve smollm2-135m            OpenAI-compatible API of the model

Every command accepts the global options, before or after its name. Flags override MESHNODE_* variables, which \
override the configuration file.

Commands that administer a node (invite, approve, ban, drain, leave, serve, submit, cancel, open) need its API key. \
For nodes of this user the key is found by the node's address; for other nodes pass --api-key-file.

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
    /// Show what a model's files hold: its shape, formats, and the memory it needs
    Inspect(inspect::InspectArgs),
    /// Write a model as a .mesh file, exactly or with fewer bits per weight
    Quantize(quantize::QuantizeArgs),
    /// Measure what each encoding of rows between nodes costs a model, for --boundary auto
    Gate(gate::GateArgs),
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
    /// Check every operation on a device against the reference
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
            Command::Inspect(args) => inspect::inspect(global, &args),
            Command::Quantize(args) => quantize::quantize(global, &args),
            Command::Gate(args) => gate::gate(global, &args),
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
    fn the_list_of_commands_is_complete() {
        let names: Vec<String> = command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        for name in
            "up join leave drain invite approve ban status peers jobs pull inspect quantize gate plan run serve submit watch cancel bench selftest demo open doctor completions"
                .split(' ')
        {
            assert!(names.contains(&name.to_owned()), "{name} is missing");
        }
        assert_eq!(names.len(), 26, "unexpected command: {names:?}");
    }

    #[test]
    fn documented_command_lines_parse() {
        for line in [
            "up --name a --data-dir /d --listen 127.0.0.1 --port 9000 --device cuda:1 --memory 200MiB --threads 2 --api 127.0.0.1:1 --no-mdns --open",
            "join mesh1abc /ip4/10.0.0.1/tcp/9471 --name b --no-mdns --api 127.0.0.1:2",
            "up --device cuda:0,cuda:1,cpu --memory cuda:0=12G,cpu=8G",
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
            "plan smollm2-135m --boundary q4 --json",
            "gate smollm2-135m --int8 --threads 2 --json",
            "serve smollm2-135m --boundary auto",
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
            "up --device cpu,cpu",
            "up --memory cpu=1G,cpu=2G",
            "invite --ttl 0s",
            "invite --ttl 5",
            "invite --ttl 31d",
        ] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
