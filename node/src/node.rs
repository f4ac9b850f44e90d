//! Assembles a node: identity, certificate, sockets, threads. Everything it starts ends when [`Running`] is dropped.
use crate::admission::{self, Admission, AdmissionError};
use crate::bans::{self, Bans};
use crate::boundary::StageTraffic;
use crate::bulk::BulkRequest;
use crate::calendar::date_time;
use crate::clock::unix_seconds;
use crate::config::UpOptions;
use crate::device::Devices;
use crate::device_thread;
use crate::device_thread::shared::Shared;
use crate::directory::Directory;
use crate::driver;
use crate::driver::queue::{self, DriverHandle, DriverQueue};
use crate::error::NodeError;
use crate::handle::last_options::LastOptions;
use crate::handle::model::Vocabularies;
use crate::handle::remembered::Remembered;
use crate::handle::serving::Serving;
use crate::handle::{Inner, NodeHandle};
use crate::hub::EventRouter;
use crate::links::Links;
use crate::quiet::Quiet;
use crate::record::Recorder;
use crate::renewal::{self, Renewal};
use crate::residency::Residency;
use crate::shell::{self, Shell};
use crate::states::States;
use crate::store::{Store, StoreError};
use crate::submissions::{self, Submissions};
use crate::tensors::{Tensor, TensorStore};
use crate::transfer::Library;
use crate::transfer::cache::Cache;
use crate::transfer::error::TransferError;
use crate::vital::{End, Parts};
use kernels::boundary::Codec;
use node_core::config::Config;
use node_core::id::{Epoch, JobId, NodeId, PartId};
use node_core::input::Input;
use node_core::message::{Drafts, FrameHeader};
use node_core::node::Node;
use node_core::work::Contact;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use transport::discovery::{Discovery, DiscoveryEvent, DiscoveryOptions, PeerAddress};
use transport::frame::{self, Dtype, WireHeader};
use transport::{
    DialError, Disconnect, Endpoint, Event, GossipSocket, Identity, MeshCredentials, MeshId, PeerId, Reply, Ticket,
};

/// Lifetime of the ticket printed at start.
const FIRST_TICKET_TTL: Duration = Duration::from_secs(3600);
/// Machines that it admits: enough for a household.
pub(crate) const FIRST_TICKET_USES: u32 = 10;
/// How often a node without a ticket asks again whether it was approved.
const ASK_AGAIN: Duration = Duration::from_secs(3);

/// A running node. Dropping it ends the node.
pub(crate) struct Running {
    /// A ticket for a few machines, valid for an hour; `None` if this node cannot admit others.
    pub ticket: Option<String>,
    /// Completes when the node has left the mesh; with an error if it failed.
    pub stopped: tokio::sync::oneshot::Receiver<()>,
    /// GPUs of this machine that this node does not use.
    pub idle_gpus: Vec<kernels::device::Device>,
    _discovery: Option<Discovery>,
    _links: Links,
    _renewal: Renewal,
    bans: tokio::task::JoinHandle<()>,
    /// The watch over all threads and tasks.
    watch: tokio::task::AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.watch.abort();
        self.bans.abort();
    }
}

