//! Carries out what the core decides: the hands of a node. No policy lives here.
use crate::driver::DriverHandle;
use crate::executor::Command;
use crate::handle::{JobView, PeerView, StageView, hex};
use crate::hub::Hub;
use crate::store::Store;
use crate::tensors::{Tensor, Tensors};
use crate::transfer::{Ask, Library};
use kernels::stage::{Activations, Rows, RowsIn, Stage, StageOptions};
use node_core::id::{Epoch, JobId, NodeId};
use node_core::input::{Input, LoadedStage};
use node_core::job::JobState;
use node_core::limits::CHUNK_POSITIONS_MAX;
use node_core::membership::MemberState;
use node_core::message::Advert;
use node_core::message::FrameHeader;
use node_core::node::Node;
use node_core::output::{DownReason, Event, Output, Payload, StageSpec};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;
use transport::frame::{self, Dtype, Expectation, FrameHead, Route};
use transport::{Endpoint, GossipSocket, Identity, Priority};

/// Everything outputs need.
pub struct Shell {
    pub(crate) driver: DriverHandle,
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) identity: Identity,
    pub(crate) gossip: GossipSocket,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) executor: mpsc::Sender<Command>,
    pub(crate) tensors: Arc<Tensors>,
    pub(crate) store: Arc<Store>,
    pub(crate) library: Arc<Library>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) device: Arc<crate::device::Compute>,
}

impl Shell {
    /// Does it, or hands it to whoever does; never blocks.
    pub fn carry_out(&mut self, output: Output) {
        match output {
            Output::SendDatagram { to, addr, bytes } => {
                // Gossip may be lost; a route that is down now may be up in the next round.
                if let Err(e) = self.gossip.send(&to.0, addr, &bytes) {
                    tracing::trace!("no datagram to {to}: {e}");
                }
            }
            Output::SendMessage { to, bytes } => {
                if let Err(e) = self.endpoint.send_message(to.0, bytes.into()) {
                    tracing::debug!("a message to {to} is lost: {e}");
                    self.driver.input(Input::Disconnected { node: to });
                }
            }
            Output::SendFrame { to, header, payload } => self.send_frame(to, &header, payload),
            Output::Connect { node, peer_id, addrs } => self.connect(node, &peer_id, addrs),
            Output::Disconnect { node } => self.endpoint.disconnect(node.0),
            Output::Sign { token, bytes } => {
                let signature = self.identity.sign(&bytes);
                self.driver.input(Input::Signed { token, signature });
            }
            Output::Verify { token, peer_id, bytes, signature } => self.off_thread(move || {
                let valid = transport::identity::verify(&peer_id, &bytes, &signature);
                Input::Verified { token, valid }
            }),
            Output::Plan { token, work, fleet, options, repair } => self.off_thread(move || {
                let result = match repair {
                    Some(current) => partitioner::repair(&current, &work, &fleet, &options),
                    None => partitioner::plan(&work, &fleet, &options),
                };
                Input::Planned { token, result: result.map(Box::new) }
            }),
            Output::Load { job, epoch, stage } => self.load(job, epoch, *stage),
            Output::Unload { job } => {
                self.endpoint.forget(job.0);
                self.execute(Command::Unload { job });
            }
            Output::Compute { work, job, epoch, items } => self.execute(Command::Compute { work, job, epoch, items }),
            Output::Release { job, request } => self.execute(Command::Release { job, request }),
            Output::Discard { tensor } => drop(self.tensors.take(tensor)),
            Output::Persist { seq, record } => {
                let (store, driver) = (self.store.clone(), self.driver.clone());
                self.runtime.spawn_blocking(move || match store.persist(&record) {
                    Ok(()) => driver.input(Input::Persisted { seq }),
                    // What must survive is not acted upon; a job that waits for it says so itself.
                    Err(e) => {
                        tracing::warn!("{e}");
                        driver.input(Input::PersistFailed { seq, reason: e.to_string() });
                    }
                });
            }
            Output::Notify(event) => self.notify(event),
        }
    }

    fn notify(&self, event: Event) {
        log(&event);
        self.hub.tell(event);
    }

    fn send_frame(&self, to: NodeId, header: &FrameHeader, payload: Payload) {
        let tensor = match payload {
            Payload::Tokens(tokens) => Some(Tensor::Tokens(tokens)),
            Payload::Tensor(id) => self.tensors.take(id),
        };
        let Some(tensor) = tensor else {
            tracing::error!("a frame of job {:016x} has lost its rows", header.job.0);
            return;
        };
        let (dtype, width, bytes) = match &tensor {
            Tensor::Tokens(tokens) => (Dtype::U32, 1, frame::from_u32(tokens)),
            Tensor::Hidden(rows) => (Dtype::F32, rows.len() as u32 / header.count.max(1), frame::from_f32(rows)),
        };
        let head = FrameHead {
            route: route(header.job, header.epoch, header.edge),
            request: header.request.0,
            position: header.position,
            count: header.count,
            sample: header.sample,
            dtype,
            width,
        };
        let priority = if header.count == 1 { Priority::Decode } else { Priority::Prefill };
        if let Err(e) = self.endpoint.send_frame(to.0, head, bytes, priority) {
            tracing::debug!("a frame to {to} is lost: {e}");
        }
    }

