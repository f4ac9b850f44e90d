//! The interface between the API and the node, narrow enough to test the API without a mesh.
use super::output::MARKERS;
use crate::handle::{
    BanReport, GenerateRequest, ModelHandle, ModelOptions, ModelRef, NodeError, NodeHandle, PlanReport, RemoteModel,
    StateView, TextCodec, TokenEvent, TokenStream,
};
use crate::report::SimulationPlan;
use crate::submissions::Submissions;
use kernels_models::chat_template::ChatMessage;
use kernels_models::constraint::{Constraint, GrammarVocabulary};
use kernels_simulations::Simulation;
use serde_json::Value;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// A running node.
pub(crate) trait Engine: Clone + Send + Sync + 'static {
    /// The event stream of a request.
    type Tokens: Tokens;

    /// Served models.
    fn models(&self) -> Vec<Served>;
    /// Starts a request on a served model.
    fn submit(
        &self,
        model: &Served,
        request: GenerateRequest,
    ) -> impl Future<Output = Result<Self::Tokens, NodeError>> + Send;
    /// Serves a model and waits until it is ready.
    fn deploy(&self, model: ModelRef, options: ModelOptions) -> impl Future<Output = Result<Served, NodeError>> + Send;
    /// Whether this node has the files to serve a model of that name that is not served yet.
    fn has(&self, name: &str) -> bool;
    /// Serves such a model and waits until it is ready.
    fn serve_on_demand(&self, name: &str) -> impl Future<Output = Result<Served, NodeError>> + Send;
    /// Serves a model for one run: it is unloaded when no longer in use.
    fn deploy_temporarily(
        &self,
        model: ModelRef,
        options: ModelOptions,
    ) -> impl Future<Output = Result<Served, NodeError>> + Send {
        self.deploy(model, options)
    }
    /// Name and context of each model that other members serve.
    fn models_elsewhere(&self) -> impl Future<Output = Vec<(String, u32)>> + Send {
        std::future::ready(Vec::new())
    }
    /// Names of other members that serve a model of that name.
    fn also_served_by(&self, name: &str) -> impl Future<Output = Vec<String>> + Send {
        let _ = name;
        std::future::ready(Vec::new())
    }
    /// The model of that name as served by another member.
    fn attach(&self, name: &str) -> impl Future<Output = Result<Option<Served>, NodeError>> + Send {
        let _ = name;
        std::future::ready(Ok(None))
    }
    /// Whether a member holds parts of another node's job for that model.
    fn is_held(&self, name: &str) -> impl Future<Output = bool> + Send {
        let _ = name;
        std::future::ready(false)
    }
    /// Models that requests can name although they are not loaded.
    fn not_loaded(&self) -> Vec<NotLoaded> {
        Vec::new()
    }
    /// Stops serving a model.
    fn undeploy(&self, model: &str) -> impl Future<Output = Result<(), NodeError>> + Send;
    /// Plans the placement of a model without loading it.
    fn plan(
        &self,
        model: ModelRef,
        options: ModelOptions,
    ) -> impl Future<Output = Result<PlanReport, NodeError>> + Send;
    /// Snapshot of the node, its peers and its jobs.
    fn state(&self) -> impl Future<Output = StateView> + Send;
    /// Creates a join ticket.
    fn invite(&self, ttl: Duration, uses: u32) -> impl Future<Output = Result<String, NodeError>> + Send;
    /// Admits a peer that waits for approval.
    fn approve(&self, peer: String) -> impl Future<Output = Result<(), NodeError>> + Send;
    /// Bans a member, and the members that it certified.
    fn ban(&self, peer: String) -> impl Future<Output = Result<BanReport, NodeError>> + Send;
    /// The simulations submitted to this node; `None` if the engine runs no simulations.
    fn submissions(&self) -> Option<Arc<Submissions>> {
        None
    }
    /// Plans the decomposition of a simulation without running it.
    fn plan_grid(&self, simulation: Simulation) -> impl Future<Output = Result<SimulationPlan, NodeError>> + Send {
        let _ = simulation;
        std::future::ready(Err(NodeError::NotFound("this node runs no simulations".into())))
    }
    /// Stops accepting new work, or accepts it again.
    fn drain(&self, draining: bool);
    /// Announces that the node leaves, and ends it.
    fn leave(&self) -> impl Future<Output = ()> + Send;
}

