//! The node's interface for the API and the commands: serve a model, submit requests to it, inspect the mesh.
use crate::admission::Admission;
use crate::bans::{Banned, Bans};
use crate::boundary::StageTraffic;
use crate::driver::queue::DriverHandle;
use crate::hub::EventRouter;
use crate::submissions::Submissions;
use crate::transfer::Library;
use crate::views::{PeerView, Views, hex};
use last_options::LastOptions;
use model::Vocabularies;
use node_core::id::{CallId, NodeId};
use node_core::input::Input;
use node_core::work::serve::{Priority, Request, RequestKey, Sampling};
use remembered::Remembered;
use serving::Serving;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

pub(crate) use crate::error::NodeError;
pub(crate) use crate::hub::TokenEvent;
pub(crate) use crate::views::{PlanReport, StateView};
pub(crate) use demand::HELD_MAX;
pub(crate) use model::{ModelHandle, ModelOptions, ModelRef, RemoteModel, TextCodec};

mod again;
mod demand;
mod deploy;
mod grids;
pub(crate) mod last_options;
mod members;
pub(crate) mod model;
mod opened;
pub(crate) mod remembered;
pub(crate) mod serving;
mod shortage;
#[cfg(test)]
mod testing;
mod unload;
mod usage;

/// Longest wait for a plan: the planner is bounded to well below a second.
const PLAN_MAX: Duration = Duration::from_secs(20);

/// Longest wait for running requests when the node leaves.
const FINISH_MAX: Duration = Duration::from_secs(8);

/// A running node, cheap to clone.
#[derive(Clone)]
pub(crate) struct NodeHandle {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) node: NodeId,
    pub(crate) peer_id: String,
    pub(crate) name: String,
    pub(crate) driver: DriverHandle,
    pub(crate) hub: Arc<EventRouter>,
    pub(crate) library: Arc<Library>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) bans: Arc<Bans>,
    pub(crate) models_dir: PathBuf,
    pub(crate) serving: Serving,
    pub(crate) last_options: Arc<LastOptions>,
    pub(crate) remembered: Remembered,
    pub(crate) endpoint: Arc<transport::Endpoint>,
    pub(crate) boundary: Arc<StageTraffic>,
    pub(crate) submissions: Arc<Submissions>,
    /// Vocabularies of models that other nodes serve.
    pub(crate) vocabularies: Vocabularies,
    /// How long a model stays loaded without requests; `None`: until it is stopped.
    pub(crate) idle_unload: Option<Duration>,
    /// The node is about to leave the mesh: it accepts no new work.
    pub(crate) leaving: AtomicBool,
}

/// One generation request, in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GenerateRequest {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Which requests go before it while the cache is full.
    pub priority: Priority,
    /// Its key, unique in the mesh.
    pub key: RequestKey,
}

/// The tokens of one request. Dropping it cancels the request.
pub(crate) struct TokenStream {
    events: mpsc::Receiver<TokenEvent>,
    call: CallId,
    driver: DriverHandle,
    hub: Arc<EventRouter>,
    done: bool,
}

impl TokenStream {
    /// The next event; `None` after `Done`, or when the node stopped.
    pub(crate) async fn next(&mut self) -> Option<TokenEvent> {
        let event = self.events.recv().await;
        if matches!(event, None | Some(TokenEvent::Done { .. })) {
            self.done = true;
        }
        event
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.done {
            self.driver.input(Input::Cancel { call: self.call });
        }
        self.hub.forget(self.call);
    }
}

/// The effects of a ban.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct BanReport {
    /// The banned PeerId.
    pub banned: String,
    /// PeerIds of connected members that it had invited; they are revoked transitively.
    pub with_it: Vec<String>,
    /// Tickets of this node that are revoked because the banned member may have them.
    pub void_tickets: Vec<String>,
    /// A reason why the ban is not effective, if there is one.
    pub warning: Option<String>,
}