/// Starts a node, and joins or founds its mesh.
///
/// # Errors
/// A port in use, an unusable data directory, a missing device, or an invalid ticket; each text says what to do.
pub(crate) async fn start(options: UpOptions) -> Result<(NodeHandle, Running), NodeError> {
    warn_of_the_clock();
    crate::private::folder(&options.data_dir).map_err(|e| NodeError::Failed(format!("the data directory {e}")))?;
    let identity = Identity::load_or_create(&options.data_dir).map_err(|e| NodeError::Failed(e.to_string()))?;
    let store = Arc::new(Store::open(&options.data_dir)?);
    let generation = store.next_generation()?;
    let measured = options.clone();
    let devices = tokio::task::spawn_blocking(move || Devices::open(&measured))
        .await
        .map_err(|e| NodeError::Failed(format!("measuring the devices was interrupted: {e}")))?
        .map_err(NodeError::Invalid)?;
    let cache = Cache::beside(&options.models_dir, options.cache_bytes);
    let library = Arc::new(Library::open(cache, &options.models_dir)?);

    let (driver, queue) = queue::channel();
    let tensors = Arc::new(TensorStore::default());
    let admission: Arc<OnceLock<Arc<Admission>>> = Arc::default();
    let port = choose_port(&options)?;
    let bans_cell: Arc<OnceLock<Arc<Bans>>> = Arc::default();
    let me = NodeId(identity.node_id());
    let states = Arc::new(States::default());
    let inherited = submissions::inherited::folder(&options.data_dir);
    let hub = Arc::new(EventRouter::new());
    let to_core = (driver.clone(), hub.clone());
    let submissions = Arc::new(Submissions::new(me, generation.0, to_core, states.clone(), inherited));
    let directory = Arc::new(Directory::default());
    let ways_in = WaysIn {
        admission: admission.clone(),
        bans: bans_cell.clone(),
        submissions: submissions.clone(),
        quiet: Arc::default(),
        directory: directory.clone(),
    };
    let endpoint = bind(&options, port, &identity, &driver, &tensors, &ways_in, &library)?;
    let (credentials, inviter) = membership(&options, &identity, &endpoint).await?;
    endpoint.set_credentials(credentials.clone());

    submissions.connect(endpoint.clone());
    let gossip = {
        let driver = driver.clone();
        let addr = SocketAddr::new(options.listen, port);
        GossipSocket::spawn(addr, me.0, generation.0, &credentials.mesh_key, move |from, source, bytes| {
            driver.input(Input::Datagram { from: NodeId(from), source, bytes });
        })
        .map_err(|e| bind_error(port, &e))?
    };
    let gossip = Arc::new(gossip);
    let gossip_addrs = advertised(&options, port)?;
    let config = Config {
        node: me,
        generation,
        peer_id: identity.peer_id().to_bytes(),
        name: options.name.clone(),
        data_addrs: gossip_addrs.iter().map(|a| SocketAddr::new(a.ip(), a.port() + 1)).collect(),
        gossip_addrs,
        capacity: devices.capacity.clone(),
    };
    let guests = Admission::new(identity.clone(), credentials, store.clone(), config.data_addrs.clone(), options.open);
    let guests = admission.get_or_init(|| Arc::new(guests)).clone();
    let (data_dir, name) = (options.data_dir.clone(), options.name.clone());
    let bans = Bans::open(endpoint.clone(), guests.clone(), gossip.clone(), driver.clone(), data_dir, name)?;
    let bans = bans_cell.get_or_init(|| bans).clone();
    let advertise = driver.clone();
    let residency = Residency::new(devices.capacity, move |now| advertise.input(Input::CapacityChanged(now)));
    let residency = Arc::new(residency);
    let idle_gpus = devices.idle_gpus;
    let mut parts = Parts::default();
    let mut slots = Vec::with_capacity(devices.all.len());
    for compute in devices.all {
        let shared = Shared {
            tensors: tensors.clone(),
            states: states.clone(),
            residency: residency.clone(),
            driver: driver.clone(),
            device: compute.clone(),
            suspected: Arc::default(),
        };
        let (commands, computing) = device_thread::spawn(shared).map_err(|e| NodeError::Failed(e.to_string()))?;
        parts.add("a device thread", move || !computing.is_finished());
        slots.push(shell::Device { compute, commands });
    }
    let (socket, accepting) = (Arc::downgrade(&gossip), Arc::downgrade(&endpoint));
    parts.add("the gossip thread", move || socket.upgrade().is_none_or(|socket| socket.runs()));
    parts.add("the task that accepts connections", move || {
        accepting.upgrade().is_none_or(|endpoint| endpoint.accepts())
    });
    let last_options = Arc::new(LastOptions::default());
    let boundary = Arc::new(StageTraffic::default());
    let shell = Shell {
        driver: driver.clone(),
        runtime: tokio::runtime::Handle::current(),
        identity: identity.clone(),
        gossip,
        endpoint: endpoint.clone(),
        tensors,
        store: store.clone(),
        library: library.clone(),
        hub: hub.clone(),
        devices: slots,
        placed: BTreeMap::new(),
        residency,
        last_options: last_options.clone(),
        boundary: boundary.clone(),
        states,
        submissions: submissions.clone(),
    };
    let seed = u64::from_le_bytes(me.0[..8].try_into().unwrap_or([0; 8])) ^ generation.0;
    let recorder = match &options.record {
        None => None,
        Some(path) => Some(Recorder::begin(path, &config, seed).map_err(|e| {
            NodeError::Failed(format!("cannot record into {}: {e}; name a file that can be written", path.display()))
        })?),
    };
    let (end, stopped) = End::new();
    run(Node::new(config, seed), shell, queue, recorder, end.clone())?;
    driver.input(Input::Holdings(library.contents()));
    introduce(&driver, store.peers(), inviter);
    // mDNS or a ticket finds peers; without mDNS no peer dials TCP P.
    let discovery = match options.solo || !options.mdns {
        true => None,
        false => Some(discover(&options, port, &identity, guests.credentials().mesh, &driver).await?),
    };
    let renewal = Renewal::watch(endpoint.clone(), guests.clone(), options.data_dir.clone());
    let links = Links::watch(endpoint.clone(), driver.clone());
    let exchanging = bans.watch();
    parts.add_task("the ban exchange", exchanging.abort_handle());
    parts.add_task("the certificate renewal", renewal.task());
    parts.add_task("the link measurement", links.task());
    if let Some(discovery) = &discovery {
        parts.add_task("discovery", discovery.task());
    }
    let invites = guests.may_invite() && bans.notice().is_none();
    let ticket = if invites { Some(guests.invite(FIRST_TICKET_TTL, FIRST_TICKET_USES)?) } else { None };
    let serving = Serving::new(driver.clone(), hub.clone(), directory.models.clone());
    let handle = NodeHandle {
        inner: Arc::new(Inner {
            node: me,
            peer_id: identity.peer_id().to_string(),
            name: options.name,
            driver: driver.clone(),
            hub,
            library,
            admission: guests,
            bans: bans.clone(),
            models_dir: options.models_dir,
            serving,
            last_options,
            remembered: Remembered::open(&options.data_dir),
            endpoint: endpoint.clone(),
            boundary,
            submissions,
            vocabularies: Vocabularies::default(),
            idle_unload: options.idle_unload,
            leaving: AtomicBool::new(false),
        }),
    };
    handle.serve_again();
    handle.watch_usage();
    handle.watch_successions();
    let running = Running {
        ticket,
        stopped,
        idle_gpus,
        _discovery: discovery,
        _links: links,
        _renewal: renewal,
        bans: exchanging,
        watch: parts.watch(end),
    };
    Ok((handle, running))
}

