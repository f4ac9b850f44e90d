//! A node's life cycle: `up` and `join` run it until a signal or `leave`. Also `doctor`, which checks the machine
//! first.
use super::compute::ComputeArgs;
use super::failure::Failure;
use super::global::Global;
use super::interrupt::Signals;
use super::print::{remark, say};
use super::service::{BROKEN, runtime};
use crate::api::Api;
use crate::api_key::{Announcement, ApiKey};
use crate::config::{Advertised, PORT_DEFAULT, Size, UpOptions, Zone, data_dir_default, hostname};
use crate::folders::Folders;
use crate::handle::{NodeError, NodeHandle};
use crate::metrics::Metrics;
use clap::builder::FalseyValueParser;
use kernels::device::Device;
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for a leaving node to hand over its work.
const LEAVE_MAX: Duration = Duration::from_secs(10);
/// If a joined node has reached no peer after this time, it prints possible causes.
const LONELY: Duration = Duration::from_secs(10);
/// Distance between the ports suggested for several nodes on one machine. A node uses P, P + 1 and the API's port.
const PORTS_APART: u16 = 10;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode up                                       prints a ticket for other machines
  meshnode up --memory 8G --device cuda
  meshnode up --zone attic                          prefers standbys in other zones
  MESHNODE_API_KEY=… meshnode up --api 0.0.0.0:9470
  meshnode up --advertise 203.0.113.5:9471          behind a router that forwards UDP 9471 and 9472

The configuration file (~/.config/meshnode/meshnode.toml or --config FILE) uses the same names as the flags:
  name = \"desk\"
  memory = \"8G\"
  no-mdns = true

On SIGTERM or Ctrl-C the node accepts no new work, leaves the mesh and exits; a second signal exits immediately.")]
pub(super) struct UpArgs {
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode join mesh1…
  meshnode join /ip4/192.168.1.5/tcp/9471      then on 192.168.1.5: meshnode approve PEER
  ssh host meshnode invite | meshnode join -")]
pub(super) struct JoinArgs {
    /// Tickets (mesh1…) or multiaddrs; `-` reads tickets from stdin
    #[arg(required = true, value_name = "TICKET|MULTIADDR")]
    peers: Vec<String>,
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each line reports ok, warn or fail, and how to fix the problem. The exit code is 5 if a check fails.")]
pub(super) struct DoctorArgs {
    #[command(flatten)]
    node: NodeArgs,
}

/// Options of a node.
#[derive(Clone, Debug, clap::Args)]
struct NodeArgs {
    /// Display name of the node [default: the host name]
    #[arg(long, value_name = "NAME", env = "MESHNODE_NAME")]
    name: Option<String>,
    /// Failure domain of this machine (a room, a site, a power circuit), at most 32 bytes. Standbys and successors are
    /// preferably placed in another zone [default: unknown]
    #[arg(long, value_name = "NAME", env = "MESHNODE_ZONE")]
    zone: Option<Zone>,
    /// Directory for identity and state [default: ~/.local/share/meshnode]
    #[arg(long, value_name = "DIR", env = "MESHNODE_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// IP address to listen on for peers [default: 0.0.0.0]
    #[arg(long, value_name = "IP", env = "MESHNODE_LISTEN")]
    listen: Option<IpAddr>,
    /// Port P: TCP P for peer discovery, UDP P for gossip, UDP P+1 for data [default: 9471]
    #[arg(long, value_name = "P", env = "MESHNODE_PORT", value_parser = clap::value_parser!(u16).range(..=65534))]
    port: Option<u16>,
    /// Address to advertise to peers instead of the machine's own addresses, behind a router that forwards UDP PORT to
    /// P and UDP PORT+1 to P+1. Separate several with commas, or repeat the flag [default PORT: P]
    #[arg(long, value_name = "IP[:PORT]", env = "MESHNODE_ADVERTISE", value_delimiter = ',')]
    advertise: Vec<Advertised>,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Give the mesh no memory: this node answers the API for every model that the mesh serves, and holds no parts
    #[arg(long, env = "MESHNODE_CLIENT", value_parser = FalseyValueParser::new(), conflicts_with_all = ["memory", "device"])]
    client: bool,
    /// RAM for cached conversations that a GPU has no room for, as in 8GiB; 0: none [default: a quarter of the free RAM]
    #[arg(long, value_name = "SIZE", env = "MESHNODE_SPILL")]
    spill: Option<Size>,
    /// RAM for experts of mixtures that a GPU has no memory for, which the processor computes, as in 32GiB; 0: none [default: half of
    /// the free RAM beside a GPU]
    #[arg(long, value_name = "SIZE", env = "MESHNODE_EXPERT_RAM")]
    expert_ram: Option<Size>,
    /// Unload a served model after this time without requests, as 30m; the next request loads it again [default: never]
    #[arg(long, value_name = "TIME", env = "MESHNODE_IDLE_UNLOAD", value_parser = crate::config::parse_duration)]
    idle_unload: Option<Duration>,
    /// Do not discover peers on the local network, and do not listen on TCP P
    #[arg(long, env = "MESHNODE_NO_MDNS", value_parser = FalseyValueParser::new())]
    no_mdns: bool,
    /// Folder below which submitted simulations may write, in addition to `outputs` in --data-dir and folders that
    /// `submit` proves to be the user's own. Separate several with commas, or repeat the flag
    #[arg(long, value_name = "DIR", env = "MESHNODE_OUTPUT_DIR", value_delimiter = ',')]
    output_dir: Vec<PathBuf>,
    /// Record the node's inputs to this file, for `simnet replay FILE`; it contains prompts, as token ids
    #[arg(long, value_name = "FILE", env = "MESHNODE_RECORD")]
    record: Option<PathBuf>,
    /// Admit every machine of the local network that asks, without the right to invite others; use only in a trusted
    /// network
    #[arg(long, env = "MESHNODE_OPEN", value_parser = FalseyValueParser::new())]
    open: bool,
}

impl NodeArgs {
    /// The folders that submitted simulations may write to.
    fn folders(&self, global: &Global, data_dir: &Path) -> Folders {
        let others = match self.output_dir.is_empty() {
            true => global.file.output_dirs.clone().unwrap_or_default(),
            false => self.output_dir.clone(),
        };
        Folders::new(data_dir, others)
    }