impl BanReport {
    fn new(banned: String, done: &Banned, open: bool) -> Self {
        let ticket = |invite: &node_core::admission::Invite| {
            let until = crate::calendar::date_time(invite.expiry);
            format!("a ticket for {} more, valid until {until}", invite.uses_left)
        };
        let warning = open.then(|| {
            "this node was started with --open: the banned machine can rejoin under a new key; restart without --open"
                .to_owned()
        });
        Self {
            banned,
            with_it: done.with_it.iter().map(ToString::to_string).collect(),
            void_tickets: done.void.iter().map(ticket).collect(),
            warning,
        }
    }
}

impl NodeHandle {
    /// Submits a request to a served model.
    ///
    /// # Errors
    /// The node has stopped. Rejections (queue full, prompt too long) arrive as [`TokenEvent::Done`].
    pub(crate) async fn submit(&self, model: &ModelHandle, request: GenerateRequest) -> Result<TokenStream, NodeError> {
        self.takes_work()?;
        model.uses.requested();
        Ok(self.call(model.context, request, |call, request| Input::Submit { call, job: model.job, request }))
    }

    /// Submits a request to a model that another node serves.
    ///
    /// # Errors
    /// As for [`Self::submit`].
    pub(crate) fn ask(
        &self,
        RemoteModel { node, job }: RemoteModel,
        context: u32,
        request: GenerateRequest,
    ) -> Result<TokenStream, NodeError> {
        self.takes_work()?;
        Ok(self.call(context, request, |call, request| Input::Ask { call, to: node, job, request }))
    }

    fn call(
        &self,
        context: u32,
        request: GenerateRequest,
        input: impl FnOnce(CallId, Box<Request>) -> Input,
    ) -> TokenStream {
        let GenerateRequest { prompt, max_tokens, sampling, ignore_eos, priority, key } = request;
        let room = (max_tokens.min(context) as usize) + 2;
        let (call, events) = self.inner.hub.open_tokens(room);
        self.inner
            .driver
            .input(input(call, Box::new(Request { prompt, max_tokens, sampling, ignore_eos, priority, key })));
        TokenStream { events, call, driver: self.inner.driver.clone(), hub: self.inner.hub.clone(), done: false }
    }

    /// Models being served, by name.
    pub(crate) fn models(&self) -> Vec<ModelHandle> {
        self.inner.serving.all()
    }

    /// A served model by name; `default` is the only served model, if there is one only.
    pub(crate) fn served(&self, name: &str) -> Option<ModelHandle> {
        self.inner.serving.by_name(name)
    }

    /// The node's view of the mesh.
    pub(crate) async fn state(&self) -> StateView {
        let Views { mut peers, jobs, .. } = self.inner.driver.views().await;
        peers.iter_mut().filter(|peer| !peer.this_node).for_each(|peer| self.show_ban(peer));
        let jobs = self.with_starting(jobs);
        StateView {
            node: hex(&self.inner.node),
            name: self.inner.name.clone(),
            peer_id: self.inner.peer_id.clone(),
            mesh: self.inner.admission.mesh_name(),
            membership_ends: self.inner.admission.credentials().chain.expiry(),
            banned: self.inner.bans.notice().map(|notice| notice.to_string()),
            peers,
            jobs,
            waiting: self.inner.admission.waiting(),
            weights: self.inner.library.view(),
            boundary: self.inner.boundary.view(),
        }
    }

    /// Marks a banned member. The core has dropped what the member advertised; the revocation has its name.
    fn show_ban(&self, peer: &mut PeerView) {
        let ban = unhex(&peer.node).and_then(|node| self.inner.bans.of(node));
        if let Some(ban) = ban {
            "banned".clone_into(&mut peer.state);
            peer.peer_id = ban.banned.to_string();
            peer.name = ban.banned_name;
        }
    }

    /// Creates a ticket for joining the mesh.
    ///
    /// # Errors
    /// The store cannot be written.
    pub(crate) async fn invite(&self, ttl: Duration, uses: u32) -> Result<String, NodeError> {
        let admission = self.inner.admission.clone();
        let invited = tokio::task::spawn_blocking(move || admission.invite(ttl, uses)); // writes to disk
        Ok(invited.await.map_err(|e| NodeError::Failed(format!("inviting was interrupted: {e}")))??)
    }