/// The events of one request. Dropping it cancels the request.
pub(crate) trait Tokens: Send + 'static {
    /// The next event; `None` after the end.
    fn next(&mut self) -> impl Future<Output = Option<TokenEvent>> + Send;
}

/// A served model as the API sees it.
#[derive(Clone)]
pub(crate) struct Served {
    /// Name in requests.
    pub name: String,
    /// Tokens of context per request.
    pub context: u32,
    /// Unix time in seconds.
    pub created: u64,
    /// Tokenizer and chat template.
    pub text: Arc<dyn Text>,
    /// The serving member, unless it is this node.
    pub elsewhere: Option<RemoteModel>,
}

/// A model that a request waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotLoaded {
    /// Name in requests.
    pub name: String,
    /// Tokens of context per request.
    pub context: u32,
    /// `starting`: it was served before a restart, and is placed as soon as possible. `unloaded`: it was idle, and a
    /// request loads it.
    pub state: &'static str,
}

/// A tokenizer with a chat template. Calls take milliseconds for long texts: keep them off async threads.
pub(crate) trait Text: Send + Sync {
    /// Token ids of a prompt. Control tokens are parsed, and the model's prefix (such as BOS) is added.
    ///
    /// # Errors
    /// Why the text cannot be encoded.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;
    /// Token ids of a conversation with these tools, or `None` if the model has no chat template. Messages and tools are
    /// encoded as text, never as control tokens.
    ///
    /// # Errors
    /// The template rejects the conversation.
    fn chat(&self, messages: &[ChatMessage], tools: &[Value]) -> Option<Result<Vec<u32>, String>>;
    /// Whether the text of the chat template contains this.
    fn template_mentions(&self, text: &str) -> bool;
    /// The state of an answer that must match a grammar.
    ///
    /// # Errors
    /// The grammar is invalid or too complex; why.
    fn constrain(&self, grammar: &str) -> Result<Constraint, String>;
    /// The id of the control token with this spelling.
    fn control_token(&self, text: &str) -> Option<u32>;
    /// As [`Text::bytes`], but with the control tokens that delimit thoughts and tool calls.
    fn spelled(&self, token: u32) -> Vec<u8> {
        self.bytes(token)
    }
    /// Elements of an embedding, if the model is made for embeddings and not to generate text.
    fn embedding(&self) -> Option<u32> {
        None
    }
    /// Whether the model has a chat template.
    fn chats(&self) -> bool;
    /// The bytes that a token adds to the text.
    fn bytes(&self, token: u32) -> Vec<u8>;
    /// Number of tokens in the vocabulary.
    fn vocabulary(&self) -> u32;
}

impl Text for TextCodec {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = self.tokenizer.encode_prompt(text).map_err(|e| e.to_string())?;
        ids.extend(self.tokenizer.added_eos().filter(|_| self.embedding.is_some()));
        Ok(ids)
    }

    fn embedding(&self) -> Option<u32> {
        self.embedding
    }

    fn chat(&self, messages: &[ChatMessage], tools: &[Value]) -> Option<Result<Vec<u32>, String>> {
        let template = self.template.as_ref().filter(|_| self.chats())?;
        Some(template.encode(&self.tokenizer, messages, tools, true).map_err(|e| e.to_string()))
    }

    fn template_mentions(&self, text: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.mentions(text))
    }

    fn constrain(&self, grammar: &str) -> Result<Constraint, String> {
        let vocabulary = self.grammars.get_or_init(|| GrammarVocabulary::new(&self.tokenizer));
        let vocabulary = vocabulary.as_ref().map_err(ToString::to_string)?;
        Constraint::new(vocabulary, grammar).map_err(|e| e.to_string())
    }

    fn control_token(&self, text: &str) -> Option<u32> {
        self.tokenizer.token_id(text).filter(|id| self.tokenizer.is_control(*id))
    }

    fn spelled(&self, token: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        let is_marker = || MARKERS.iter().any(|marker| marker.as_bytes() == bytes);
        if self.tokenizer.is_control(token) && !is_marker() { Vec::new() } else { bytes.to_vec() }
    }

    fn chats(&self) -> bool {
        self.template.as_ref().is_some_and(|t| !t.is_fallback())
    }

    fn bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer.text_bytes(token).to_vec()
    }

    fn vocabulary(&self) -> u32 {
        u32::try_from(self.tokenizer.len()).unwrap_or(u32::MAX)
    }
}

