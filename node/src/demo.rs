//! `meshnode demo`: three real nodes share a model that fits on none of them, and one is killed during generation.
mod chaos;
mod coordinator_loss;

use crate::cluster::{LocalNode, LocalNodeOptions};
use crate::views::{JobView, PlanReport};
pub(crate) use chaos::{ChaosSummary, Kills};
use console::style;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{Error, Result, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The prompt of every generation.
const PROMPT: &str = "Explain to a child why the sky is blue.";
/// Tokens of context: small, so that the weights, not the KV caches, determine what fits.
const CONTEXT: u32 = 512;
/// Timeout for all nodes to join the mesh.
const JOIN_MAX: Duration = Duration::from_secs(60);

/// Options of the demo.
#[derive(Clone, Debug)]
pub(crate) struct DemoOptions {
    /// JSON lines on stdout instead of human-readable output.
    pub json: bool,
    /// Tokens to generate.
    pub tokens: u32,
    /// Compute threads per node.
    pub threads: usize,
    /// Do not print the generated text.
    pub quiet: bool,
}

impl Default for DemoOptions {
    fn default() -> Self {
        Self { json: false, tokens: 96, threads: 1, quiet: false }
    }
}

/// The last line of `--json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DemoSummary {
    /// Node processes started.
    pub nodes: usize,
    /// The distributed run with the kill produced the same tokens as one undisturbed node.
    pub tokens_equal_solo: bool,
    /// Requests that did not complete.
    pub requests_lost: usize,
    /// Longest gap between two tokens, milliseconds.
    pub stall_ms: f64,
    /// Tokens per second of the distributed model, from the median gap between tokens, so that the stall does not
    /// count.
    pub tokens_per_s: f64,
    /// Tokens per second of one node with the same number of threads.
    pub solo_tokens_per_s: f64,
}

/// Runs the demo with `exe` as the node program.
///
/// # Errors
/// A node did not start, or the mesh did not behave as the demo expects; the message says which.
pub(crate) fn run(exe: &Path, model: &Path, options: &DemoOptions) -> Result<DemoSummary> {
    let dir = folder()?;
    let demo = Demo::new(exe, dir.path(), model, options);
    let solo = demo.solo()?;
    let mut nodes = demo.mesh(solo.bytes)?;
    demo.place(&nodes)?;
    let split = demo.interrupted(&mut nodes)?;
    let summary = DemoSummary {
        nodes: nodes.len(),
        tokens_equal_solo: split.tokens == solo.run.tokens,
        requests_lost: usize::from(!split.complete),
        stall_ms: split.stall.as_secs_f64() * 1e3,
        tokens_per_s: split.tokens_per_s,
        solo_tokens_per_s: solo.run.tokens_per_s,
    };
    demo.screen.summary(&summary);
    Ok(summary)
}

/// Kills a node in each of many generations, at tokens chosen by `seed`.
///
/// # Errors
/// As for [`run`].
pub(crate) fn chaos(exe: &Path, model: &Path, options: &DemoOptions, kills: Kills, seed: u64) -> Result<ChaosSummary> {
    let dir = folder()?;
    let demo = Demo::new(exe, dir.path(), model, options);
    let summary = demo.chaos(kills, seed)?;
    demo.screen.chaos(&summary);
    Ok(summary)
}

fn folder() -> Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("meshnode-demo-").tempdir()
}

struct Demo {
    exe: PathBuf,
    dir: PathBuf,
    model: PathBuf,
    options: DemoOptions,
    screen: Screen,
}

struct Solo {
    run: Run,
    /// Memory that the model needs on one node, from its plan.
    bytes: u64,
}

/// One generation, as seen by the client.
#[derive(Default)]
struct Run {
    tokens: Vec<u64>,
    text: String,
    complete: bool,
    tokens_per_s: f64,
    stall: Duration,
    /// Arrival time of each token.
    arrivals: Vec<Instant>,
}