/// Certificates, tickets and bans have dates, so a wrong clock breaks them.
fn warn_of_the_clock() {
    let (now, built) = (unix_seconds(), env!("MESHNODE_BUILD_UNIX").parse().unwrap_or(0));
    if now < built {
        tracing::warn!(
            "this machine's clock says {}, but this program was built at {}: certificates, tickets and bans depend on the \
             clock, so set it (NTP) before others rely on this node",
            date_time(now),
            date_time(built)
        );
    }
}

/// The first peer to connect to.
struct Inviter {
    peer_id: PeerId,
    data: Vec<SocketAddr>,
}

/// This node's certificate: from its data directory, by a ticket or an approval, or as the founder of a new mesh.
async fn membership(
    options: &UpOptions,
    identity: &Identity,
    endpoint: &Endpoint,
) -> Result<(MeshCredentials, Option<Inviter>), NodeError> {
    let mut held = admission::load(&options.data_dir)?;
    if let Some(renewed) = held.as_ref().and_then(|held| renewal::renew_founder(held, identity)) {
        admission::save(&options.data_dir, &renewed)?;
        held = Some(renewed);
    }
    let mut notice = None;
    if let Some(known) = held.take() {
        let (known, banned) = bans::restore(&options.data_dir, identity.peer_id(), known)?;
        (held, notice) = (Some(known), banned);
    }
    let over = held.as_ref().is_some_and(|held| renewal::seconds_left(held) == 0);
    // If its sponsor was banned, this member may be admitted again by another one.
    let again = over || notice.as_ref().is_some_and(|notice| notice.sponsor);
    let mut last = None;
    for way in &options.join {
        let way = Way::parse(way)?;
        if let (Way::Ticket(ticket), Some(held)) = (&way, &held) {
            admission::same_mesh(held, ticket.mesh, &options.data_dir)?;
        }
        if let Some(notice) = notice.as_ref().filter(|notice| !notice.sponsor) {
            return Err(NodeError::Unauthorised(notice.to_string()));
        }
        if let Some(held) = held.as_ref().filter(|_| !again) {
            return Ok((held.clone(), way.inviter()));
        }
        match way.join(endpoint, &options.name).await {
            Ok((admitted, inviter)) => {
                let credentials = admitted.credentials();
                admission::save(&options.data_dir, &credentials)?;
                return Ok((credentials, Some(inviter)));
            }
            Err(error) => last = Some(error),
        }
    }
    if let Some(error) = last {
        return Err(error);
    }
    let credentials = match held {
        Some(_) if over => return Err(NodeError::Unauthorised(renewal::expired(&options.data_dir))),
        Some(held) => held,
        None => {
            let founded = admission::found(identity);
            admission::save(&options.data_dir, &founded)?;
            founded
        }
    };
    Ok((credentials, None))
}