fn served(model: ModelHandle) -> Served {
    Served {
        name: model.name.clone(),
        context: model.context,
        created: model.created,
        text: Arc::new(model.words),
        elsewhere: None,
    }
}

impl Engine for NodeHandle {
    type Tokens = TokenStream;

    fn models(&self) -> Vec<Served> {
        NodeHandle::models(self).into_iter().map(served).collect()
    }

    async fn submit(&self, model: &Served, request: GenerateRequest) -> Result<TokenStream, NodeError> {
        if let Some(elsewhere) = model.elsewhere {
            return self.ask(elsewhere, model.context, request);
        }
        let name = &model.name;
        let handle = self.served(name).ok_or_else(|| NodeError::NotFound(format!("`{name}` is no longer served")))?;
        NodeHandle::submit(self, &handle, request).await
    }

    async fn deploy(&self, model: ModelRef, options: ModelOptions) -> Result<Served, NodeError> {
        NodeHandle::deploy(self, model, options).await.map(served)
    }

    fn has(&self, name: &str) -> bool {
        NodeHandle::has(self, name)
    }

    async fn serve_on_demand(&self, name: &str) -> Result<Served, NodeError> {
        NodeHandle::serve_on_demand(self, name).await.map(served)
    }

    async fn deploy_temporarily(&self, model: ModelRef, options: ModelOptions) -> Result<Served, NodeError> {
        NodeHandle::deploy_temporarily(self, model, options).await.map(served)
    }

    async fn models_elsewhere(&self) -> Vec<(String, u32)> {
        self.all_served().await.into_iter().map(|member| (member.model.name, member.model.context)).collect()
    }

    async fn also_served_by(&self, name: &str) -> Vec<String> {
        self.serving_members(name).await.into_iter().map(|member| member.name).collect()
    }

    async fn attach(&self, name: &str) -> Result<Option<Served>, NodeError> {
        NodeHandle::attach(self, name).await
    }

    async fn is_held(&self, name: &str) -> bool {
        NodeHandle::is_held(self, name).await
    }

    fn not_loaded(&self) -> Vec<NotLoaded> {
        let starting = self.starting_models().into_iter().map(|model| (model, "starting"));
        let all = starting.chain(self.unloaded_models().into_iter().map(|model| (model, "unloaded")));
        all.map(|((name, context), state)| NotLoaded { name, context, state }).collect()
    }

    async fn undeploy(&self, model: &str) -> Result<(), NodeError> {
        NodeHandle::undeploy(self, model).await
    }

    async fn plan(&self, model: ModelRef, options: ModelOptions) -> Result<PlanReport, NodeError> {
        NodeHandle::plan(self, model, options).await
    }

    async fn state(&self) -> StateView {
        NodeHandle::state(self).await
    }

    async fn invite(&self, ttl: Duration, uses: u32) -> Result<String, NodeError> {
        NodeHandle::invite(self, ttl, uses).await
    }

    async fn approve(&self, peer: String) -> Result<(), NodeError> {
        NodeHandle::approve(self, peer).await
    }

    async fn ban(&self, peer: String) -> Result<BanReport, NodeError> {
        NodeHandle::ban(self, peer).await
    }

    fn submissions(&self) -> Option<Arc<Submissions>> {
        Some(NodeHandle::submissions(self))
    }

    async fn plan_grid(&self, simulation: Simulation) -> Result<SimulationPlan, NodeError> {
        NodeHandle::plan_grid(self, simulation).await
    }

    fn drain(&self, draining: bool) {
        NodeHandle::drain(self, draining);
    }

    async fn leave(&self) {
        NodeHandle::leave(self).await;
    }
}

impl Tokens for TokenStream {
    async fn next(&mut self) -> Option<TokenEvent> {
        TokenStream::next(self).await
    }
}
