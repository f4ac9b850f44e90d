//! A node's life: `up` and `join` start it, a signal or `leave` ends it. And `doctor`, which looks before.
use super::model::{ComputeArgs, listen_address};
use super::{Failure, Global, remark, say};
use crate::api::Api;
use crate::api_key::{Announced, ApiKey};
use crate::config::{Advertised, PORT_DEFAULT, Size, UpOptions, Zone, data_dir_default, hostname};
use crate::folders::Folders;
use crate::handle::{NodeError, NodeHandle};
use crate::telemetry::Metrics;
use clap::builder::FalseyValueParser;
use kernels::device::Device;
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A node that leaves has this long to hand over its work.
const LEAVE_MAX: Duration = Duration::from_secs(10);
/// A node that joined and still sees nobody says why that may be.
const LONELY: Duration = Duration::from_secs(10);
/// Between the ports that are suggested for nodes of one machine: a node takes P, P + 1 and the API's.
const PORTS_APART: u16 = 10;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode up                                       prints a ticket for others
  meshnode up --memory 8G --device cuda
  meshnode up --zone attic                          standbys are sought on machines in other zones
  MESHNODE_API_KEY=… meshnode up --api 0.0.0.0:9470
  meshnode up --advertise 203.0.113.5:9471          behind a router that forwards UDP 9471 and 9472

In ~/.config/meshnode/meshnode.toml, or the file of --config, the flags have the same names:
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
    /// Failure domain that this machine stands in: a room, a site, a fuse; at most 32 bytes. Standbys and successors are chosen in
    /// another one [default: unknown]
    #[arg(long, value_name = "NAME", env = "MESHNODE_ZONE")]
    zone: Option<Zone>,
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
    /// Do not look for peers on the local network, and do not listen on TCP P
    #[arg(long, env = "MESHNODE_NO_MDNS", value_parser = FalseyValueParser::new())]
    no_mdns: bool,
    /// Folder below which simulations that are submitted to this node may write, besides `outputs` of --data-dir and what
    /// `submit` shows to be the user's own. Several separated by commas, or the flag several times
    #[arg(long, value_name = "DIR", env = "MESHNODE_OUTPUT_DIR", value_delimiter = ',')]
    output_dir: Vec<PathBuf>,
    /// Write down here what happens to this node, for `simnet replay FILE`; it holds prompts, as token ids
    #[arg(long, value_name = "FILE", env = "MESHNODE_RECORD")]
    record: Option<PathBuf>,
    /// Admit every machine of the local network that asks, without the right to invite others; only where you trust everybody
    #[arg(long, env = "MESHNODE_OPEN", value_parser = FalseyValueParser::new())]
    open: bool,
}

impl NodeArgs {
    /// Where what is submitted may write.
    fn folders(&self, global: &Global, data_dir: &Path) -> Folders {
        let others = match self.output_dir.is_empty() {
            true => global.file.output_dirs.clone().unwrap_or_default(),
            false => self.output_dir.clone(),
        };
        Folders::new(data_dir, others)
    }