impl Run {
    /// The longest gap between two tokens of which the second arrived after `moment`.
    fn stall_after(&self, moment: Instant) -> Duration {
        let gaps = self.arrivals.windows(2).filter(|pair| pair[1] > moment).map(|pair| pair[1] - pair[0]);
        gaps.max().unwrap_or_default()
    }
}

impl Demo {
    fn new(exe: &Path, dir: &Path, model: &Path, options: &DemoOptions) -> Self {
        Demo {
            exe: exe.to_owned(),
            dir: dir.to_owned(),
            model: model.to_owned(),
            options: options.clone(),
            screen: Screen { json: options.json },
        }
    }

    /// The reference: one undisturbed node without a memory limit.
    fn solo(&self) -> Result<Solo> {
        self.screen.say("one", "one node alone, for reference");
        let node = self.start("solo", None, None)?;
        let plan = self.plan(&node)?;
        let whole = plan.stages.first();
        let bytes = whole.ok_or_else(|| Error::other(format!("no plan for one node: {}", json!(plan))))?.bytes;
        node.post("/api/v1/deploy", &self.model_request())?;
        let run = self.generate(&node, &mut |_, _| Ok(()))?;
        self.screen
            .event("solo", &json!({"tokens_per_s": run.tokens_per_s, "tokens": run.tokens.len(), "bytes": bytes}));
        Ok(Solo { run, bytes })
    }

    /// Three nodes. The model fits on no single node, but on any two.
    fn mesh(&self, solo_bytes: u64) -> Result<Vec<LocalNode>> {
        // 80 % of the model's size is too little for the whole model; two such nodes suffice, including the parts that
        // both stages hold (shared embedding, scratch).
        let memory = solo_bytes * 8 / 10;
        self.screen
            .say("three", &format!("three nodes with {} each; the model needs {}", mib(memory), mib(solo_bytes)));
        let first = self.start("ada", Some(memory), None)?;
        let ticket = first.ticket.clone();
        let mut nodes = vec![first];
        for name in ["bea", "cem"] {
            nodes.push(self.start(name, Some(memory), Some(ticket.clone()))?);
        }
        for node in &nodes {
            node.wait_members(nodes.len(), JOIN_MAX)?;
        }
        let pids: Vec<Value> = nodes.iter().map(|n| json!({"name": n.name, "pid": n.pid(), "port": n.port})).collect();
        self.screen.event("mesh", &json!({"nodes": pids, "memory": memory}));
        Ok(nodes)
    }

    fn plan(&self, node: &LocalNode) -> Result<PlanReport> {
        let plan = node.post("/api/v1/plan", &self.model_request())?;
        serde_json::from_value(plan).map_err(Error::other)
    }

    fn place(&self, nodes: &[LocalNode]) -> Result<()> {
        self.screen.plan(&self.plan(&nodes[0])?);
        nodes[0].post("/api/v1/deploy", &self.model_request())?;
        Ok(())
    }

    /// Generates on the first node, the coordinator, and kills another node with a stage after a third of the tokens.
    fn interrupted(&self, nodes: &mut [LocalNode]) -> Result<Run> {
        let (coordinator, others) = nodes.split_first_mut().ok_or_else(|| Error::other("no nodes"))?;
        // The actual stages may differ from the plan shown, because measurements since then may have changed the plan.
        let jobs: Vec<JobView> = serde_json::from_value(coordinator.get("/api/v1/jobs")?).map_err(Error::other)?;
        let stages = jobs.first().map(|job| job.stages.as_slice()).unwrap_or_default();
        let holds = |name: &str| stages.iter().any(|stage| stage.name == name);
        let victim = others.iter_mut().find(|node| holds(&node.name)).ok_or_else(|| {
            Error::other(format!("expected a stage on another node than the coordinator: {}", json!(jobs)))
        })?;
        let moment = self.options.tokens as usize / 3;
        let screen = &self.screen;
        let run = self.generate(coordinator, &mut |so_far, _| {
            if so_far == moment {
                victim.kill();
                screen.killed(&victim.name, victim.pid());
            }
            Ok(())
        })?;
        self.screen.event("stall", &json!({"stall_ms": run.stall.as_secs_f64() * 1e3, "text": run.text}));
        Ok(run)
    }

