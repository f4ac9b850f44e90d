//! `bench decode` and `bench prefill` on a GPU: tokens per second, and a breakdown of the time per token.
use kernels::device::DeviceId;
use kernels::quant::QuantType;
use kernels::threads::Threads;
use kernels_gpu::{Profiled, Shape};
use kernels_models::sampler::{LogitChanges, SamplerSettings};
use kernels_models::stage::{
    Activations, Draw, Drawn, RequestedOutput, Rows, RowsIn, RowsOut, StageError, StageOptions,
};
use kernels_models::weights::ModelFile;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The model to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// A model file.
    File(&'a Path),
    /// Random weights in the shape of a model, generated on the device.
    Random(&'static Shape, QuantType),
}

/// Parameters of the measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuBench {
    /// Threads that convert weights, and compute experts in RAM.
    pub threads: usize,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens decoded after the prompt; 0 measures only prefill.
    pub tokens: usize,
    /// Requests that decode concurrently, at least one.
    pub requests: usize,
    /// Sampling temperature; 0 chooses the most likely token.
    pub temperature: f32,
    /// Device memory that the model may take, in bytes: experts that do not fit lie in RAM.
    pub memory: Option<u64>,
}

/// Repetitions of each measurement; results are medians.
const REPEATS: usize = 3;

/// Loads a model onto a GPU and measures it.
///
/// # Errors
/// The device does not exist, the model does not fit into its memory, or the device fails.
pub(crate) fn model(source: Source<'_>, device: DeviceId, bench: GpuBench) -> Result<Value, String> {
    let text = |error: StageError| error.to_string();
    let copied = kernels_gpu::measure_gpu(device)?.copy_bytes_s;
    let options = |file: &ModelFile| {
        let options = StageOptions {
            layers: 0..file.config().layers,
            sequences: bench.requests + 1, // one more to time the steps of a layer
            context: bench.prompt + bench.tokens + 2,
            activations: Activations::Int8,
            ram: 0,
            threads: bench.threads,
        };
        let ram = bench.memory.map_or(0, |memory| kernels_gpu::stage_bytes(file, &options).saturating_sub(memory));
        StageOptions { ram, ..options }
    };
    let (name, mut stage, vocab) = match source {
        Source::File(path) => {
            let file = ModelFile::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
            let config = file.config();
            let most = config.context;
            if bench.prompt + bench.tokens + 2 > most {
                return Err(format!(
                    "expected --prompt and --tokens to fit the model's context of {most}, found {} and {}: choose fewer",
                    bench.prompt, bench.tokens
                ));
            }
            let vocab = config.vocab;
            let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            (name, kernels_gpu::load_profiled(Arc::clone(&file), options(&file), device).map_err(text)?, vocab)
        }
        Source::Random(shape, quant) => {
            let stage = kernels_gpu::load_random(shape, quant, &options, device).map_err(text)?;
            (format!("{} {} (random weights)", shape.name, quant.name()), stage, shape.vocab)
        }
    };
    let threads = Threads::new(bench.threads).map_err(|error| error.to_string())?;
    let figures = Run { stage: stage.as_mut(), threads, vocab, bench }.measure(copied.unwrap_or(0)).map_err(text)?;
    let mut all = json!({"model": name, "device": device.to_string()});
    if let (Value::Object(all), Value::Object(figures)) = (&mut all, figures) {
        all.extend(figures);
    }
    Ok(all)
}

struct Run<'a> {
    stage: &'a mut dyn Profiled,
    /// For experts in RAM.
    threads: Threads,
    vocab: usize,
    bench: GpuBench,
}