    fn options(&self, global: &Global, join: Vec<String>) -> UpOptions {
        let file = &global.file;
        let (memory, memory_of) = match self.client {
            true => (Some(0), Vec::new()),
            false => self.compute.limits(file.memory.as_ref()),
        };
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
            device: match self.client {
                true => "cpu".into(),
                false => self.compute.device.clone().or_else(|| file.device.clone()).unwrap_or_else(|| "auto".into()),
            },
            memory,
            memory_of,
            spill: self.spill.or(file.spill).map(|size| size.0),
            expert_ram: self.expert_ram.or(file.expert_ram).map(|size| size.0),
            threads: self.compute.threads.or(file.threads),
            idle_unload: self.idle_unload.or(file.idle_unload),
            mdns: !(self.no_mdns || file.no_mdns.unwrap_or(false)),
            open: self.open || file.open.unwrap_or(false),
            join,
            solo: false,
            record: self.record.clone(),
        }
    }
}

pub(super) fn up(global: &Global, args: &UpArgs) -> Result<(), Failure> {
    run_node(global, &args.node, vec![])
}

pub(super) fn join(global: &Global, args: &JoinArgs) -> Result<(), Failure> {
    let mut peers = Vec::new();
    for peer in &args.peers {
        if peer == "-" {
            let text = std::io::read_to_string(std::io::stdin())
                .map_err(|e| Failure::usage(format!("cannot read tickets from stdin: {e}")))?;
            peers.extend(text.split_whitespace().map(str::to_owned));
        } else {
            peers.push(peer.clone());
        }
    }
    if peers.is_empty() {
        return Err(Failure::usage(
            "expected a ticket or multiaddr, found none on stdin: pipe the output of `meshnode invite` into this command",
        ));
    }
    run_node(global, &args.node, peers)
}

pub(super) fn doctor(global: &Global, args: &DoctorArgs) -> Result<(), Failure> {
    let options = args.node.options(global, vec![]);
    let api = global.listen_address()?;
    let report = crate::doctor::examine(&options, api);
    if global.json {
        say(report.to_json())
    } else {
        say(report.to_text().trim_end())
    }
    if report.fails() { Err(Failure::quiet(Failure::FAILED)) } else { Ok(()) }
}

fn run_node(global: &Global, args: &NodeArgs, join: Vec<String>) -> Result<(), Failure> {
    // The files of this process contain keys, prompts or the user's results: deny other users access.
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    let options = args.options(global, join);
    let folders = args.folders(global, &options.data_dir);
    let listen = global.listen_address()?;
    let runtime = runtime()?;
    let result = runtime.block_on(async {
        let api = Api::bind(listen, global.api_key()).await?;
        let key = ApiKey::load_or_create(&options.data_dir).map_err(Failure::failed)?;
        let api = api.administered_with(key).writing_below(folders);
        let address = api.address().map_err(Failure::failed)?;
        let data_dir = options.data_dir.clone();
        let joined = !options.join.is_empty();
        let started = options.clone();
        let (handle, mut running) = crate::node::start(options).await?;
        let _announced = Announcement::new(address, &data_dir);
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
            // An empty line if there is no ticket, so that programs that read the first line do not block.
            say(ticket.as_deref().unwrap_or_default());
        }
        remark(format!("node `{}` is up, with its API on http://{address}", state.name));
        match (&state.banned, ticket) {
            (Some(notice), _) => remark(notice),
            (None, Some(_)) => {
                let uses = crate::node::FIRST_TICKET_USES;
                remark(format!(
                    "up to {uses} machines can join within an hour: meshnode join TICKET (the ticket is the line above)"
                ));
            }
            (None, None) => remark("this node may not invite others: run `meshnode invite` on another member"),
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
            ended = &mut serving => remark(format!("the API server has stopped: the node leaves the mesh ({ended:?})")),
            () = signals.next() => {}
        }
        remark("leaving: waiting for running requests; press Ctrl-C again to exit immediately");
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
    // Does not wait for hashing or loading.
    runtime.shutdown_background();
    result
}

/// Names a GPU that stays idle, because `--device` does not name it, and the command that starts a second node on it.
/// `number` counts the idle GPUs, so that each suggestion has its own ports and data directory.
fn idle_gpu_advice(options: &UpOptions, api: SocketAddr, gpu: &Device, number: usize) -> String {
    let suffix = gpu.id.to_string().replace(':', "");
    let step = PORTS_APART.saturating_mul(u16::try_from(number + 1).unwrap_or(u16::MAX));
    let mut data_dir = options.data_dir.clone().into_os_string();
    data_dir.push(format!("-{suffix}"));
    let zone = options.zone.as_ref().map(|zone| format!(" --zone '{}'", zone.name())).unwrap_or_default();
    format!(
        "{} ({}, {}) stays idle: add it to --device {}, or start a second node on it with:\n  meshnode join \"$(meshnode --api {api} \
         invite)\" --device {} --name {}-{suffix}{zone} --data-dir {} --port {} --api {}",
        gpu.id,
        gpu.name,
        Size(gpu.memory_total),
        options.device,
        gpu.id,
        options.name,
        data_dir.to_string_lossy(),
        options.port.saturating_add(step),
        SocketAddr::new(api.ip(), api.port().saturating_add(step)),
    )
}

/// Resolves with the reason if a member reports within [`LONELY`] that this node is banned; otherwise never. A node
/// that was already a member stays up and reports the ban in its state.
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

/// Prints possible causes, once, if a joined node reaches no peer.
async fn diagnose_loneliness(handle: NodeHandle) {
    tokio::time::sleep(LONELY).await;
    let state = handle.state().await;
    if state.peers.iter().any(|p| !p.this_node && p.state == "alive") {
        return;
    }
    remark(format!(
        "no peer has answered after {} s. Check that the other node is running, that UDP ports P and P+1 are open in both \
         directions (run `meshnode doctor` on both machines), and that the ticket has not expired",
        LONELY.as_secs()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kernels::device::DeviceId;

    /// The suggested command line parses, and its ports do not collide with the first node's.
    #[test]
    fn advice_for_an_idle_gpu_is_a_valid_command() {
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