    /// Streams one greedy answer. Calls `watch` after each token, with the number of tokens so far.
    fn generate(&self, node: &LocalNode, watch: &mut dyn FnMut(usize, &Value) -> Result<()>) -> Result<Run> {
        let request = json!({
            "model": self.model, "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": self.options.tokens, "temperature": 0.0, "ignore_eos": true,
        });
        let lines = node.post_lines("/api/v1/generate", &request)?;
        let mut run = Run::default();
        for line in lines {
            let event: Value = serde_json::from_str(&line?).map_err(Error::other)?;
            if let Some(token) = event["token"].as_u64() {
                run.tokens.push(token);
                run.arrivals.push(Instant::now());
                let text = event["text"].as_str().unwrap_or_default();
                run.text.push_str(text);
                if !self.options.quiet {
                    self.screen.text(text);
                }
                watch(run.tokens.len(), &event)?;
            } else if event["error"].is_string() || event["error"].is_object() {
                return Err(Error::other(format!("the request failed: {}", event["error"])));
            } else if event["done"].is_string() {
                run.complete = run.tokens.len() == self.options.tokens as usize;
            }
        }
        if !self.options.quiet {
            self.screen.text("\n");
        }
        let gaps: Vec<Duration> = run.arrivals.windows(2).map(|w| w[1] - w[0]).collect();
        run.stall = gaps.iter().max().copied().unwrap_or_default();
        run.tokens_per_s = 1.0 / median(&gaps).as_secs_f64().max(1e-9);
        Ok(run)
    }

    fn start(&self, name: &str, memory: Option<u64>, join: Option<String>) -> Result<LocalNode> {
        let options = LocalNodeOptions {
            name: name.to_owned(),
            device: None,
            memory,
            threads: Some(self.options.threads),
            join,
            // Separate caches, so that only the coordinator has the file and other nodes fetch their layers from it.
            cache_dir: (name != "ada" && name != "solo").then(|| self.dir.join(name).join("cache")),
            flags: Vec::new(),
        };
        LocalNode::spawn(&self.exe, &self.dir, &options)
    }

    fn model_request(&self) -> Value {
        json!({"model": self.model, "options": {"int8": true, "context": CONTEXT, "sequences": 1}})
    }
}

