//! Finds models that other members serve, by asking the connected ones. Requests for such a model are forwarded there.
use super::NodeHandle;
use super::model::{ModelHandle, RemoteModel, TextCodec};
use crate::api::engine;
use crate::bulk::BulkRequest;
use crate::clock::unix_seconds;
use crate::directory::{self, Served, ServedModel};
use crate::error::NodeError;
use crate::pull::name_in_request;
use crate::transfer::endpoint::EndpointAsk;
use crate::transfer::request::Ask;
use crate::views::PeerView;
use kernels_models::weights::ModelFile;
use node_core::id::{ContentId, JobId, NodeId};
use node_core::output::Event;
use node_core::work::Inherited;
use node_core::work::serve::ModelSpec;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;

/// Longest wait for the members' answers, which arrive in parallel: a user waits for them.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Most members asked in parallel: in any mesh of a manageable size this includes one that serves the model.
const ASKED_MAX: usize = 64;
/// Most cached vocabularies, a few megabytes each.
const VOCABULARIES_MAX: usize = 8;

/// A member that serves a model.
pub(crate) struct ServingMember {
    /// Its name.
    pub(crate) name: String,
    node: NodeId,
    pub(crate) model: ServedModel,
}

impl NodeHandle {
    /// The members that serve a model of that name, those with the fewest requests first.
    pub(crate) async fn serving_members(&self, model: &str) -> Vec<ServingMember> {
        let mut members = self.all_served().await;
        members.retain(|member| member.model.name == model);
        members.sort_by_key(|member| member.model.requests);
        members
    }

    /// All models that other members serve.
    pub(crate) async fn all_served(&self) -> Vec<ServingMember> {
        let of = |(name, node, served): (String, NodeId, Served)| {
            served.models.into_iter().map(move |model| ServingMember { name: name.clone(), node, model })
        };
        self.directories().await.into_iter().flat_map(of).collect()
    }

    /// Whether this node or another member holds parts of another node's job for that model. If no member serves the
    /// model, its coordinator is lost, and a successor may come.
    pub(crate) async fn is_held(&self, model: &str) -> bool {
        let (model, views) = (name_in_request(model), self.inner.driver.views().await);
        let here = views.held_models().any(|held| held == model);
        here || self.directories().await.iter().any(|(.., served)| served.held.iter().any(|held| held == model))
    }

    /// What the connected members serve.
    async fn directories(&self) -> Vec<(String, NodeId, Served)> {
        let peers = self.inner.driver.views().await.peers;
        let others = peers.into_iter().filter(|peer| !peer.this_node && peer.connected && peer.state == "alive");
        let asked = others.take(ASKED_MAX).map(|peer| self.ask_directory(peer));
        futures::future::join_all(asked).await.into_iter().flatten().collect()
    }

    async fn ask_directory(&self, peer: PeerView) -> Option<(String, NodeId, Served)> {
        let node = NodeId(u128::from_str_radix(&peer.node, 16).ok()?.to_be_bytes());
        let ask = EndpointAsk(self.inner.endpoint.clone());
        let answer = ask.ask(node, BulkRequest::Served.encode(), directory::ANSWER_BYTES_MAX);
        let bytes = tokio::time::timeout(ANSWER_MAX, answer).await.ok()?.ok()?;
        Some((peer.name, node, directory::decode(&bytes)?))
    }

    /// A model of that name that another member serves: of several, the one with the fewest requests. `None` if no member
    /// that responds does.
    ///
    /// # Errors
    /// Its vocabulary cannot be read.
    pub(crate) async fn attach(&self, name: &str) -> Result<Option<engine::Served>, NodeError> {
        let stem = name_in_request(name);
        let Some(ServingMember { node, model, .. }) = self.serving_members(stem).await.into_iter().next() else {
            return Ok(None);
        };
        let words = self.vocabulary(ContentId(model.content), &model.name, &[node]).await?;
        let elsewhere = Some(RemoteModel { node, job: JobId(model.job) });
        let (name, context, created) = (model.name, model.context, unix_seconds());
        Ok(Some(engine::Served { name, context, created, text: Arc::new(words), elsewhere }))
    }

    /// The vocabulary of a model, from its header on this node's disk or from nodes that hold it.
    async fn vocabulary(&self, content: ContentId, name: &str, sources: &[NodeId]) -> Result<TextCodec, NodeError> {
        let kept = || self.inner.vocabularies.lock();
        if let Some(words) = kept().get(&content) {
            return Ok(words.clone());
        }
        let ask = Arc::new(EndpointAsk(self.inner.endpoint.clone()));
        let file = self.inner.library.header(content, name, sources, &ask).await;
        let file = file.map_err(|e| NodeError::Failed(format!("the vocabulary of {name} cannot be fetched: {e}")))?;
        let words = tokio::task::spawn_blocking(move || words_of(&file)).await;
        let words = words.map_err(|e| NodeError::Failed(format!("reading the vocabulary was interrupted: {e}")))??;
        let mut kept = kept();
        if kept.len() >= VOCABULARIES_MAX {
            kept.pop_first();
        }
        kept.insert(content, words.clone());
        Ok(words)
    }

    /// Serves the models of jobs that this node inherits, until the jobs end. Call once, within a runtime.
    pub(crate) fn watch_successions(&self) {
        let (node, mut events) = (self.clone(), self.inner.hub.listen());
        tokio::spawn(async move {
            loop {
                match events.recv().await {
                    Ok(Event::JobInherited { job, inherited, .. }) => {
                        if let Inherited::Serve { model } = *inherited {
                            let node = node.clone();
                            tokio::spawn(async move { node.serve_inherited(job, model).await });
                        }
                    }
                    Ok(Event::JobEnded { job, .. }) => node.inner.serving.forget(job),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return,
                }
            }
        });
    }

    async fn serve_inherited(&self, job: JobId, spec: ModelSpec) {
        match self.vocabulary(spec.content, &spec.name, &[]).await {
            Ok(words) => {
                tracing::warn!("{} is served here now: its coordinator is lost", spec.name);
                self.inner.serving.adopt(ModelHandle::new(job, words, spec, false));
            }
            Err(error) => tracing::warn!("this node inherited the job of {}, but cannot serve it: {error}", spec.name),
        }
    }
}

fn words_of(file: &ModelFile) -> Result<TextCodec, NodeError> {
    TextCodec::of(file).map_err(|e| NodeError::Invalid(e.to_string()))
}
