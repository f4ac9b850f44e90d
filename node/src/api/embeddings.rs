//! `POST /v1/embeddings`: embeddings as of OpenAI's API, from models that are made for them.
use super::app::App;
use super::body::{body_bytes, off_thread};
use super::engine::{Engine, Served};
use super::error::ApiError;
use super::fields::{self, Field};
use super::generation::{Generation, Order, Step};
use super::idempotency::Key;
use super::models::find_or_serve;
use super::request::Prompt;
use axum::Json;
use axum::extract::{Request, State};
use data_encoding::BASE64;
use futures::stream;
use futures::{StreamExt, TryStreamExt};
use node_core::limits::SEQUENCES_MAX;
use node_core::work::serve::{Priority, Sampling};
use serde::Deserialize;
use serde_json::{Value, json};

/// Inputs of one request, as of OpenAI's API.
const INPUTS_MAX: usize = 2048;

/// Times that an input is sent: a second loss between two attempts is unlikely.
const ATTEMPTS: usize = 3;

/// Fields of [`EmbeddingsBody`].
pub(super) const EMBEDDINGS: &[Field] = &[
    Field::text("model").required().about("Name of a model that is made for embeddings"),
    Field::prompt("input").required().about("One or several texts, or lists of token ids; at most 2048"),
    Field::text("encoding_format").about("`float`, or `base64` of little-endian 32-bit floats"),
    Field::count("dimensions").about("Leading elements to return, of length 1 again; otherwise all"),
];

/// The body of the request. Other fields (`user`) are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EmbeddingsBody {
    model: Option<String>,
    input: Option<Prompt>,
    encoding_format: Option<String>,
    dimensions: Option<u32>,
}

/// How an embedding is returned.
#[derive(Clone, Copy)]
struct Form {
    dimensions: usize,
    base64: bool,
}

pub(super) async fn embeddings<E: Engine>(
    State(app): State<App<E>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let asked: EmbeddingsBody = fields::read(&body_bytes(request).await?, EMBEDDINGS)?;
    let model = find_or_serve(&app, asked.model.as_deref(), false).await?;
    let form = asked.form(&model)?;
    let for_inputs = model.clone();
    let inputs = off_thread(move || asked.inputs(&for_inputs)).await?;
    let prompt_tokens: usize = inputs.iter().map(Vec::len).sum();
    let rows = inputs.into_iter().map(|input| embed(&app, &model, input));
    let rows: Vec<Vec<f32>> = stream::iter(rows).buffered(SEQUENCES_MAX as usize).try_collect().await?;
    let data = rows.into_iter().enumerate().map(|(index, row)| {
        form.view(row).map(|embedding| json!({"object": "embedding", "index": index, "embedding": embedding}))
    });
    let data = data.collect::<Result<Vec<Value>, ApiError>>()?;
    Ok(Json(json!({
        "object": "list",
        "data": data,
        "model": model.name,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    })))
}

impl EmbeddingsBody {
    fn form(&self, model: &Served) -> Result<Form, ApiError> {
        let Some(width) = model.text.embedding() else {
            let message = format!(
                "`{}` generates text and is not made for embeddings: serve a model whose GGUF file has a `pooling_type`",
                model.name
            );
            return Err(ApiError::invalid("model", message));
        };
        let base64 = match self.encoding_format.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let message = format!("`encoding_format` must be `float` or `base64`, found `{other}`");
                return Err(ApiError::invalid("encoding_format", message));
            }
        };
        let dimensions = self.dimensions.unwrap_or(width);
        if dimensions == 0 || dimensions > width {
            let message = format!("`dimensions` must be 1 to {width} for this model, found {dimensions}");
            return Err(ApiError::invalid("dimensions", message));
        }
        Ok(Form { dimensions: dimensions as usize, base64 })
    }

    /// The token ids of each input.
    fn inputs(self, model: &Served) -> Result<Vec<Vec<u32>>, ApiError> {
        let input = self.input.ok_or_else(|| ApiError::invalid("input", "`input` is missing"))?;
        if input.count() == 0 || input.count() > INPUTS_MAX {
            let message = format!("`input` must have 1 to {INPUTS_MAX} texts, found {}", input.count());
            return Err(ApiError::invalid("input", message));
        }
        let inputs = input.each(model, "input")?;
        for (index, tokens) in inputs.iter().enumerate() {
            if tokens.is_empty() {
                return Err(ApiError::invalid_at(format!("input[{index}]"), "the text has no tokens"));
            }
            if tokens.len() >= model.context as usize {
                let place = format!("input[{index}]");
                return Err(ApiError::too_long(tokens.len(), model.context).at(place));
            }
        }
        Ok(inputs)
    }
}

impl Form {
    /// The leading elements of a row, scaled to length 1.
    fn view(self, mut row: Vec<f32>) -> Result<Value, ApiError> {
        row.truncate(self.dimensions);
        let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let length = squares.sqrt();
        if row.len() < self.dimensions || !length.is_finite() || length == 0.0 {
            return Err(no_embedding());
        }
        row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        if self.base64 {
            let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
            return Ok(Value::String(BASE64.encode(&bytes)));
        }
        Ok(json!(row))
    }
}

/// The embedding of one input. A token that comes from a coordinator's log has none, so the request is sent again then: all
/// but its last page is cached.
async fn embed<E: Engine>(app: &App<E>, model: &Served, prompt: Vec<u32>) -> Result<Vec<f32>, ApiError> {
    for _ in 0..ATTEMPTS {
        let order = Order {
            prompt: prompt.clone(),
            max_tokens: 1,
            sampling: Sampling::GREEDY,
            ignore_eos: true,
            priority: Priority::Interactive,
            stops: Vec::new(),
        };
        let key = Key::random()?.request_key("");
        let mut generation = Generation::start(&app.engine, model.clone(), order, key, &app.metrics).await?;
        let mut found = None;
        loop {
            match generation.next().await {
                Step::Token { embedding, .. } => found = embedding,
                Step::End { .. } => break,
                Step::Failed(error) => return Err(error),
            }
        }
        if let Some(row) = found {
            return Ok(row.into_iter().map(f32::from_bits).collect());
        }
    }
    Err(no_embedding())
}

fn no_embedding() -> ApiError {
    ApiError::failed("the mesh returned no valid embedding: send the request again")
}
