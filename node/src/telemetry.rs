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
    let set = |name: &'static str| std::env::var(name).ok().filter(|text| !text.is_empty()).map(|text| (name, text));
    let given = set("MESHNODE_LOG").or_else(|| set("RUST_LOG"));
    let (filter, problem) = filter(given.as_ref().map(|(_, text)| text.as_str()), level);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Do not panic if the log cannot be written (full disk, closed pipe).
    let builder = builder.log_internal_errors(false);
    // Fails harmlessly if called twice in one process, as in tests.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).with_ansi(console::user_attended_stderr()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if let (Some(problem), Some((name, text))) = (problem, given) {
        tracing::warn!("{name}={text} is ignored: {problem}; expected levels as in debug or warn,node_core=trace");
    }
}

/// CubeCL's kernel cache reports errors about a file that is absent on purpose.
const ABSENT_ON_PURPOSE: &str = "cubecl_common::cache_file=off";

/// Which events are logged: those that `given` selects, by default those of our own crates from `level` on. If `given` is malformed, the
/// default and the reason.
fn filter(given: Option<&str>, level: &str) -> (EnvFilter, Option<String>) {
    let mut problem = None;
    if let Some(given) = given {
        // What it says of the cache comes later, so it prevails.
        match EnvFilter::try_new(format!("{ABSENT_ON_PURPOSE},{given}")) {
            Ok(filter) => return (filter, None),
            Err(error) => problem = Some(error.to_string()),
        }
    }
    // Discovery and TLS are noisy below warn. GPU probing warns about problems that `doctor` explains better.
    let default = format!(
        "warn,meshnode={level},transport={level},node_core={level},kernels={level},kernels_gpu={level},wgpu_hal=error,\
         wgpu_core=error,naga=error,{ABSENT_ON_PURPOSE}"
    );
    (EnvFilter::new(default), problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_levels_prevail_and_keep_the_cache_quiet() {
        let shown = |given| filter(Some(given), "info").0.to_string();
        let debug = shown("debug");
        assert!(debug.contains(ABSENT_ON_PURPOSE) && debug.contains("debug") && !debug.contains("info"), "{debug}");
        let chosen = shown("warn,cubecl_common::cache_file=error");
        assert!(!chosen.contains(ABSENT_ON_PURPOSE), "{chosen}");
        let (default, problem) = filter(None, "info");
        assert!(default.to_string().contains("meshnode=info") && problem.is_none(), "{default}");
    }

    #[test]
    fn malformed_levels_are_reported_and_the_default_is_used() {
        let (used, problem) = filter(Some("meshnode=loud"), "info");
        assert_eq!(used.to_string(), filter(None, "info").0.to_string());
        assert!(problem.is_some_and(|problem| !problem.is_empty()));
    }
}