/// The median gap, which the stall and a slow first token do not affect.
fn median(gaps: &[Duration]) -> Duration {
    let mut sorted = gaps.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn mib(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Write a line, or text, to stdout. Errors are ignored: a reader may close the pipe.
macro_rules! line { ($($part:tt)*) => {{ let _ = writeln!(std::io::stdout(), $($part)*); }} }
macro_rules! text { ($($part:tt)*) => {{ let _ = write!(std::io::stdout(), $($part)*); }} }

/// Output on stdout, human-readable or as JSON lines.
struct Screen {
    json: bool,
}

impl Screen {
    fn say(&self, mark: &str, text: &str) {
        if self.json {
            line!("{}", json!({"event": "step", "step": mark, "text": text}));
        } else {
            line!("\n{} {}", style("▶").cyan().bold(), style(text).bold());
        }
    }

    fn event(&self, name: &str, fields: &Value) {
        if self.json {
            let mut line = json!({"event": name});
            if let (Some(line), Some(fields)) = (line.as_object_mut(), fields.as_object()) {
                line.extend(fields.clone());
            }
            line!("{line}");
            return;
        }
        match name {
            "solo" => line!("  {:.1} tokens/s", fields["tokens_per_s"].as_f64().unwrap_or_default()),
            "stall" => line!(
                "  {} generation continued after a stall of {:.0} ms",
                style("✔").green(),
                fields["stall_ms"].as_f64().unwrap_or_default()
            ),
            "mesh" => {
                for node in fields["nodes"].as_array().into_iter().flatten() {
                    line!("  {} {} pid {}", style("●").green(), node["name"].as_str().unwrap_or_default(), node["pid"]);
                }
            }
            _ => {}
        }
    }

    fn plan(&self, plan: &PlanReport) {
        if self.json {
            line!("{}", json!({"event": "plan", "plan": plan}));
            return;
        }
        line!("  plan: {:.1} ms per token", plan.token_ms);
        for stage in &plan.stages {
            let (first, end) = (stage.first_layer, stage.end_layer);
            let bar = "█".repeat((end - first) as usize);
            line!(
                "  {:>5} layers {first:>2}–{:<2} {} {}",
                stage.name,
                end.saturating_sub(1),
                style(bar).blue(),
                mib(stage.bytes)
            );
        }
        line!();
    }

    fn killed(&self, name: &str, pid: u32) {
        if self.json {
            line!("{}", json!({"event": "kill", "name": name, "pid": pid, "signal": "SIGKILL"}));
        } else {
            text!(" {} ", style(format!("✂ kill -9 {name}")).red().bold());
            let _ = std::io::stdout().flush();
        }
    }

    fn text(&self, text: &str) {
        if !self.json {
            text!("{text}");
            let _ = std::io::stdout().flush();
        }
    }

    /// A progress bar on stderr; hidden with JSON output.
    fn progress(&self, length: u64) -> indicatif::ProgressBar {
        if self.json {
            return indicatif::ProgressBar::hidden();
        }
        let style = indicatif::ProgressStyle::with_template("  {bar:40.cyan} {pos} of {len} kills, {elapsed}");
        indicatif::ProgressBar::new(length)
            .with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
    }

    fn chaos(&self, summary: &ChaosSummary) {
        if self.json {
            line!("{}", serde_json::to_string(summary).unwrap_or_default());
            return;
        }
        let verdict = if summary.tokens_equal_solo && summary.requests_lost == 0 {
            style(format!("{} kills: all tokens equal to those of one node, no request lost", summary.kills))
                .green()
                .bold()
        } else {
            style("FAILED: tokens differ from those of one node, or a request was lost".to_owned()).red().bold()
        };
        line!("\n{verdict}");
        line!(
            "stalls: median {:.0} ms, 99th percentile {:.0} ms, maximum {:.0} ms (--seed {})",
            summary.stall_ms_p50,
            summary.stall_ms_p99,
            summary.stall_ms_max,
            summary.seed
        );
        match (summary.tokens_per_s_without_standbys, summary.standby_cost_percent) {
            (Some(without), Some(cost)) => {
                line!("{:.1} tokens/s with standbys, {without:.1} without: a cost of {cost:.1} %", summary.tokens_per_s)
            }
            _ => line!(
                "{:.1} tokens/s with standbys; not compared with none, as the job kept moving to other nodes",
                summary.tokens_per_s
            ),
        }
        if summary.coordinator_kills > 0 {
            line!(
                "coordinator killed {} times: the client resumed at another node after {:.0} ms (median), {:.0} ms (maximum)",
                summary.coordinator_kills,
                summary.coordinator_pause_ms_p50,
                summary.coordinator_pause_ms_max
            );
        }
    }

    fn summary(&self, summary: &DemoSummary) {
        if self.json {
            line!("{}", serde_json::to_string(summary).unwrap_or_default());
            return;
        }
        let verdict = if summary.tokens_equal_solo && summary.requests_lost == 0 {
            style("all tokens equal to those of one node, no request lost").green().bold()
        } else {
            style("FAILED: tokens differ from those of one node, or the request was lost").red().bold()
        };
        line!("\n{verdict}");
        line!(
            "{:.1} tokens/s on the mesh, {:.1} on one node with the same number of threads; stall of {:.0} ms",
            summary.tokens_per_s,
            summary.solo_tokens_per_s,
            summary.stall_ms
        );
    }
}