/// A way to join a mesh, as the user gave it.
enum Way {
    Ticket(Box<Ticket>),
    Address { peer: Option<PeerId>, data: SocketAddr },
}

impl Way {
    fn parse(text: &str) -> Result<Self, NodeError> {
        if text.starts_with('/') {
            let address = PeerAddress::parse(text).map_err(|e| NodeError::Invalid(e.to_string()))?;
            return Ok(Way::Address { peer: address.peer_id, data: address.data() });
        }
        text.parse()
            .map(|ticket| Way::Ticket(Box::new(ticket)))
            .map_err(|e: transport::TicketError| NodeError::Invalid(e.to_string()))
    }

    fn inviter(&self) -> Option<Inviter> {
        match self {
            Way::Ticket(ticket) => Some(Inviter { peer_id: ticket.inviter, data: ticket.addrs.clone() }),
            Way::Address { peer, data } => peer.map(|peer_id| Inviter { peer_id, data: vec![*data] }),
        }
    }

    async fn join(&self, endpoint: &Endpoint, name: &str) -> Result<(transport::join::Admission, Inviter), NodeError> {
        use transport::JoinError;
        use transport::join::JoinRejection;
        match self {
            Way::Ticket(ticket) => {
                let admission = endpoint.join(ticket, name).await.map_err(join_error)?;
                Ok((admission, Inviter { peer_id: ticket.inviter, data: ticket.addrs.clone() }))
            }
            Way::Address { peer, data } => loop {
                match endpoint.join_at(&[*data], *peer, name).await {
                    Err(error @ JoinError::Refused { refusal: JoinRejection::NotApproved, .. }) => {
                        tracing::warn!("{error}; retrying every {} s", ASK_AGAIN.as_secs());
                        tokio::time::sleep(ASK_AGAIN).await;
                    }
                    answer => {
                        let (admission, peer_id) = answer.map_err(join_error)?;
                        return Ok((admission, Inviter { peer_id, data: vec![*data] }));
                    }
                }
            },
        }
    }
}

fn join_error(error: transport::JoinError) -> NodeError {
    use transport::JoinError;
    match error {
        JoinError::Refused { .. } | JoinError::Certificate(_) => NodeError::Unauthorised(error.to_string()),
        // The node responded: the user must update one of the two.
        JoinError::Dial(DialError::OtherVersion { .. }) => NodeError::Failed(error.to_string()),
        JoinError::Dial(_) | JoinError::Answer { .. } => NodeError::Unreachable(error.to_string()),
    }
}

/// Gives the core the peers that it may reconnect to.
fn introduce(driver: &DriverHandle, remembered: Vec<Contact>, inviter: Option<Inviter>) {
    for Contact { node, peer_id, gossip, data } in remembered {
        driver.input(Input::PeerFound { node, peer_id, gossip, data, remembered: true });
    }
    if let Some(Inviter { peer_id, data }) = inviter {
        let gossip = data.iter().map(|a| SocketAddr::new(a.ip(), a.port().saturating_sub(1))).collect();
        let node = NodeId(transport::node_id(&peer_id));
        driver.input(Input::PeerFound { node, peer_id: peer_id.to_bytes(), gossip, data, remembered: true });
    }
}