    fn connect(&self, node: NodeId, peer_id: &[u8], addrs: Vec<std::net::SocketAddr>) {
        match transport::PeerId::from_bytes(peer_id) {
            Ok(peer) if transport::node_id(&peer) == node.0 => self.endpoint.connect(peer, addrs),
            _ => self.driver.input(Input::Disconnected { node }),
        }
    }

    /// Gets the weights, loads the stage, warms it, and hands it to the executor.
    fn load(&mut self, job: JobId, epoch: Epoch, spec: StageSpec) {
        let rows_in = if spec.layers.start == 0 {
            Expectation::tokens(CHUNK_POSITIONS_MAX)
        } else {
            Expectation::hidden(spec.width, CHUNK_POSITIONS_MAX)
        };
        self.endpoint.expect(route(job, epoch, spec.stage), rows_in);
        let (library, ask) = (self.library.clone(), Arc::new(EndpointAsk(self.endpoint.clone())));
        let (driver, executor, device) = (self.driver.clone(), self.executor.clone(), self.device.clone());
        self.runtime.spawn(async move {
            let layers = spec.layers.start as usize..spec.layers.end as usize;
            let held = library.share(spec.content, layers, &spec.sources, &ask).await.map_err(|e| e.to_string());
            let loaded = tokio::task::spawn_blocking(move || {
                held.and_then(|held| load_stage(&device, held.file.clone(), &spec))
            })
            .await;
            let result = loaded.unwrap_or_else(|e| Err(format!("loading was interrupted: {e}")));
            let result = result.map(|stage| {
                let bytes = stage.resident_bytes();
                let _ = executor.send(Command::Install { job, epoch, stage });
                LoadedStage { bytes: bytes.weights + bytes.working }
            });
            driver.input(Input::Loaded { job, epoch, result });
        });
    }

    fn execute(&self, command: Command) {
        let _ = self.executor.send(command);
    }

    fn off_thread(&self, work: impl FnOnce() -> Input + Send + 'static) {
        let driver = self.driver.clone();
        self.runtime.spawn_blocking(move || driver.input(work()));
    }

    /// Members for the API, with what the transport measured; this node first.
    pub fn peer_views(&self, node: &Node) -> Vec<PeerView> {
        let own = peer_view(node.membership().own(), "alive", true, false, None);
        let others = node.members().map(|m| {
            let state = match m.state {
                MemberState::Alive => "alive",
                MemberState::Suspect => "suspect",
                MemberState::Down(DownReason::Left) => "left",
                MemberState::Down(DownReason::Failed) => "down",
            };
            match m.advert {
                Some(advert) => peer_view(advert, state, false, m.connected, m.rtt_ns),
                None => PeerView {
                    node: hex(&m.node),
                    state: state.to_owned(),
                    connected: m.connected,
                    ..PeerView::default()
                },
            }
        });
        std::iter::once(own).chain(others).collect()
    }

    /// Jobs for the API: those this node heads, then the stages it holds of others'.
    pub fn job_views(&self, node: &Node) -> Vec<JobView> {
        let own = node.membership().own();
        let name = |id: NodeId| {
            let known = node.members().find(|m| m.node == id).and_then(|m| m.advert);
            known.or((own.node == id).then_some(own)).map_or_else(|| id.to_string(), |advert| advert.name.clone())
        };
        let stage = |id: NodeId, layers: Range<u32>, bytes: u64| StageView {
            node: hex(&id),
            name: name(id),
            first_layer: layers.start,
            end_layer: layers.end,
            bytes,
            step_ms: 0.0,
        };
        let resident: BTreeMap<JobId, u64> = node.stages().filter_map(|s| Some((s.job, s.bytes?))).collect();
        let headed: Vec<JobView> = node
            .jobs()
            .map(|job| JobView {
                job: format!("{:016x}", job.job.0),
                model: job.name,
                state: job_state(job.state).to_owned(),
                reason: job.reason,
                head: true,
                epoch: job.epoch.counter,
                token_ms: job.token_ns as f64 / 1e6,
                stages: job
                    .stages
                    .into_iter()
                    .map(|(id, layers)| {
                        let bytes = if id == own.node { resident.get(&job.job).copied().unwrap_or(0) } else { 0 };
                        stage(id, layers, bytes)
                    })
                    .collect(),
                running: job.running as u32,
                queued: job.waiting as u32,
            })
            .collect();
        let held = node.stages().filter(|s| s.epoch.minter != own.node).map(|s| JobView {
            job: format!("{:016x}", s.job.0),
            model: s.name,
            state: if s.bytes.is_some() { "holding" } else { "loading" }.to_owned(),
            reason: None,
            head: false,
            epoch: s.epoch.counter,
            token_ms: 0.0,
            stages: vec![stage(own.node, s.layers, s.bytes.unwrap_or(0))],
            running: 0,
            queued: 0,
        });
        headed.into_iter().chain(held).collect()
    }
}

