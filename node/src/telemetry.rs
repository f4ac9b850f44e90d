//! Log lines of a running node, on stderr.
//!
//! Levels: `error` needs action immediately, `warn` needs attention the next day, `info` reports events, `debug`
//! explains decisions.
use tracing_subscriber::EnvFilter;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Human-readable
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Sends `tracing` output to stderr. Verbosity 0 means `warn` for commands and `info` for daemons; each step adds a
/// level. `MESHNODE_LOG` (or `RUST_LOG`) overrides the level. A second call does nothing.
pub(crate) fn start(format: LogFormat, verbosity: u8, daemon: bool) {
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