fn run(node: Node, shell: Shell, queue: DriverQueue, recorder: Option<Recorder>, end: End) -> Result<(), NodeError> {
    std::thread::Builder::new()
        .name("driver".into())
        .spawn(move || end.after(|| driver::run(node, shell, &queue, recorder)))
        .map_err(|e| NodeError::Failed(format!("the driver thread could not be started: {e}")))?;
    Ok(())
}

/// Handlers of incoming requests. They exist before the endpoint, and are filled in once the node has a mesh.
#[derive(Clone)]
struct WaysIn {
    admission: Arc<OnceLock<Arc<Admission>>>,
    bans: Arc<OnceLock<Arc<Bans>>>,
    submissions: Arc<Submissions>,
    /// Limits the log lines that strangers can cause.
    quiet: Arc<Quiet>,
    directory: Arc<Directory>,
}

fn bind(
    options: &UpOptions,
    port: u16,
    identity: &Identity,
    driver: &DriverHandle,
    tensors: &Arc<TensorStore>,
    ways_in: &WaysIn,
    library: &Arc<Library>,
) -> Result<Arc<Endpoint>, NodeError> {
    let (driver, tensors, library) = (driver.clone(), tensors.clone(), library.clone());
    let (sunk, asked) = (ways_in.clone(), ways_in.clone());
    let viewed = driver.clone();
    let sink = move |event: Event| arrive(event, &driver, &tensors, &sunk);
    let serve = move |from: transport::NodeId, request: bytes::Bytes, reply: Reply| {
        let (library, ways_in, driver) = (library.clone(), asked.clone(), viewed.clone());
        // Reading a chunk may block on the disk.
        tokio::task::spawn_blocking(move || answer(from, &request, reply, &library, &ways_in, &driver));
    };
    let listen = transport::Options {
        listen: SocketAddr::new(options.listen, port + 1),
        identity: identity.clone(),
        credentials: None,
        limits: transport::Limits::default(),
    };
    Endpoint::bind(listen, sink, serve).map(Arc::new).map_err(|e| bind_error(port, &e))
}

/// Answers a member's request. Blocks.
fn answer(
    from: transport::NodeId,
    request: &[u8],
    reply: Reply,
    library: &Library,
    ways_in: &WaysIn,
    driver: &DriverHandle,
) {
    let answer = match BulkRequest::decode(request) {
        Some(BulkRequest::Grid(grid)) => return ways_in.submissions.answer(&grid, reply),
        Some(BulkRequest::Weights(content, what)) => Some(library.answer(content, what)),
        Some(BulkRequest::Renewal(chain)) => {
            ways_in.admission.get().map(|guests| renewal::answer(guests, from, &chain))
        }
        Some(BulkRequest::Bans(exchange)) => ways_in.bans.get().map(|bans| bans.answer(from, exchange)),
        Some(BulkRequest::Served) => {
            let views = tokio::runtime::Handle::current().block_on(driver.views());
            Some(ways_in.directory.answer(&views))
        }
        None => None,
    };
    // An unknown request, or one that cannot be answered yet, gets a negative response.
    if reply.blocking_send(answer.unwrap_or_else(|| vec![0]).into()) {
        reply.finish();
    }
}

