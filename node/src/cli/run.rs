//! `meshnode run`: sends a prompt to a model and streams the answer.
use super::failure::Failure;
use super::global::Global;
use super::interrupt::{GLANCE, Interrupts};
use super::model::ModelArgs;
use super::print::{remark, say};
use super::progress::Spinner;
use super::service::Service;
use crate::views::count;
use serde_json::{Value, json};
use std::io::{IsTerminal, Read, Write};
use std::sync::mpsc::{RecvTimeoutError, channel};

/// Largest prompt read from stdin: half of the API's body limit, which leaves room for JSON escapes.
const PROMPT_BYTES_MAX: u64 = 4 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  meshnode run smollm2-135m --prompt 'Why is the sky blue?'
  meshnode run ./model.gguf --greedy --max-tokens 64 --json < question.txt
  meshnode run smollm2-135m --raw --prompt 'Once upon a time' --temperature 0.8 --seed 7

Unless --raw, the prompt is formatted as one user message with the model's chat template. A model that the node did \
not serve before is unloaded a few seconds after the answer, unless it is in use or --keep was given.

--json prints text, tokens, token_ids, prompt_tokens, finish_reason, tokens_per_s, first_token_ms.")]
pub(super) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt [default: read from stdin]
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Send the prompt without the chat template
    #[arg(long)]
    raw: bool,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Always choose the most likely token
    #[arg(long, conflicts_with_all = ["temperature", "top_p", "top_k", "min_p", "seed"])]
    greedy: bool,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    temperature: f64,
    /// Nucleus sampling: sample from the most likely tokens with this cumulative probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Sample from this number of most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Exclude tokens less likely than this fraction of the most likely token
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Values above 1 make repetition less likely
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f64>,
    /// Values above 0 make tokens of the answer less likely to be repeated, -2 to 2
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    presence_penalty: Option<f64>,
    /// As --presence-penalty, multiplied by the number of occurrences, -2 to 2
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    frequency_penalty: Option<f64>,
    /// Sampling seed: the same seed gives the same answer
    #[arg(long, value_name = "S")]
    seed: Option<i64>,
    /// Stop string: the answer ends before it; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after the model's end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
    /// Keep the model loaded after the answer, as `serve` does
    #[arg(long)]
    keep: bool,
}

pub(super) fn run(global: &Global, args: &RunArgs) -> Result<(), Failure> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => read_prompt()?,
    };
    let interrupts = Interrupts::listen()?;
    let (service, served): (_, Value) =
        Service::ask(&interrupts, global, &args.model, None, ("/api/v1/deploy", !args.keep))?;
    let request = args.request(&served["model"], prompt);

    let waiting = Spinner::new("reading the prompt");
    let lines = service.client.stream("/api/v1/generate", &request)?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in lines {
            if sender.send(line).is_err() {
                return; // dropping `lines` closes the connection, which cancels the request
            }
        }
    });
    let mut output = Output { json: global.json, waiting: Some(waiting), ..Output::default() };
    loop {
        match receiver.recv_timeout(GLANCE) {
            Ok(line) => {
                if output.take(&line?)? {
                    output.close();
                    return Ok(());
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::failed(
                    "the node closed the stream before the answer was complete: see its log, and run the command again",
                ));
            }
        }
        if interrupts.came() {
            output.end = json!({"done": "interrupted"});
            output.close();
            return Err(Failure::quiet(Failure::INTERRUPTED));
        }
    }
}

impl RunArgs {
    fn request(&self, model: &Value, prompt: String) -> Value {
        let mut request = json!({
            "model": model, "raw": self.raw, "max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos,
            "temperature": if self.greedy { 0.0 } else { self.temperature },
            "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty, "seed": self.seed, "stop": self.stop,
        });
        match &self.system {
            Some(system) => {
                request["messages"] =
                    json!([{"role": "system", "content": system}, {"role": "user", "content": prompt}]);
            }
            None => request["prompt"] = json!(prompt),
        }
        request
    }
}

fn read_prompt() -> Result<String, Failure> {
    if std::io::stdin().is_terminal() {
        remark("type the prompt, then press Ctrl-D:");
    }
    let mut prompt = String::new();
    let read = std::io::stdin().take(PROMPT_BYTES_MAX + 1).read_to_string(&mut prompt);
    read.map_err(|e| Failure::usage(format!("cannot read the prompt from stdin: {e}")))?;
    if prompt.len() as u64 > PROMPT_BYTES_MAX {
        return Err(Failure::usage(format!("the prompt on stdin is longer than {PROMPT_BYTES_MAX} bytes")));
    }
    let prompt = prompt.trim_end_matches(['\r', '\n']).to_owned();
    if prompt.is_empty() { Err(Failure::usage("no prompt: pass one with --prompt or on stdin")) } else { Ok(prompt) }
}

/// Prints the stream: text immediately, or with `--json` one object at the end.
#[derive(Default)]
struct Output {
    json: bool,
    /// Shown until the first token.
    waiting: Option<Spinner>,
    text: String,
    tokens: Vec<Value>,
    begin: Value,
    end: Value,
}

impl Output {
    /// Processes one line; `true` at the end.
    fn take(&mut self, line: &Value) -> Result<bool, Failure> {
        if let Some(message) = line["error"]["message"].as_str() {
            self.waiting = None;
            self.newline();
            return Err(Failure::failed(message));
        }
        if line.get("prompt_token_ids").is_some() {
            self.begin = line.clone();
            return Ok(false);
        }
        self.waiting = None;
        if !line["token"].is_null() {
            self.tokens.push(line["token"].clone());
        }
        let text = line["text"].as_str().unwrap_or("");
        self.text.push_str(text);
        if !self.json {
            let mut stdout = std::io::stdout();
            // A reader that closed the pipe needs no more output; the process ends, which cancels the request.
            if stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).is_err() {
                return Err(Failure::quiet(0));
            }
        }
        if line.get("done").is_some() {
            self.end = line.clone();
            return Ok(true);
        }
        Ok(false)
    }

    fn newline(&self) {
        if !self.json && !self.text.is_empty() && !self.text.ends_with('\n') {
            say("");
        }
    }

    /// Ends the answer: prints the JSON object, or token counts and speed.
    fn close(&mut self) {
        self.waiting = None;
        if self.json {
            say(json!({
                "model": self.begin["model"], "text": self.text, "tokens": self.tokens.len(),
                "token_ids": self.tokens, "prompt_tokens": self.begin["prompt_token_ids"].as_array().map(Vec::len),
                "prompt_token_ids": self.begin["prompt_token_ids"], "seed": self.begin["seed"],
                "finish_reason": self.end["done"], "first_token_ms": self.end["first_token_ms"],
                "tokens_per_s": self.end["tokens_per_s"],
            }));
            return;
        }
        self.newline();
        if let (Some(first), true) = (self.end["first_token_ms"].as_f64(), std::io::stderr().is_terminal()) {
            let speed =
                self.end["tokens_per_s"].as_f64().map(|s| format!(", then {s:.1} tokens/s")).unwrap_or_default();
            remark(format!("{}: first token after {first:.0} ms{speed}", count(self.tokens.len(), "token")));
        }
    }
}
