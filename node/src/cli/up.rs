//! A node's life: `up` and `join` start it, a signal or `leave` ends it. And `doctor`, which looks before.
use super::model::{ComputeArgs, listen_address};
use super::{Failure, Global, remark, say};
use crate::api::Api;
use crate::config::{Advertised, ConfigFile, PORT_DEFAULT, UpOptions, data_dir_default, hostname};
use crate::handle::NodeHandle;
use crate::telemetry::Metrics;
use clap::builder::FalseyValueParser;
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A node that leaves has this long to hand over its work.
const LEAVE_MAX: Duration = Duration::from_secs(10);
/// A node that joined and still sees nobody says why that may be.
const LONELY: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode up                                       prints a ticket for others
  meshnode up --memory 8G --device cuda
  MESHNODE_API_KEY=… meshnode up --api 0.0.0.0:9470
  meshnode up --advertise 203.0.113.5:9471          behind a router that forwards UDP 9471 and 9472

In meshnode.toml the flags have the same names:
  name = \"desk\"
  memory = \"8G\"
  no-mdns = true

SIGTERM or Ctrl-C: takes no new work, says goodbye, ends; a second one ends at once.")]
pub(super) struct UpArgs {
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode join mesh1…
  meshnode join /ip4/192.168.1.5/tcp/9471      then on that machine: meshnode approve PEER
  ssh host meshnode invite | meshnode join -")]
pub(super) struct JoinArgs {
    /// Tickets (mesh1…) or multiaddrs; `-` reads them from stdin
    #[arg(required = true, value_name = "TICKET|MULTIADDR")]
    peers: Vec<String>,
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Every line says ok, warn or fail, and what to do. Exit code 5 if something fails.")]
pub(super) struct DoctorArgs {
    #[command(flatten)]
    node: NodeArgs,
}

/// How to run a node.
#[derive(Clone, Debug, clap::Args)]
struct NodeArgs {
    /// Name for people [default: the host's]
    #[arg(long, value_name = "NAME", env = "MESHNODE_NAME")]
    name: Option<String>,
    /// Identity and state [default: ~/.local/share/meshnode]
    #[arg(long, value_name = "DIR", env = "MESHNODE_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Address to listen on for peers [default: 0.0.0.0]
    #[arg(long, value_name = "IP", env = "MESHNODE_LISTEN")]
    listen: Option<IpAddr>,
    /// P: TCP P finds peers, UDP P carries gossip, UDP P+1 carries data [default: 9471]
    #[arg(long, value_name = "P", env = "MESHNODE_PORT", value_parser = clap::value_parser!(u16).range(..=65534))]
    port: Option<u16>,
    /// Tell peers to reach this node here instead of at the machine's own addresses: behind a router that forwards UDP
    /// PORT to P and UDP PORT+1 to P+1. Several separated by commas, or the flag several times [default PORT: P]
    #[arg(long, value_name = "IP[:PORT]", env = "MESHNODE_ADVERTISE", value_delimiter = ',')]
    advertise: Vec<Advertised>,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Do not look for peers on the local network
    #[arg(long, env = "MESHNODE_NO_MDNS", value_parser = FalseyValueParser::new())]
    no_mdns: bool,
    /// Write down here what happens to this node, for `simnet replay FILE`; it holds prompts, as token ids
    #[arg(long, value_name = "FILE", env = "MESHNODE_RECORD")]
    record: Option<PathBuf>,
    /// Admit every machine that asks; only for networks where you trust everybody
    #[arg(long, env = "MESHNODE_OPEN", value_parser = FalseyValueParser::new())]
    open: bool,
}

impl NodeArgs {
    fn options(&self, global: &Global, file: &ConfigFile, join: Vec<String>) -> UpOptions {
        UpOptions {
            name: self.name.clone().or_else(|| file.name.clone()).unwrap_or_else(hostname),
            data_dir: self.data_dir.clone().or_else(|| file.data_dir.clone()).unwrap_or_else(data_dir_default),
            models_dir: global.models_dir(file),
            cache_bytes: global.cache_bytes(file),
            listen: self.listen.or(file.listen).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            port: self.port.or(file.port).unwrap_or(PORT_DEFAULT),
            advertise: match self.advertise.is_empty() {
                true => file.advertise.clone().unwrap_or_default(),
                false => self.advertise.clone(),
            },
            device: self.compute.device.clone().or_else(|| file.device.clone()).unwrap_or_else(|| "auto".into()),
            memory: self.compute.memory.or(file.memory).map(|s| s.0),
            threads: self.compute.threads.or(file.threads),
            mdns: !(self.no_mdns || file.no_mdns.unwrap_or(false)),
            open: self.open || file.open.unwrap_or(false),
            join,
            solo: false,
            record: self.record.clone(),
        }
    }
}

pub(super) fn up(global: &Global, args: &UpArgs) -> Result<(), Failure> {
    live(global, &args.node, vec![])
}

pub(super) fn join(global: &Global, args: &JoinArgs) -> Result<(), Failure> {
    let mut peers = Vec::new();
    for peer in &args.peers {
        if peer == "-" {
            let text = std::io::read_to_string(std::io::stdin()).map_err(|e| Failure::usage(format!("stdin: {e}")))?;
            peers.extend(text.split_whitespace().map(str::to_owned));
        } else {
            peers.push(peer.clone());
        }
    }
    if peers.is_empty() {
        return Err(Failure::usage("no ticket on stdin"));
    }
    live(global, &args.node, peers)
}

pub(super) fn doctor(global: &Global, args: &DoctorArgs) -> Result<(), Failure> {
    let file = global.config()?;
    let options = args.node.options(global, &file, vec![]);
    let api = listen_address(global.api.as_deref(), file.api)?;
    let report = crate::doctor::examine(&options, api);
    if global.json {
        say(report.to_json())
    } else {
        say(report.to_text().trim_end())
    }
    if report.fails() { Err(Failure::quiet(Failure::FAILED)) } else { Ok(()) }
}

fn live(global: &Global, args: &NodeArgs, join: Vec<String>) -> Result<(), Failure> {
    let file = global.config()?;
    let options = args.options(global, &file, join);
    let address = listen_address(global.api.as_deref(), file.api)?;
    let key = global.api_key.clone().or(file.api_key);
    let runtime = runtime()?;
    let lived = runtime.block_on(async {
        let api = Api::bind(address, key).await?;
        let address = api.address().map_err(Failure::failed)?;
        let joined = !options.join.is_empty();
        let (handle, mut running) = crate::node::start(options).await?;
        let mut signals = Signals::listen()?;
        let metrics = Metrics::default();
        let mut serving = tokio::spawn(api.serve(handle.clone(), metrics, std::future::pending()));
        let state = handle.state().await;
        if global.json {
            say(json!({
                "ticket": running.ticket, "node": state.node, "peer_id": state.peer_id, "name": state.name,
                "mesh": state.mesh, "api": format!("http://{address}"),
            }));
        } else {
            say(&running.ticket);
        }
        remark(format!("node `{}` is up, its API on http://{address}", state.name));
        remark("another machine joins with: meshnode join TICKET (the line above; it is good for an hour)");
        if joined {
            tokio::spawn(diagnose_loneliness(handle.clone()));
        }
        tokio::select! {
            ended = &mut running.stopped => return ended.map_err(|_| Failure::failed(BROKEN)), // or `meshnode leave`
            ended = &mut serving => remark(format!("the API does not listen any more ({ended:?})")),
            () = signals.next() => {}
        }
        remark("leaving: no new work, running requests may end; once more ends at once");
        let leaving = async {
            handle.leave().await;
            let _ = (&mut running.stopped).await;
        };
        tokio::select! {
            _ = tokio::time::timeout(LEAVE_MAX, leaving) => {}
            () = signals.next() => {}
        }
        Ok(())
    });
    // What still hashes or loads is not waited for.
    runtime.shutdown_background();
    lived
}

/// The thread that decides has panicked; what it said is in the log.
pub(super) const BROKEN: &str = "the node failed inside and cannot go on: see its log above; this is a bug";

/// Says once what may be wrong if a node that joined sees nobody.
async fn diagnose_loneliness(handle: NodeHandle) {
    tokio::time::sleep(LONELY).await;
    let state = handle.state().await;
    if state.peers.iter().any(|p| !p.this_node && p.state == "alive") {
        return;
    }
    remark(format!(
        "no peer answers after {} s. Check that the other node runs, that UDP ports P and P+1 and TCP port P of both machines \
         are open to each other (`meshnode doctor` on both), and that the ticket has not expired",
        LONELY.as_secs()
    ));
}

/// The async runtime of a node in this process.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("cannot start threads: {e}")))
}

/// Ctrl-C and SIGTERM, heard from `listen` on: one that comes before the wait for it is not lost.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// To be called within a runtime.
    pub(super) fn listen() -> Result<Self, Failure> {
        let kind = |kind| signal(kind).map_err(|e| Failure::failed(format!("cannot wait for signals: {e}")));
        Ok(Self { interrupt: kind(SignalKind::interrupt())?, terminate: kind(SignalKind::terminate())? })
    }

    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