/// Turns network events into inputs of the core.
fn arrive(event: Event, driver: &DriverHandle, tensors: &TensorStore, ways_in: &WaysIn) {
    match event {
        Event::Connected { node, rtt, .. } => {
            let rtt_ns = u64::try_from(rtt.as_nanos()).unwrap_or(u64::MAX);
            driver.input(Input::Connected { node: NodeId(node), rtt_ns });
            if let Some(bans) = ways_in.bans.get() {
                bans.connected(node);
            }
        }
        Event::Banned(revocation) => {
            if let Some(bans) = ways_in.bans.get().cloned() {
                // Writes to disk.
                tokio::task::spawn_blocking(move || bans.handle_refused(*revocation));
            }
        }
        Event::Disconnected { node, reason } => {
            match &reason {
                Disconnect::Dial(error @ DialError::OtherVersion { .. }) => {
                    if let Some(more) = ways_in.quiet.admit() {
                        tracing::warn!("{} is not connected: {error}{more}", NodeId(node));
                    }
                }
                Disconnect::Dial(_)
                | Disconnect::ByPeer { .. }
                | Disconnect::Here { .. }
                | Disconnect::Lost
                | Disconnect::Broken(_) => tracing::debug!("{} is disconnected: {reason}", NodeId(node)),
            }
            driver.input(Input::Disconnected { node: NodeId(node) });
        }
        Event::Message { from, bytes } => {
            let (bytes, credit) = bytes.split();
            driver.arrived(Input::Message { from: NodeId(from), bytes: bytes.into() }, credit);
        }
        Event::Frame { from, head, payload } => {
            let header = header(&head);
            let (payload, credit) = payload.split();
            let tensor = match head.dtype {
                Dtype::U32 => Tensor::Tokens(frame::to_u32(&payload)),
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Tensor::Hidden(frame::to_f32(&payload).into()),
                Dtype::Rows16 => Tensor::Encoded { codec: Codec::F16, rows: payload },
                Dtype::Rows8 => Tensor::Encoded { codec: Codec::Q8, rows: payload },
                Dtype::Rows4 => Tensor::Encoded { codec: Codec::Q4, rows: payload },
                dtype @ (Dtype::Cells | Dtype::Bits | Dtype::HalfCells) => Tensor::Halo { bytes: payload, dtype },
            };
            driver.input(Input::Frame { from: NodeId(from), header, tensor: tensors.arrive(tensor, credit) });
        }
        Event::StreamStopped { node, route } => {
            tracing::debug!(
                "{} does not expect frames of job {:016x}, epoch {}",
                NodeId(node),
                route.job,
                route.epoch.counter
            );
        }
        Event::Join(request) => match ways_in.admission.get() {
            Some(guests) => {
                let guests = guests.clone();
                // Admitting writes to disk.
                tokio::task::spawn_blocking(move || guests.answer(request, Vec::new()));
            }
            None => request.reject(transport::join::JoinRejection::NotAMember),
        },
        Event::Rejected { from, addr, why } => {
            let who = from.map_or_else(|| addr.to_string(), |peer| format!("{peer} at {addr}"));
            if let Some(more) = ways_in.quiet.admit() {
                tracing::warn!("rejected {who}: {why}{more}");
            }
        }
    }
}

fn header(head: &WireHeader) -> FrameHeader {
    FrameHeader {
        job: JobId(head.route.job),
        epoch: Epoch { counter: head.route.epoch.counter, issuer: NodeId(head.route.epoch.issuer) },
        part: PartId(head.route.part),
        channel: head.channel,
        cursor: head.cursor,
        count: head.count,
        last: head.last,
        continues: head.continues,
        drafts: Drafts { round: head.round, rows: head.drafts, kept: head.kept },
    }
}

async fn discover(
    options: &UpOptions,
    port: u16,
    identity: &Identity,
    mesh: MeshId,
    driver: &DriverHandle,
) -> Result<Discovery, NodeError> {
    let (driver, quiet) = (driver.clone(), Quiet::default());
    let on_event = move |event: DiscoveryEvent| match event {
        DiscoveryEvent::PeerFound { peer_id, node, gossip, data } => {
            let (gossip, data) = (vec![gossip], vec![data]);
            let (node, peer_id) = (NodeId(node), peer_id.to_bytes());
            driver.input(Input::PeerFound { node, peer_id, gossip, data, remembered: false });
        }
        DiscoveryEvent::OtherVersion { peer_id, what } => {
            if let Some(more) = quiet.admit() {
                tracing::warn!("{peer_id} {what}{more}");
            }
        }
    };
    let discovery = DiscoveryOptions {
        identity: identity.clone(),
        mesh,
        listen: SocketAddr::new(options.listen, port),
        gossip_port: port,
        data_port: port + 1,
        mdns: options.mdns,
    };
    Discovery::spawn(discovery, on_event).await.map_err(|e| bind_error(port, &e))
}