impl Run<'_> {
    fn measure(&mut self, copied: u64) -> Result<Value, StageError> {
        let GpuBench { prompt, tokens, requests, .. } = self.bench;
        self.prefill(0)?; // warm-up: compiles the kernels and touches every page
        let prefill = self.median(|run| run.prefill(0))?;
        let bytes = self.stage.bytes_per_token();
        let phases = self.stage.load_phases();
        let mut figures = json!({
            "prompt": prompt,
            "prefill_tok_s": prompt as f64 / prefill.as_secs_f64(),
            "bytes_per_token": bytes,
            "copy_bytes_per_second": copied,
            "weights_bytes": self.stage.resident_bytes().weights,
            "working_bytes": self.stage.resident_bytes().working,
            "ram_bytes": self.stage.ram_bytes(),
            "load_s": {
                "open": phases.open_s, "convert": phases.convert_s, "upload": phases.upload_s, "proof": phases.proof_s,
                "kernels": phases.kernels_s, "total": phases.total_s,
            },
            "prefill_us_a_layer": self.times(prompt, 0)?,
        });
        if tokens > 0 {
            for request in 1..requests {
                self.prefill(request as u64)?;
            }
            let mut waited = Duration::ZERO;
            let took = self.median(|run| {
                let before = run.stage.wait_time();
                let took = run.decode()?;
                waited = run.stage.wait_time().saturating_sub(before);
                Ok(took)
            })?;
            let step_s = took.as_secs_f64() / tokens as f64;
            let launches = self.stage.launches();
            let per_second = requests as f64 / step_s;
            figures["requests"] = json!(requests);
            figures["tokens"] = json!(tokens);
            figures["temperature"] = json!(self.bench.temperature);
            figures["decode_tok_s"] = json!(per_second);
            figures["step_us"] = json!(step_s * 1e6);
            figures["host_us_a_step"] = json!(took.saturating_sub(waited).as_secs_f64() / tokens as f64 * 1e6);
            figures["launches_a_layer"] = json!(launches.per_layer);
            figures["launches_a_step"] = json!(launches.per_step);
            figures["read_bytes_per_second"] = json!(bytes as f64 / step_s);
            figures["share_of_copy"] = json!(if copied > 0 { bytes as f64 / step_s / copied as f64 } else { 0.0 });
            figures["experts_moved"] = json!(self.stage.experts_moved());
            figures["decode_us_a_layer"] = self.times(requests.min(8), prompt)?;
        }
        Ok(figures)
    }

    fn median(
        &mut self,
        mut of: impl FnMut(&mut Self) -> Result<Duration, StageError>,
    ) -> Result<Duration, StageError> {
        let mut all = (0..REPEATS).map(|_| of(self)).collect::<Result<Vec<_>, _>>()?;
        all.sort_unstable();
        Ok(all[REPEATS / 2])
    }

    /// Microseconds per step of a layer.
    fn times(&mut self, rows: usize, position: usize) -> Result<Value, StageError> {
        // A forward pass has at most 512 rows.
        let times = self.stage.step_times(rows.clamp(1, 512), position)?;
        Ok(times.into_iter().map(|(step, seconds)| (format!("{step:?}"), json!(seconds * 1e6))).collect())
    }

    fn settings(&self) -> SamplerSettings {
        SamplerSettings { temperature: self.bench.temperature, ..SamplerSettings::greedy() }
    }

    /// Time to process the prompt of a request, up to its first token.
    fn prefill(&mut self, sequence: u64) -> Result<Duration, StageError> {
        let start = Instant::now();
        let tokens: Vec<u32> = (0..self.bench.prompt).map(|i| ((i * 37 + 11) % self.vocab) as u32).collect();
        let draw = Draw {
            settings: self.settings(),
            position: tokens.len() as u32,
            changes: LogitChanges::default(),
            logprobs: None,
        };
        let rows = Rows { sequence, position: 0, input: RowsIn::Tokens(&tokens), output: RequestedOutput::Token(draw) };
        self.stage.forward(&mut self.threads, &[rows])?;
        Ok(start.elapsed())
    }

    /// Time to decode all tokens of all requests; the input of each step is the tokens sampled in the previous one.
    fn decode(&mut self) -> Result<Duration, StageError> {
        let (prompt, requests) = (self.bench.prompt, self.bench.requests);
        let mut last = vec![1u32; requests];
        let start = Instant::now();
        for i in 0..self.bench.tokens {
            let settings = self.settings();
            let row = |(sequence, token): (usize, &u32)| (sequence as u64, [*token]);
            let tokens: Vec<(u64, [u32; 1])> = last.iter().enumerate().map(row).collect();
            let position = prompt + i;
            let draw =
                Draw { settings, position: position as u32 + 1, changes: LogitChanges::default(), logprobs: None };
            let batch: Vec<Rows<'_>> = tokens
                .iter()
                .map(|(sequence, token)| Rows {
                    sequence: *sequence,
                    position,
                    input: RowsIn::Tokens(token),
                    output: RequestedOutput::Token(draw),
                })
                .collect();
            for (last, out) in last.iter_mut().zip(self.stage.forward(&mut self.threads, &batch)?) {
                if let RowsOut::Token(Drawn { token, .. }) = out {
                    *last = token;
                }
            }
        }
        Ok(start.elapsed())
    }
}

/// Human-readable results of [`model`].
pub(crate) fn text(figures: &Value) -> String {
    let number = |name: &str| figures[name].as_f64().unwrap_or(0.0);
    let in_ram = number("ram_bytes");
    let in_ram = if in_ram > 0.0 { format!(", {:.2} GB of experts in RAM", in_ram / 1e9) } else { String::new() };
    let mut text = format!(
        "{} on {}: {:.2} GB of weights{in_ram}, loaded in {:.2} s\nprefill of {}: {:.0} tok/s\n",
        figures["model"].as_str().unwrap_or("?"),
        figures["device"].as_str().unwrap_or("?"),
        number("weights_bytes") / 1e9,
        figures["load_s"]["total"].as_f64().unwrap_or(0.0),
        figures["prompt"],
        number("prefill_tok_s"),
    );
    if figures["decode_tok_s"].is_number() {
        text.push_str(&format!(
            "decode with {} concurrent, temperature {}: {:.1} tok/s, {:.0} µs per step, {:.0} µs of it on the host; {} launches \
             per layer, {} per step; reads {:.0} GB/s, {:.0} % of the copy bandwidth ({:.0} GB/s)\n",
            figures["requests"],
            figures["temperature"],
            number("decode_tok_s"),
            number("step_us"),
            number("host_us_a_step"),
            figures["launches_a_layer"],
            figures["launches_a_step"],
            number("read_bytes_per_second") / 1e9,
            number("share_of_copy") * 100.0,
            number("copy_bytes_per_second") / 1e9,
        ));
    }
    for (name, title) in [("decode_us_a_layer", "decode"), ("prefill_us_a_layer", "prefill")] {
        let Some(times) = figures[name].as_object() else { continue };
        let sum: f64 = times.values().filter_map(Value::as_f64).sum();
        text.push_str(&format!("µs per layer, {title}: {sum:.1} in total,"));
        for (step, us) in times {
            text.push_str(&format!(" {step} {:.1}", us.as_f64().unwrap_or(0.0)));
        }
        text.push('\n');
    }
    text
}
