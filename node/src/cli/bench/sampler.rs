//! `bench sampler`: time to sample a token on this machine's CPU.
use kernels_models::bench::SamplerFigures;
use kernels_models::sampler::SamplerSettings;
use serde_json::{Value, json};

/// Draws per measurement; results are medians.
const DRAWS: usize = 200;
/// The sampler's own limit: 2^20 logits.
const VOCABULARY_MAX: u32 = 1 << 20;

#[derive(Debug, clap::Args)]
pub(super) struct SamplerArgs {
    /// Vocabulary size (number of logits); one measurement per size
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [49_152, 128_256, 152_064], value_parser = clap::value_parser!(u32).range(1..=i64::from(VOCABULARY_MAX)))]
    vocabulary: Vec<u32>,
}

/// Measures every vocabulary size at temperature 0, at 1 without truncation, and at 1 with each truncation and with
/// all.
pub(super) fn measure(args: &SamplerArgs) -> Result<Value, String> {
    let greedy = SamplerSettings::greedy();
    let plain = SamplerSettings { temperature: 1.0, seed: 1, ..greedy };
    let settings = [
        greedy,
        plain,
        SamplerSettings { top_p: 0.95, ..plain },
        SamplerSettings { top_k: 40, ..plain },
        SamplerSettings { min_p: 0.05, ..plain },
        SamplerSettings { top_p: 0.95, top_k: 40, min_p: 0.05, ..plain },
    ];
    let mut runs: Vec<SamplerFigures> = Vec::new();
    for &vocabulary in &args.vocabulary {
        for settings in &settings {
            let figures = kernels_models::bench::sampler(vocabulary as usize, settings, DRAWS);
            runs.push(figures.map_err(|e| e.to_string())?);
        }
    }
    let slowest = runs.iter().map(|run| run.ms).fold(0.0, f64::max);
    Ok(json!({"threads": 1, "ms_max": slowest, "runs": runs}))
}

/// Human-readable results of `measure`.
pub(super) fn text(figures: &Value) -> String {
    let line = |run: &Value| {
        let number = |name: &str| run[name].as_f64().unwrap_or(0.0);
        format!(
            "{:>7} logits, temperature {}, top_p {:<4.2}, top_k {:<2}, min_p {:<4.2} ({}): {:.3} ms, {:.0} % of the read bandwidth ({:.1} GB/s)\n",
            run["vocabulary"],
            number("temperature"),
            number("top_p"),
            number("top_k"),
            number("min_p"),
            run["instruction_set"].as_str().unwrap_or("?"),
            number("ms"),
            number("share_of_read") * 100.0,
            number("read_bandwidth") / 1e9,
        )
    };
    figures["runs"].as_array().into_iter().flatten().map(line).collect()
}