/// The configured port, or if that is 0 a free one whose successor is free too.
fn choose_port(options: &UpOptions) -> Result<u16, NodeError> {
    if options.port == u16::MAX {
        return Err(NodeError::Invalid(
            "--port 65535 leaves no port for the data plane above it: choose another".into(),
        ));
    }
    if options.port != 0 {
        return Ok(options.port);
    }
    for _ in 0..64 {
        let socket =
            UdpSocket::bind((options.listen, 0)).map_err(|e| NodeError::Failed(format!("{}: {e}", options.listen)))?;
        let port = socket.local_addr().map_or(0, |a| a.port());
        if (1..u16::MAX).contains(&port) && UdpSocket::bind((options.listen, port + 1)).is_ok() {
            return Ok(port);
        }
    }
    Err(NodeError::Failed("no two consecutive free ports found: choose one with --port".into()))
}

/// Gossip addresses to advertise: the configured ones, else those at which this machine is reachable as far as it can
/// tell.
fn advertised(options: &UpOptions, port: u16) -> Result<Vec<SocketAddr>, NodeError> {
    let (count, most) = (options.advertise.len(), node_core::limits::ADVERT_ADDRS_MAX);
    if count > most {
        return Err(NodeError::Invalid(format!("--advertise names {count} addresses; at most {most} are allowed")));
    }
    if count == 0 {
        return Ok(reachable_at(options.listen).into_iter().map(|ip| SocketAddr::new(ip, port)).collect());
    }
    Ok(options.advertise.iter().map(|a| a.gossip(port)).collect())
}

/// Addresses of this machine. If the node listens on all interfaces: the address of the default route first (no packet
/// is sent to find it), then those of the other interfaces, loopback last.
fn reachable_at(listen: IpAddr) -> Vec<IpAddr> {
    if !listen.is_unspecified() {
        return vec![listen];
    }
    let towards = |any: IpAddr, far: IpAddr| {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((far, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    // Documentation addresses (RFC 5737, RFC 3849): routed like any remote address.
    let v4 = towards(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into());
    let v6 = towards(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into());
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let others = interfaces.iter().filter(|i| !i.is_link_local()).map(if_addrs::Interface::ip);
    let mut all: Vec<IpAddr> = Vec::new();
    for ip in [v4, v6].into_iter().flatten().chain(others) {
        let usable = !ip.is_unspecified() && !ip.is_loopback() && (ip.is_ipv4() || listen.is_ipv6());
        if usable && !all.contains(&ip) {
            all.push(ip);
        }
    }
    all.truncate(node_core::limits::ADVERT_ADDRS_MAX - 1);
    all.push(Ipv4Addr::LOCALHOST.into());
    all
}

/// Names the port of the flag too, since the port in use may be its successor.
fn bind_error(port: u16, error: &transport::BindError) -> NodeError {
    NodeError::Failed(format!("cannot listen with --port {port}: {error}"))
}

impl From<StoreError> for NodeError {
    fn from(error: StoreError) -> Self {
        NodeError::Failed(error.to_string())
    }
}

impl From<TransferError> for NodeError {
    fn from(error: TransferError) -> Self {
        NodeError::Failed(error.to_string())
    }
}

impl From<AdmissionError> for NodeError {
    fn from(error: AdmissionError) -> Self {
        match error {
            AdmissionError::Unknown(_) => NodeError::NotFound(error.to_string()),
            AdmissionError::Refused(_) => NodeError::Unauthorised(error.to_string()),
            AdmissionError::Storage(_) => NodeError::Failed(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `join` exits with code 5 and a line that says which side to update; code 3 is for nodes that do not respond.
    #[test]
    fn a_node_of_another_version_is_not_reported_as_unreachable() {
        let addr = SocketAddr::from(([192, 0, 2, 1], 9472));
        let what = "speaks meshnode/1, this node meshnode/3: update meshnode there".to_owned();
        let error = join_error(DialError::OtherVersion { addr, what }.into());
        let line = "192.0.2.1:9472 speaks meshnode/1, this node meshnode/3: update meshnode there";
        assert!(matches!(&error, NodeError::Failed(said) if said == line), "{error}");
        let silent = DialError::Unreachable { addrs: vec![addr], after: Duration::from_secs(5) };
        assert!(matches!(join_error(silent.into()), NodeError::Unreachable(_)));
    }
}
