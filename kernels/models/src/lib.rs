//! Models on the CPU: weights, tokenizers, chat templates, sampling, and the stages that compute their layers.
//!
//! The rest of the program loads a model as a `stage`. Next: `stage.rs`, then `model.rs` for the CPU engine.

pub mod bench;
pub mod chat_template;
pub mod constraint;
pub mod decoder;
pub mod gate;
pub mod model;
pub mod quantize;
pub mod recipe;
pub mod rotary;
pub mod sampler;
pub mod stage;
pub mod tokenizer;
pub mod weights;

mod attention;
mod engine;
pub mod hidden_rows;
mod kv_cache;

pub use engine::ram;

pub use chat_template::{ChatMessage, ChatTemplate, ChatTemplateError};
pub use model::{load_cpu_stage, load_plain_stage};
pub use sampler::{SampleError, Sampler, SamplerSettings};
pub use tokenizer::{Tokenizer, TokenizerError};