    fn options(&self, global: &Global, join: Vec<String>) -> UpOptions {
        let file = &global.file;
        UpOptions {
            name: self.name.clone().or_else(|| file.name.clone()).unwrap_or_else(hostname),
            zone: self.zone.clone().or_else(|| file.zone.clone()),
            data_dir: self.data_dir.clone().or_else(|| file.data_dir.clone()).unwrap_or_else(data_dir_default),
            models_dir: global.models_dir(),
            cache_bytes: global.cache_bytes(),
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
    let options = args.node.options(global, vec![]);
    let api = listen_address(global)?;
    let report = crate::doctor::examine(&options, api);
    if global.json {
        say(report.to_json())
    } else {
        say(report.to_text().trim_end())
    }
    if report.fails() { Err(Failure::quiet(Failure::FAILED)) } else { Ok(()) }
}

fn live(global: &Global, args: &NodeArgs, join: Vec<String>) -> Result<(), Failure> {
    // What this process writes holds keys and prompts, or is its user's own.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    let options = args.options(global, join);
    let folders = args.folders(global, &options.data_dir);
    let listen = listen_address(global)?;
    let runtime = runtime()?;
    let lived = runtime.block_on(async {
        let api = Api::bind(listen, global.api_key()).await?;
        let key = ApiKey::load_or_create(&options.data_dir).map_err(Failure::failed)?;
        let api = api.administered_with(key).writing_below(folders);
        let address = api.address().map_err(Failure::failed)?;
        let data_dir = options.data_dir.clone();
        let joined = !options.join.is_empty();
        let started = options.clone();
        let (handle, mut running) = crate::node::start(options).await?;
        let _announced = Announced::new(address, &data_dir);
        let mut signals = Signals::listen()?;
        let metrics = Metrics::default();
        let mut serving = tokio::spawn(api.serve(handle.clone(), metrics, std::future::pending()));
        let state = handle.state().await;
        let ticket = running.ticket.clone();
        if global.json {
            say(json!({
                "ticket": ticket, "node": state.node, "peer_id": state.peer_id, "name": state.name,
                "mesh": state.mesh, "api": format!("http://{address}"),
            }));
        } else {
            // An empty line if there is no ticket: programs that read the first line need not wait for it.
            say(ticket.as_deref().unwrap_or_default());
        }
        remark(format!("node `{}` is up, its API on http://{address}", state.name));
        match (&state.banned, ticket) {
            (Some(notice), _) => remark(notice),
            (None, Some(_)) => {
                let uses = crate::node::FIRST_TICKET_USES;
                remark(format!(
                    "up to {uses} machines join within an hour with: meshnode join TICKET (the line above)"
                ));
            }
            (None, None) => remark("this node may not let others in: run `meshnode invite` on another member"),
        }
        for (number, gpu) in running.idle_gpus.iter().enumerate() {
            remark(idle_gpu_advice(&started, address, gpu, number));
        }
        if joined {
            tokio::spawn(diagnose_loneliness(handle.clone()));
        }
        tokio::select! {
            notice = banned(&handle), if joined => return Err(NodeError::Unauthorised(notice).into()),
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

/// A node computes on one device: says which GPU stays idle, and the command that starts a second node on it. `number`
/// counts the idle GPUs, so that each gets ports and a data directory of its own.
fn idle_gpu_advice(options: &UpOptions, api: SocketAddr, gpu: &Device, number: usize) -> String {
    let suffix = gpu.id.to_string().replace(':', "");
    let step = PORTS_APART.saturating_mul(u16::try_from(number + 1).unwrap_or(u16::MAX));
    let mut data_dir = options.data_dir.clone().into_os_string();
    data_dir.push(format!("-{suffix}"));
    let zone = options.zone.as_ref().map(|zone| format!(" --zone '{}'", zone.name())).unwrap_or_default();
    format!(
        "{} ({}, {}) stays idle: a node uses one device. Start a second node on it with:\n  meshnode join \"$(meshnode --api {api} \
         invite)\" --device {} --name {}-{suffix}{zone} --data-dir {} --port {} --api {}",
        gpu.id,
        gpu.name,
        Size(gpu.memory_total),
        gpu.id,
        options.name,
        data_dir.to_string_lossy(),
        options.port.saturating_add(step),
        SocketAddr::new(api.ip(), api.port().saturating_add(step)),
    )
}

/// The thread that decides has panicked; what it said is in the log.
pub(super) const BROKEN: &str = "the node failed inside and cannot go on: see its log above; this is a bug";

/// Waits until a member says, within the time in which one answers, that this node is banned; then why. A node that was a member
/// before stays up: its state reports the ban.
async fn banned(handle: &NodeHandle) -> String {
    let end = tokio::time::Instant::now() + LONELY;
    while tokio::time::Instant::now() < end {
        let state = handle.state().await;
        if let Some(notice) = state.banned {
            return notice;
        }
        if state.peers.iter().any(|peer| !peer.this_node && peer.state == "alive") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    std::future::pending().await
}

/// Says once what may be wrong if a node that joined sees nobody.
async fn diagnose_loneliness(handle: NodeHandle) {
    tokio::time::sleep(LONELY).await;
    let state = handle.state().await;
    if state.peers.iter().any(|p| !p.this_node && p.state == "alive") {
        return;
    }
    remark(format!(
        "no peer answers after {} s. Check that the other node runs, that UDP ports P and P+1 of both machines \
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kernels::device::DeviceId;

    /// The command that the advice names is one that the program takes, with ports that do not collide.
    #[test]
    fn an_idle_gpu_is_named_with_a_command_that_uses_it() {
        let arguments = ["meshnode", "up", "--name", "desk", "--data-dir", "/d", "--port", "9471"];
        let cli = super::super::Cli::try_parse_from(arguments).unwrap();
        let super::super::Command::Up(args) = cli.command else { panic!("not `up`") };
        let options = args.node.options(&Global::default(), vec![]);
        let gpu = Device {
            id: DeviceId::Cuda(1),
            name: "RTX 3090".into(),
            memory_total: 24 << 30,
            memory_free: 1,
            own_memory: true,
        };
        let advice = idle_gpu_advice(&options, "127.0.0.1:9470".parse().unwrap(), &gpu, 0);
        assert!(advice.starts_with("cuda:1 (RTX 3090, 24.0 GiB) stays idle"), "{advice}");
        let line =
            advice.lines().nth(1).unwrap().trim().replace("\"$(meshnode --api 127.0.0.1:9470 invite)\"", "mesh1abc");
        let cli = super::super::Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
        let super::super::Command::Join(args) = cli.command else { panic!("not `join`: {line}") };
        let second = args.node.options(&cli.global, args.peers);
        assert_eq!((second.device.as_str(), second.name.as_str(), second.port), ("cuda:1", "desk-cuda1", 9481));
        assert_eq!((second.data_dir, cli.global.api.as_deref()), ("/d-cuda1".into(), Some("127.0.0.1:9480")));
    }
}
