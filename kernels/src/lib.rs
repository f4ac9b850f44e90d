//! Tensors on a device: weights as stored, the model read top to bottom, and a stage of it as one object.
//!
//! `stage` is what the rest of the program sees. Next: `stage.rs`, then `model.rs` for how a CPU computes one.

pub mod device;
pub mod stage;

pub mod bench;
mod cpu;
mod kv_cache;
pub mod model;
mod pool;
pub mod threads;

pub mod decoder;
pub mod order;
pub mod recipe;
pub mod rotary;
pub mod tile;

pub mod chat_template;
pub mod gpu;
pub mod grid;
pub mod quant;
pub mod sampler;
pub mod tokenizer;
pub mod weights;

pub use chat_template::{ChatMessage, ChatTemplate, ChatTemplateError};
pub use model::{load_cpu_stage, load_plain_stage};
pub use sampler::{SampleError, Sampler, SamplerSettings};
pub use tokenizer::{Tokenizer, TokenizerError};
