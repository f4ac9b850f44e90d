//! Inference and stencil kernels: quantised weights, transformer decoding, grid simulation, and the devices they run on.
//!
//! The rest of the program loads a model as a `stage`. Next: `stage.rs`, then `model.rs` for the CPU engine.

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
