//! Metrics of a running node for `/metrics`, in the OpenMetrics text format that Prometheus reads.
//!
//! The latencies and counts of requests are recorded as they happen; the state of the node is read at each scrape.
use crate::views::{JobView, StateView};
use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The content type of the OpenMetrics text format.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bucket bounds of all latency histograms, in seconds: from one decode step to a long answer.
const BUCKETS_S: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];
/// Most label sets per metric: models and peers that a node meets in its lifetime. Further ones are not counted.
const SERIES_MAX: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabel {
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    model: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PeerLabel {
    peer: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReceiverLabel {
    to: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InfoLabels {
    version: &'static str,
    name: String,
}

type Latencies = Series<ModelLabel, Histogram, fn() -> Histogram>;

/// All metrics of a node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    requests: Requests,
    state: Gauges,
    weights: Weights,
}

/// Requests of callers of this node.
#[derive(Clone)]
struct Requests {
    tokens: Series<ModelLabel, Counter>,
    prompt_tokens: Series<ModelLabel, Counter>,
    ended: Series<OutcomeLabels, Counter>,
    first_token: Latencies,
    token: Latencies,
}

#[derive(Clone, Default)]
struct Gauges {
    info: Family<InfoLabels, Gauge>,
    peers: Family<StateLabel, Gauge>,
    jobs: Gauge,
    running: Gauge,
    queued: Gauge,
    memory_offered: Gauge,
    memory_free: Gauge,
    ram_offered: Gauge,
    ram_free: Gauge,
    frame_bytes: Family<ReceiverLabel, Counter>,
    copies_left_out: Counter,
}

#[derive(Clone)]
struct Weights {
    cache: Gauge,
    cache_limit: Gauge,
    transfers: Gauge,
    given: Counter,
    fetched_bytes: Series<PeerLabel, Counter>,
    fetched_chunks: Series<PeerLabel, Counter>,
    refused_chunks: Series<PeerLabel, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("meshnode");
        let requests = Requests::new(&mut registry);
        let (state, weights) = (Gauges::new(&mut registry), Weights::new(&mut registry));
        Self { registry: Arc::new(registry), requests, state, weights }
    }
}

impl Requests {
    fn new(to: &mut Registry) -> Self {
        let latency: fn() -> Histogram = || Histogram::new(BUCKETS_S);
        let first = "Time from a request's arrival to its first token";
        Self {
            tokens: counters(to, "tokens_generated", "Tokens generated for callers of this node"),
            prompt_tokens: counters(to, "prompt_tokens", "Prompt tokens of ended requests"),
            ended: counters(to, "requests", "Generation requests by outcome"),
            first_token: Series::new(to, "first_token_seconds", first, latency),
            token: Series::new(to, "token_seconds", "Time between consecutive tokens of a request", latency),
        }
    }
}

impl Gauges {
    fn new(to: &mut Registry) -> Self {
        let known = Self::default();
        to.register("info", "Version and name of this node", known.info.clone());
        to.register("peers", "Known members by state, including this node", known.peers.clone());
        to.register("jobs", "Jobs this node coordinates or takes part in", known.jobs.clone());
        let running = "Running requests of the jobs this node coordinates";
        to.register("requests_running", running, known.running.clone());
        let queued = "Queued requests of the jobs this node coordinates";
        to.register("requests_queued", queued, known.queued.clone());
        let offered = "Memory this node offers to the mesh";
        to.register("memory_offered_bytes", offered, known.memory_offered.clone());
        to.register("memory_free_bytes", "Offered memory that is free", known.memory_free.clone());
        let ram = "RAM this node offers for experts that a GPU has no memory for";
        to.register("expert_ram_offered_bytes", ram, known.ram_offered.clone());
        to.register("expert_ram_free_bytes", "Offered RAM for experts that is free", known.ram_free.clone());
        let frames = "Bytes of activation rows sent to the next stage, and of copies sent to its standby";
        to.register("frame_bytes", frames, known.frame_bytes.clone());
        let left_out = "Copies skipped because the link to the standby was too slow; the standby requests them later";
        to.register("copies_left_out", left_out, known.copies_left_out.clone());
        known
    }

    fn refresh(&self, state: &StateView) {
        self.info.get_or_create(&InfoLabels { version: env!("CARGO_PKG_VERSION"), name: state.name.clone() }).set(1);
        for label in ["alive", "suspect", "down", "left", "banned"] {
            let count = state.peers.iter().filter(|peer| peer.state == label).count();
            self.peers.get_or_create(&StateLabel { state: label }).set(gauge(count as u64));
        }
        let sum = |value: fn(&JobView) -> u32| state.jobs.iter().map(|job| i64::from(value(job))).sum();
        self.jobs.set(gauge(state.jobs.len() as u64));
        self.running.set(sum(|job| job.running));
        self.queued.set(sum(|job| job.queued));
        if let Some(own) = state.peers.iter().find(|peer| peer.this_node) {
            self.memory_offered.set(gauge(own.memory_total));
            self.memory_free.set(gauge(own.memory_free));
            self.ram_offered.set(gauge(own.ram_total));
            self.ram_free.set(gauge(own.ram_free));
        }
        let frames = |to| self.frame_bytes.get_or_create_owned(&ReceiverLabel { to });
        set(&frames("stage"), state.boundary.stage_bytes);
        set(&frames("standby"), state.boundary.standby_bytes);
        set(&self.copies_left_out, state.boundary.copies_left_out);
    }
}

impl Weights {
    fn new(to: &mut Registry) -> Self {
        let known = Self {
            cache: Gauge::default(),
            cache_limit: Gauge::default(),
            transfers: Gauge::default(),
            given: Counter::default(),
            fetched_bytes: counters(to, "weights_fetched_bytes", "Bytes of weights fetched from a peer"),
            fetched_chunks: counters(to, "weights_fetched_chunks", "Chunks of weights fetched from a peer"),
            refused_chunks: counters(to, "weights_refused_chunks", "Chunks from a peer with a wrong hash"),
        };
        to.register("weights_cache_bytes", "Size of the cache of fetched weights", known.cache.clone());
        to.register("weights_cache_limit_bytes", "Limit of the weight cache", known.cache_limit.clone());
        to.register("weights_transfers", "Running weight transfers to this node", known.transfers.clone());
        to.register("weights_given_bytes", "Bytes of weights sent to peers", known.given.clone());
        known
    }

    fn refresh(&self, state: &StateView) {
        let weights = &state.weights;
        self.cache.set(gauge(weights.cache_used));
        self.cache_limit.set(gauge(weights.cache_limit));
        self.transfers.set(gauge(weights.transfers.len() as u64));
        set(&self.given, weights.given_bytes);
        for peer in &weights.peers {
            let label = PeerLabel { peer: peer.node.clone() };
            let totals = [
                (&self.fetched_bytes, peer.bytes),
                (&self.fetched_chunks, peer.chunks),
                (&self.refused_chunks, peer.refused),
            ];
            for (family, total) in totals {
                if let Some(counter) = family.of(&label) {
                    set(&counter, total);
                }
            }
        }
    }
}

impl Metrics {
    /// Counts a request's first token, which came `after` its arrival.
    pub(crate) fn first_token(&self, model: &str, after: Duration) {
        self.token_of(model, &self.requests.first_token, Some(after));
    }

    /// Counts a token that came `after` the one before.
    pub(crate) fn token(&self, model: &str, after: Option<Duration>) {
        self.token_of(model, &self.requests.token, after);
    }

    fn token_of(&self, model: &str, latencies: &Latencies, after: Option<Duration>) {
        let label = ModelLabel { model: model.into() };
        if let Some(tokens) = self.requests.tokens.of(&label) {
            tokens.inc();
        }
        if let Some((latencies, after)) = latencies.of(&label).zip(after) {
            latencies.observe(after.as_secs_f64());
        }
    }

    /// Counts an ended request.
    pub(crate) fn request_ended(&self, model: &str, outcome: &'static str) {
        if let Some(ended) = self.requests.ended.of(&OutcomeLabels { model: model.into(), outcome }) {
            ended.inc();
        }
    }

    /// Counts the prompt of an ended request.
    pub(crate) fn prompt_tokens(&self, model: &str, count: u64) {
        if let Some(tokens) = self.requests.prompt_tokens.of(&ModelLabel { model: model.into() }) {
            tokens.inc_by(count);
        }
    }

    /// All metrics as text, with the node's present state.
    pub(crate) fn render(&self, state: &StateView) -> String {
        self.state.refresh(state);
        self.weights.refresh(state);
        let mut text = String::new();
        text::encode(&mut text, &self.registry).expect("writing to memory");
        text
    }
}

/// A family with at most [`SERIES_MAX`] label sets.
#[derive(Clone)]
struct Series<L, M, C = fn() -> M> {
    family: Family<L, M, C>,
    known: Arc<Mutex<HashSet<L>>>,
}

impl<L, M, C> Series<L, M, C>
where
    L: Clone + Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
    M: Clone + Debug + TypedMetric + EncodeMetric + Send + Sync + 'static,
    C: Clone + MetricConstructor<M> + Send + Sync + 'static,
{
    fn new(to: &mut Registry, name: &str, help: &str, constructor: C) -> Self {
        let family = Family::new_with_constructor(constructor);
        to.register(name, help, family.clone());
        Self { family, known: Arc::default() }
    }

    /// The metric of a label set; `None` if there are too many.
    fn of(&self, labels: &L) -> Option<M> {
        let mut known = self.known.lock();
        if !known.contains(labels) {
            if known.len() >= SERIES_MAX {
                return None;
            }
            known.insert(labels.clone());
        }
        Some(self.family.get_or_create_owned(labels))
    }
}

fn counters<L>(to: &mut Registry, name: &str, help: &str) -> Series<L, Counter>
where
    L: Clone + Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
{
    Series::new(to, name, help, Counter::default)
}

/// Sets a counter that is maintained elsewhere.
fn set(counter: &Counter, total: u64) {
    counter.inner().store(total, Ordering::Relaxed);
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_rendered_in_the_openmetrics_format() {
        let metrics = Metrics::default();
        metrics.first_token("a\"b", Duration::from_millis(7));
        metrics.first_token("a\"b", Duration::from_secs(500));
        metrics.token("a\"b", None);
        metrics.request_ended("a\"b", "stop");
        let text = metrics.render(&StateView { name: "n".into(), ..StateView::default() });
        for line in [
            "# TYPE meshnode_tokens_generated counter",
            "meshnode_tokens_generated_total{model=\"a\\\"b\"} 3",
            "meshnode_requests_total{model=\"a\\\"b\",outcome=\"stop\"} 1",
            "meshnode_first_token_seconds_bucket{le=\"0.005\",model=\"a\\\"b\"} 0",
            "meshnode_first_token_seconds_bucket{le=\"0.01\",model=\"a\\\"b\"} 1",
            "meshnode_first_token_seconds_bucket{le=\"+Inf\",model=\"a\\\"b\"} 2",
            "meshnode_first_token_seconds_sum{model=\"a\\\"b\"} 500.007",
            "meshnode_jobs 0",
            "meshnode_frame_bytes_total{to=\"standby\"} 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn label_sets_are_bounded() {
        let metrics = Metrics::default();
        for i in 0..2 * SERIES_MAX {
            metrics.prompt_tokens(&i.to_string(), 1);
        }
        let text = metrics.render(&StateView::default());
        assert_eq!(text.lines().filter(|line| line.starts_with("meshnode_prompt_tokens_total{")).count(), SERIES_MAX);
    }
}