fn peer_view(advert: &Advert, state: &str, this_node: bool, connected: bool, rtt_ns: Option<u64>) -> PeerView {
    PeerView {
        node: hex(&advert.node),
        name: advert.name.clone(),
        peer_id: transport::PeerId::from_bytes(&advert.peer_id).map(|p| p.to_string()).unwrap_or_default(),
        state: state.to_owned(),
        this_node,
        device: advert.capacity.device.clone(),
        memory_total: advert.capacity.memory_total,
        memory_free: advert.capacity.memory_free,
        bytes_per_second: advert.capacity.bytes_per_second,
        rtt_ms: rtt_ns.map(|ns| ns as f64 / 1e6),
        connected,
        draining: advert.draining,
        addrs: advert.data_addrs.iter().map(ToString::to_string).collect(),
    }
}

fn job_state(state: JobState) -> &'static str {
    match state {
        JobState::Planning => "planning",
        JobState::Loading => "loading",
        JobState::Ready => "ready",
        JobState::Degraded => "degraded",
    }
}

/// Tells the user's log what a person would want to wake up for, and no more.
fn log(event: &Event) {
    match event {
        Event::PeerUp { node } => tracing::info!("{node} is up"),
        Event::PeerDown { node, reason: DownReason::Left } => tracing::info!("{node} left"),
        Event::PeerDown { node, reason: DownReason::Failed } => tracing::warn!("{node} is down"),
        Event::JobPlaced { job, epoch, plan } => {
            let stages: Vec<String> = plan
                .stages()
                .iter()
                .map(|s| format!("{} {}..{}", NodeId(s.device.0), s.layers.start, s.layers.end))
                .collect();
            tracing::info!("job {:016x} epoch {}: {}", job.0, epoch.counter, stages.join(", "));
        }
        Event::JobReady { job, epoch, .. } => tracing::info!("job {:016x} epoch {} is ready", job.0, epoch.counter),
        Event::JobDegraded { job, reason, .. } => tracing::warn!("job {:016x} cannot run: {reason}", job.0),
        Event::JobEnded { job } => tracing::info!("job {:016x} ended", job.0),
        Event::Lost { job, node, silent_ms } => {
            tracing::warn!("job {:016x} lost {node} after {silent_ms} ms of silence", job.0);
        }
        Event::Refused { from, what } => match from {
            Some(node) => tracing::debug!("refused {node}: {what}"),
            None => tracing::debug!("refused: {what}"),
        },
        Event::PlanReady { .. } | Event::Token { .. } | Event::Done { .. } => {}
    }
}

fn load_stage(
    device: &crate::device::Compute,
    file: Arc<kernels::weights::ModelFile>,
    spec: &StageSpec,
) -> Result<Box<dyn Stage>, String> {
    let options = StageOptions {
        layers: spec.layers.start as usize..spec.layers.end as usize,
        sequences: spec.sequences as usize,
        context: spec.context as usize,
        activations: if spec.int8 { Activations::Int8 } else { Activations::F32 },
        threads: device.threads,
    };
    let mut stage = device.load(file, options).map_err(|e| e.to_string())?;
    warm(stage.as_mut(), spec).map_err(|e| e.to_string())?;
    Ok(stage)
}

/// A step nobody asked for, so that the first real one waits for no page and no compiler.
fn warm(stage: &mut dyn Stage, spec: &StageSpec) -> Result<(), kernels::stage::StageError> {
    let zeros = vec![0.0; stage.width()];
    let input = if spec.layers.start == 0 { RowsIn::Tokens(&[0]) } else { RowsIn::Hidden(&zeros) };
    let row = Rows { sequence: u64::MAX, position: 0, input, logits: spec.layers.end == spec.layers_total };
    stage.forward(&[row])?;
    stage.release(u64::MAX);
    Ok(())
}

/// The data plane as a way to ask for weights.
pub struct EndpointAsk(pub Arc<Endpoint>);

impl Ask for EndpointAsk {
    async fn ask(&self, node: NodeId, request: Vec<u8>, max: usize) -> Result<Vec<u8>, String> {
        let response = self.0.request(node.0, request.into()).await.map_err(|e| e.to_string())?;
        response.all(max).await.map_err(|e| e.to_string())
    }
}

fn route(job: JobId, epoch: Epoch, edge: u16) -> Route {
    Route { job: job.0, epoch: transport::frame::Epoch { counter: epoch.counter, minter: epoch.minter.0 }, edge }
}
