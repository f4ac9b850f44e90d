//! Observability of a running node: log lines on stderr, and metrics for `/metrics`.
//!
//! Levels: `error` needs action immediately, `warn` needs attention the next day, `info` reports events, `debug`
//! explains decisions.
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Sends `tracing` output to stderr. Verbosity 0 means `warn` for commands and `info` for daemons; each step adds a
/// level. `MESHNODE_LOG` (or `RUST_LOG`) overrides the level. A second call does nothing.
pub fn start(format: LogFormat, verbosity: u8, daemon: bool) {
    let level = ["warn", "info", "debug", "trace"][usize::from(verbosity.saturating_add(daemon.into()).min(3))];
    // Discovery and TLS are noisy below warn. GPU probing warns about problems that `doctor` explains better. CubeCL's
    // kernel cache warns about a file that is absent on purpose.
    let default = format!(
        "warn,meshnode={level},transport={level},node_core={level},kernels={level},kernels_gpu={level},wgpu_hal=error,wgpu_core=error,naga=error,cubecl_common::cache_file=off"
    );
    let filter = ["MESHNODE_LOG", "RUST_LOG"]
        .iter()
        .find_map(|name| EnvFilter::try_from_env(name).ok())
        .unwrap_or_else(|| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Do not panic if the log cannot be written (full disk, closed pipe).
    let builder = builder.log_internal_errors(false);
    // Fails harmlessly if called twice in one process, as in tests.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).with_ansi(console::user_attended_stderr()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}

/// Bucket bounds of all latency histograms, in seconds: from one decode step to a long answer.
const BUCKETS_S: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];
/// Most label sets per metric. Labels come from our own code (routes, states), so this bounds bugs, not attacks.
const SERIES_MAX: usize = 256;

/// All metrics of a node, rendered in Prometheus' text format. Cheap to clone.
#[derive(Clone, Default)]
pub struct Metrics {
    families: Arc<Mutex<BTreeMap<&'static str, Family>>>,
}

struct Family {
    help: &'static str,
    kind: Kind,
    series: BTreeMap<String, Arc<Series>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// One time series. `value` is the count of a counter, the bits of an f64 for a gauge, and the sum in microseconds for
/// a histogram, whose `buckets` are not cumulative.
#[derive(Default)]
struct Series {
    value: AtomicU64,
    buckets: [AtomicU64; BUCKETS_S.len() + 1],
}

impl Metrics {
    /// Adds to a counter. `name` ends in `_total` and omits the prefix `meshnode_`.
    pub fn count(&self, name: &'static str, help: &'static str, labels: &[(&str, &str)], by: u64) {
        if let Some(series) = self.series(name, help, Kind::Counter, labels) {
            series.value.fetch_add(by, Ordering::Relaxed);
        }
    }

    /// Sets a counter that is maintained elsewhere.
    pub fn total(&self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: u64) {
        if let Some(series) = self.series(name, help, Kind::Counter, labels) {
            series.value.store(value, Ordering::Relaxed);
        }
    }

    /// Sets a gauge.
    pub fn gauge(&self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: f64) {
        if let Some(series) = self.series(name, help, Kind::Gauge, labels) {
            series.value.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Adds a duration to a histogram. `name` ends in `_seconds`.
    pub fn observe(&self, name: &'static str, help: &'static str, labels: &[(&str, &str)], time: Duration) {
        if let Some(series) = self.series(name, help, Kind::Histogram, labels) {
            let seconds = time.as_secs_f64();
            let bucket = BUCKETS_S.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS_S.len());
            series.buckets[bucket].fetch_add(1, Ordering::Relaxed);
            series.value.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// All metrics in Prometheus' text format, sorted by name.
    pub fn render(&self) -> String {
        let families = self.families.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut text = String::new();
        for (name, family) in families.iter() {
            let kind = match family.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            let _ = writeln!(text, "# HELP meshnode_{name} {}\n# TYPE meshnode_{name} {kind}", family.help);
            for (labels, series) in &family.series {
                render_series(&mut text, name, labels, family.kind, series);
            }
        }
        text
    }

    fn series(
        &self,
        name: &'static str,
        help: &'static str,
        kind: Kind,
        labels: &[(&str, &str)],
    ) -> Option<Arc<Series>> {
        let key = labels.iter().map(|(k, v)| format!("{k}=\"{}\"", escape(v))).collect::<Vec<_>>().join(",");
        let mut families = self.families.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let family = families.entry(name).or_insert_with(|| Family { help, kind, series: BTreeMap::new() });
        let room = family.series.len() < SERIES_MAX;
        if family.kind != kind || !(room || family.series.contains_key(&key)) {
            return None;
        }
        Some(family.series.entry(key).or_default().clone())
    }
}

fn render_series(text: &mut String, name: &str, labels: &str, kind: Kind, series: &Series) {
    let braced = |labels: &str| if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
    let value = series.value.load(Ordering::Relaxed);
    let _ = match kind {
        Kind::Counter => writeln!(text, "meshnode_{name}{} {value}", braced(labels)),
        Kind::Gauge => writeln!(text, "meshnode_{name}{} {}", braced(labels), f64::from_bits(value)),
        Kind::Histogram => {
            let comma = if labels.is_empty() { "" } else { "," };
            let mut sum = 0;
            for (bucket, count) in series.buckets.iter().enumerate() {
                sum += count.load(Ordering::Relaxed);
                let bound = BUCKETS_S.get(bucket).map_or("+Inf".into(), ToString::to_string);
                let _ = writeln!(text, "meshnode_{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {sum}");
            }
            let _ = writeln!(text, "meshnode_{name}_sum{} {}", braced(labels), value as f64 / 1e6);
            writeln!(text, "meshnode_{name}_count{} {sum}", braced(labels))
        }
    };
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_rendered_in_prometheus_format() {
        let metrics = Metrics::default();
        metrics.count("tokens_total", "Tokens generated.", &[("model", "a\"b")], 2);
        metrics.count("tokens_total", "Tokens generated.", &[("model", "a\"b")], 3);
        metrics.gauge("peers", "Peers alive.", &[], 2.0);
        metrics.observe("first_token_seconds", "Time to first token.", &[], Duration::from_millis(7));
        metrics.observe("first_token_seconds", "Time to first token.", &[], Duration::from_secs(500));
        let text = metrics.render();
        assert!(
            text.contains("# TYPE meshnode_tokens_total counter\nmeshnode_tokens_total{model=\"a\\\"b\"} 5\n"),
            "{text}"
        );
        assert!(text.contains("meshnode_peers 2\n"), "{text}");
        assert!(text.contains("meshnode_first_token_seconds_bucket{le=\"0.005\"} 0\n"), "{text}");
        assert!(text.contains("meshnode_first_token_seconds_bucket{le=\"0.01\"} 1\n"), "{text}");
        assert!(text.contains("meshnode_first_token_seconds_bucket{le=\"+Inf\"} 2\n"), "{text}");
        assert!(text.contains("meshnode_first_token_seconds_sum 500.007\n"), "{text}");
        assert!(text.contains("meshnode_first_token_seconds_count 2\n"), "{text}");
    }

    #[test]
    fn labels_are_bounded_and_kinds_do_not_mix() {
        let metrics = Metrics::default();
        for i in 0..2 * SERIES_MAX {
            metrics.count("x_total", "X.", &[("i", &i.to_string())], 1);
        }
        metrics.gauge("x_total", "X.", &[("i", "0")], 9.0);
        let text = metrics.render();
        assert_eq!(text.lines().filter(|l| l.starts_with("meshnode_x_total{")).count(), SERIES_MAX);
        assert!(text.contains("meshnode_x_total{i=\"0\"} 1\n"));
    }
}