    /// Admits a peer that asked to join without a ticket, by its PeerId or a part of it that is unique among the
    /// waiting peers.
    ///
    /// # Errors
    /// No such peer is waiting.
    pub(crate) async fn approve(&self, peer: String) -> Result<(), NodeError> {
        Ok(self.inner.admission.approve(&peer)?)
    }

    /// Revokes a member's certificate in the whole mesh, by PeerId, or by a name or id that matches one member only.
    ///
    /// # Errors
    /// No such member, several members of that name, or this node may not ban it.
    pub(crate) async fn ban(&self, peer: String) -> Result<BanReport, NodeError> {
        let banned = match peer.parse::<transport::PeerId>() {
            Ok(banned) => banned,
            Err(_) => self.find_peer(&peer).await?,
        };
        let peer_id = banned.to_string();
        let known = self.inner.driver.views().await.peers.into_iter().find(|member| member.peer_id == peer_id);
        let name = known.map(|member| member.name).unwrap_or_default();
        let bans = self.inner.bans.clone();
        // Writes to disk.
        let done = tokio::task::spawn_blocking(move || bans.ban(banned, &name)).await;
        let done = done.map_err(|e| NodeError::Failed(format!("the ban was interrupted: {e}")))??;
        Ok(BanReport::new(peer_id, &done, self.inner.admission.is_open()))
    }

    async fn find_peer(&self, peer: &str) -> Result<transport::PeerId, NodeError> {
        let members = self.inner.driver.views().await.peers;
        let others: Vec<PeerView> = members.into_iter().filter(|member| !member.this_node).collect();
        let exact: Vec<&PeerView> = others.iter().filter(|member| member.name == peer).collect();
        let begins = |member: &&PeerView| !peer.is_empty() && member.node.starts_with(peer);
        let found = if exact.is_empty() { others.iter().filter(begins).collect() } else { exact };
        match found.as_slice() {
            [one] => one.peer_id.parse().map_err(|_| {
                NodeError::NotFound(format!("the key of `{peer}` is not known yet: retry when it is connected"))
            }),
            [] => Err(NodeError::NotFound(format!(
                "no other member matches `{peer}`: `meshnode peers` shows names and ids"
            ))),
            several => Err(NodeError::Invalid(format!("`{peer}` matches {} members: give the PeerId", several.len()))),
        }
    }

    /// Leaves the mesh: accepts no new work, lets running requests finish for up to `FINISH_MAX`, says goodbye; then
    /// the process exits.
    pub(crate) async fn leave(&self) {
        if self.inner.leaving.swap(true, Ordering::Relaxed) {
            return;
        }
        self.drain(true);
        let node = self.clone();
        tokio::spawn(async move {
            let end = tokio::time::Instant::now() + FINISH_MAX;
            while tokio::time::Instant::now() < end && node.has_requests().await {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            node.inner.driver.input(Input::Leave);
            node.inner.driver.stop_after(Duration::from_millis(300));
        });
    }

    async fn has_requests(&self) -> bool {
        self.inner.driver.views().await.jobs.iter().any(|job| job.head && job.running + job.queued > 0)
    }

    /// Stops accepting new work (`true`), or accepts it again.
    pub(crate) fn drain(&self, draining: bool) {
        self.inner.driver.input(Input::Drain(draining));
    }

    fn takes_work(&self) -> Result<(), NodeError> {
        match self.inner.leaving.load(Ordering::Relaxed) {
            true => Err(NodeError::Failed("this node is leaving the mesh: send the request to another node".into())),
            false => Ok(()),
        }
    }

    pub(crate) async fn names(&self) -> BTreeMap<String, String> {
        self.inner.driver.views().await.peers.into_iter().map(|p| (p.node, p.name)).collect()
    }
}

/// Parses a node id in the API's format.
fn unhex(text: &str) -> Option<NodeId> {
    u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32).map(|bits| NodeId(bits.to_be_bytes()))
}

#[cfg(test)]
mod tests;
